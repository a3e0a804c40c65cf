"""Ranks of a learner in Ray actors and a gloo process group, of which one is killed at any point: what follows is, bit by bit,
what would have followed. Every order of events is in `tests/unit/test_rank_restarts.py`."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from r3async.actors.rank_actor import RankActor
from r3async.actors.ranks import RemoteRanks
from r3async.checkpoint.rank_files import LearnerStateReader
from tests.helpers import models as hm
from tests.helpers.checkpoint import contents, paths, settings
from tests.helpers.parity import BUDGET, LENGTHS, of_rank

pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("local_ray")]

STEPS = 6
KILLS = [
    {"rank": 1, "call": "run_minibatches", "at": "forward"},
    {"rank": 0, "call": "run_minibatches", "at": "all_reduce"},
    {"rank": 1, "call": "stage_recovery_copy", "at": "begin"},
    {"rank": 0, "call": "snapshot_weights", "at": "begin"},
    {"rank": 1, "call": "write_snapshot", "at": "begin"},
    {"rank": 0, "call": "write_checkpoint", "at": "begin"},
    {"rank": 1, "call": "stage_checkpoint", "at": "end"},
    {"rank": 0, "call": "run_minibatches", "at": "end"},
    {"rank": 1, "call": "run_minibatches", "at": "all_reduce"},
    {"rank": 0, "call": "run_minibatches", "at": "forward"},
]
"""In this order: the first one whose rank makes its call ends its process at that point."""


class MortalRank(RankActor):
    """Looks up in the run's directory when it is to die."""

    def __init__(self, world, rank, config, model_path, run_dir):
        super().__init__(world, rank, config, model_path, run_dir)
        self.kills = os.path.join(run_dir, "kills.json")

    def call_method(self, name, *args, **kwargs):
        with open(self.kills) as file:
            kills = json.load(file)
        if not kills or (kills[0]["rank"], kills[0]["call"]) != (self._rank, name):
            return super().call_method(name, *args, **kwargs)

        def die(*args, **kwargs):
            with open(f"{self.kills}.{self._rank}", "w") as file:
                json.dump(kills[1:], file)
            os.replace(file.name, self.kills)  # the other ranks read it
            os.kill(os.getpid(), signal.SIGKILL)

        if kills[0]["at"] == "begin":
            die()
        elif kills[0]["at"] == "forward":
            self._learner.backend.forward = die
        elif kills[0]["at"] == "all_reduce":
            dist.all_reduce = die
        made = super().call_method(name, *args, **kwargs)
        assert kills[0]["at"] == "end", "it did not come to that"
        die()
        return made


class MortalLearner(RemoteRanks):
    actor_class = MortalRank


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"))


def shares(step):
    from r3async.learner.micro_batches import pack_samples

    packed = pack_samples(hm.make_samples(step, LENGTHS, temperature=0.8), BUDGET)
    return [of_rank(packed, rank, 2) for rank in range(2)]


def play(model_path, directory, kills, **parallel):
    """Steps, each with a version that is written beside the step that follows, and checkpoints. Returns the versions, metrics,
    and states; the scores and facts at the end; the kills that are left, and events."""
    directory.mkdir()
    (directory / "kills.json").write_text(json.dumps(kills))
    told, config = [], settings(**parallel)
    config.weights.directory = str(directory / "weights")
    learner = MortalLearner.load(
        config, model_path, directory, report_event=lambda event, **facts: told.append((event, facts))
    )
    versions, metrics = [], []
    try:
        learner.set_weight_transport("shared_memory")
        with ThreadPoolExecutor(2) as others:
            writing = storing = None
            for step in range(STEPS):
                results = learner.run_minibatches([shares(step)], version=step)
                metrics.append([r.metrics for r in results])
                if writing is not None:
                    versions.append(load_file(writing.result(120).manifest.path))
                learner.snapshot_weights(step + 1)
                writing = others.submit(learner.write_version)
                if step % 2 == 0:
                    out = directory / f"state-{step}"
                    out.mkdir()
                    learner.stage_checkpoint()
                    storing = others.submit(learner.write_checkpoint, out)
                else:
                    storing.result(120)
            versions.append(load_file(writing.result(120).manifest.path))
        scores = learner.score_tokens(np.arange(10, 30, dtype=np.int32))
        left = json.loads((directory / "kills.json").read_text())
        states = [contents(paths(directory / f"state-{step}")) for step in range(0, STEPS, 2)]
        out = directory / "end"
        out.mkdir()
        learner.stage_checkpoint()
        learner.write_checkpoint(out)
        states.append(contents(paths(out)))
        facts = LearnerStateReader(paths(out)).metadata
    finally:
        learner.close()
    return versions, metrics, states, scores, facts, left, told


@pytest.mark.parametrize("parallel", [{"dp": 2, "ep": 2}])
@pytest.mark.nightly
def test_ranks_that_are_killed_at_any_point_leave_the_weights_that_they_would_have_left(model_path, tmp_path, parallel):
    straight = play(model_path, tmp_path / "straight", [], **parallel)
    killed = play(model_path, tmp_path / "killed", KILLS, **parallel)
    *ours, left, told = killed
    *theirs, _, nothing = straight
    assert (left, nothing) == ([], [])
    print("\n".join(map(str, told)))
    # Ranks that are lost while they start again are started once more, without an event of their own.
    assert [event for event, _ in told] == ["rank_lost", "ranks_restarted"] * (len(told) // 2)
    assert 1 <= len(told) // 2 <= len(KILLS)
    for (versions, metrics, states, scores, facts), (exact, rows, kept, scored, same) in [(ours, theirs)]:
        assert len(versions) == len(exact) == STEPS
        for version, expected in zip([*versions, *states], [*exact, *kept], strict=True):
            assert set(version) == set(expected)
            assert all(torch.equal(version[name], expected[name]) for name in expected)
        assert metrics == rows
        assert facts == same
        np.testing.assert_array_equal(scores, scored)
