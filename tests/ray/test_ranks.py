"""A learner of several ranks in Ray actors, driven as one."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3async.actors.rank_actor import LocalRank, RankActor
from r3async.actors.ranks import RemoteRanks
from r3async.actors.run_placements import WRITE_LANE, rank_placement
from r3async.config import Config, config_to_dict
from r3async.learner import LearnerError
from r3async.weights.version_reader import verify_version_file
from r3async.world.real import REAL_WORLD
from tests.helpers import models as hm
from tests.helpers.parity import LENGTHS, batch, config, of_rank


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"))


def for_two_ranks():
    return [of_rank(batch(), rank, 2) for rank in range(2)]


class Both(NamedTuple):
    """The learner in this process, and in two actors with these settings, whose logs are below `directory`."""

    settings: Config
    alone: LocalRank
    ranked: RemoteRanks
    directory: Path


@pytest.fixture(scope="module", params=["rollout", "learner"])
def both(request, model_path, tmp_path_factory, local_ray):
    directory, settings = tmp_path_factory.mktemp("ranks"), config(replay=request.param, dp=2, ep=2)
    alone = LocalRank.load(config(replay=request.param), model_path)
    ranked = RemoteRanks.load(settings, model_path, directory)
    yield Both(settings, alone, ranked, directory)
    ranked.close()
    alone.close()


def test_ranks_in_actors_train_what_one_process_trains(both, model_path, tmp_path):
    settings, alone, ranked, directory = both
    expected = alone.run_minibatches([[batch()], [batch()]], version=0, trace=True)
    assert ranked.vocab_size == hm.VOCAB
    results = ranked.run_minibatches([for_two_ranks(), for_two_ranks()], version=0, trace=True)
    for ours, exact in zip(results, expected, strict=True):
        assert ours.metrics == pytest.approx(exact.metrics, rel=1e-4, abs=1e-6)
        traced = [i for t in ours.traces for i in t.sample_ids]
        assert sorted(traced) == sorted(f"s{i}" for i in range(len(LENGTHS)))
    # The learner's own routes of a pass before the first update: all of them in the first minibatch, fewer in the second.
    agreement = [r.metrics["routing/agreement"] for r in results]
    if settings.routing.replay == "learner":
        assert agreement[0] == 1
        assert 0.2 < agreement[1] < 1
    else:
        assert max(agreement) < 0.2
    ranked.set_weight_transport("shared_memory")
    ranked.snapshot_weights(3)
    with ThreadPoolExecutor(1) as writer:  # beside a step
        writing = writer.submit(ranked.write_version)
        ranked.run_minibatches([for_two_ranks()], version=1)
        manifest = writing.result(240).manifest
    verify_version_file(manifest)
    ranked.snapshot_weights(4)
    manifest = ranked.write_version(versions_in_use=[3]).manifest
    assert manifest.version == 4
    alone.run_minibatches([[batch()]], version=1)
    ranked.save_model(tmp_path / "saved")
    saved, exact = hm.load_weights(tmp_path / "saved"), load_file(manifest.path)
    source = load_file(model_path / "model.safetensors")
    assert set(saved) == set(source) == set(exact)
    assert all(torch.equal(saved[n].to(exact[n].dtype), exact[n]) for n in saved)
    ids = np.arange(10, 30, dtype=np.int32)
    for temperature in (1.0, 0.7):
        np.testing.assert_allclose(
            ranked.score_tokens(ids, temperature), alone.score_tokens(ids, temperature), atol=1e-3
        )
    assert (directory / "logs" / "learner-rank-1.log").exists()


class ThreadsOfCalls(RankActor):
    """A rank that says which thread made a call."""

    def call_method(self, name, *args, **kwargs):
        return threading.get_ident()


@pytest.mark.usefixtures("local_ray")
def test_a_rank_makes_its_torch_calls_in_one_thread_and_writes_in_another(tmp_path):
    actors, made = REAL_WORLD.actors, (0, config_to_dict(config()), "", str(tmp_path))
    actor = actors.spawn_actor(ThreadsOfCalls, *made, name="rank", actor_options=rank_placement(config()))
    try:
        calls, writes = [], []
        for _ in range(5):
            calls += [actors.begin_call(actor, "call_method", "score_tokens") for _ in range(4)]
            writes.append(actors.begin_call(actor, "call_method", "write_version", concurrency_group=WRITE_LANE))
        calls, writes = actors.get(calls, timeout=240), actors.get(writes, timeout=240)
    finally:
        actors.kill_actor(actor)
    assert len(set(calls)) == len(set(writes)) == 1
    assert calls[0] != writes[0]


def test_a_rank_that_dies_and_may_not_start_again_ends_the_step_with_its_number(both, monkeypatch):
    """The last test of each pair of actors."""
    _, _, ranked, directory = both
    monkeypatch.setattr("r3async.actors.ranks.MAX_CONSECUTIVE_RESTARTS", 0)
    assert REAL_WORLD.processes.request_stack_dump(*ranked.processes[0])  # as at a stall
    deadline = time.monotonic() + 240
    while "most recent call first" not in (directory / "logs" / "learner-rank-0.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(ranked.processes[1][0], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(LearnerError, match="rank 1 of the learner was lost"):
        ranked.run_minibatches([for_two_ranks()], version=2)
    assert time.monotonic() - started < 60  # the other rank, which waits for it, is not waited for
