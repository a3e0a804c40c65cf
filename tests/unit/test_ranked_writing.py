"""The learner of several ranks publishes what they hold, each its own part; see also `tests/ranks/test_shared_writing.py`."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from r3async.actors.rank_actor import LocalRank
from r3async.actors.rank_calls import RankCalls, RankProcesses
from r3async.actors.ranks import RemoteRanks
from r3async.config import load_config
from r3async.learner import LearnerError
from r3async.weights.delta import digest_version
from r3async.weights.interfaces import delta_path
from r3async.weights.manifest import WeightError
from r3async.weights.version_reader import iter_verified_tensors, verify_version_file


class Backend:
    """A rank's weights, of which it hands in its own."""

    def __init__(self, rank: int):
        generator = torch.Generator().manual_seed(rank)
        self.weights = {f"rank{rank}.{i}": torch.randn(30_000, generator=generator) * 0.02 for i in range(2)}
        self.whole = {f"router{rank}.e_score_correction_bias": torch.arange(4.0) + rank}

    def export_weights(self, *, copy=True):
        return dict(self.iter_full_weights())

    def iter_full_weights(self):
        yield from self.weights.items()
        yield from self.whole.items()

    def step(self):
        for tensor in self.weights.values():
            tensor += 3e-6


class Called:
    """Actors in this process: a call is made when it is begun."""

    def begin_call(self, actor, method, *args, concurrency_group="", **kwargs):
        name, *given = args
        return SimpleNamespace(value=getattr(actor, name)(*given, **kwargs))

    def wait_for_call(self, calls, timeout=None):
        return list(calls), []

    def get(self, call, timeout=None):
        return call.value

    def kill_actor(self, actor, restart=False):
        pass


@pytest.fixture
def ranked(tmp_path):
    overrides = ["learner.parallel.dp=2", "generator.dtype=bfloat16", f"weights.directory={tmp_path}"]
    config = load_config("quickstart", overrides)
    ranks = [LocalRank(config, Backend(rank)) for rank in range(2)]
    made = RemoteRanks(config, RankProcesses(RankCalls(Called(), ranks), 7, [(1, "here"), (2, "here")]))
    made.locals = ranks
    yield made
    made.close()


def published(ranked, version):
    for each in ranked.locals:
        each.snapshot_weights(version)
    return ranked.write_version()


def test_every_rank_writes_its_part_and_the_learner_says_what_is_there(ranked):
    ranked.set_weight_transport("tcp")
    before = None
    for version in range(3):
        publication = published(ranked, version)
        manifest = publication.manifest
        verify_version_file(manifest)
        read = dict(iter_verified_tensors(manifest))
        exact = [dict(each.backend.iter_full_weights()) for each in ranked.locals]
        assert read.keys() == exact[0].keys() | exact[1].keys()
        for name, tensor in {**exact[0], **exact[1]}.items():
            kept = torch.float32 if "bias" in name else torch.bfloat16
            assert torch.equal(read[name], tensor.to(kept)), name
        (part,) = publication.transport_data
        assert (part.path, part.base) == (manifest.path, before and digest_version(before))
        assert delta_path(Path(manifest.path)).exists() == (before is not None)
        for each in ranked.locals:
            each.backend.step()
        before = manifest


def test_a_rank_that_holds_another_version_or_another_tensor_is_named(ranked):
    ranked.set_weight_transport("shared_memory")
    published(ranked, 1)
    for each, version in zip(ranked.locals, (2, 3), strict=True):
        each.snapshot_weights(version)
    with pytest.raises(WeightError, match=r"the ranks hold versions \[2, 3\]"):
        ranked.write_version()
    ranked.locals[0].discard_snapshot()
    with pytest.raises(LearnerError, match="no snapshot"):
        ranked.write_version()
    ranked.locals[1].discard_snapshot()
    ranked.locals[0].backend.weights["new"] = torch.zeros(3)
    with pytest.raises(WeightError, match="'new' is not what it was"):
        ranked.locals[0].snapshot_weights(4)


def test_nothing_is_written_before_the_transport_is_chosen(ranked):
    for each in ranked.locals:
        each.snapshot_weights(0)
    with pytest.raises(LearnerError, match="its transport is not chosen yet"):
        ranked.write_version()
