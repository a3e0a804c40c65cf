"""Ranks write one file of weights together, each its own part, and nobody holds the whole."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from r3async.actors.rank_actor import LocalRank
from r3async.config import Config
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.torch.backend import TorchLearner
from r3async.weights.delta import apply_delta, digest_version
from r3async.weights.interfaces import delta_path
from r3async.weights.sharded_store import PartFolder, ShardedVersionStore
from r3async.weights.version_reader import verify_version_file
from r3async.world.disk import SystemFiles
from tests.helpers.parity import config

EVERYTHING, STAGES = {"dp": 2, "tp": 2, "ep": 4}, {"tp": 2, "pp": 2, "ep": 2}
held: list[LocalRank] = []
"""Of a rank's process."""


def opened(kind, path: Path, settings: Config):
    held.append(LocalRank(settings, kind.from_pretrained(settings, path)))
    held[0].set_weight_transport("shared_memory", True)
    return len(held)


def snapshot(version: int, by: float):
    """Weights that `by` moved, copied. Returns how many bytes this rank copied, and what rank 0 exports."""
    (learner,) = held
    backend = learner.backend
    with torch.no_grad():
        for parameter in backend.optimizer.parameters:
            parameter.add_(by)  # a part of it, where it is divided
    learner.snapshot_weights(version)
    return sum(t.nbytes for t in learner._snapshot[1].values()), backend.export_weights()


def each(arguments, name):
    (learner,) = held
    import torch.distributed as dist

    mine = arguments[dist.get_rank()]
    return None if mine is None else getattr(learner, name)(*mine)  # None: not this one's turn


def closed():
    held.pop().close()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(MegatronLearner, EVERYTHING), (MegatronLearner, STAGES), (TorchLearner, {"dp": 4})],
    ids=["dp2-tp2-ep4", "tp2-pp2-ep2", "fsdp4"],
)
def test_the_file_is_what_rank_0_would_export_and_every_rank_copies_its_part(
    four_ranks, model_path, tmp_path, kind, layout
):
    settings = config(**layout)
    four_ranks.call(opened, kind, model_path, settings)
    try:
        folder = PartFolder(tmp_path)
        publisher = ShardedVersionStore(
            lambda name, given: [args and getattr(folder, name)(*args) for args in given],
            lambda name, given: four_ranks.call(each, given, name),
            [list(range(4))],
            deltas=True,
        )
        before = None
        for version, by in enumerate((0.0, 1e-3, 1e-3)):
            answers = four_ranks.call(snapshot, version, by)
            publication = publisher.publish_shares()
            four_ranks.call(each, [()] * 4, "discard_snapshot")
            manifest, exported = publication.manifest, answers[0][1]
            verify_version_file(manifest)
            written = load_file(manifest.path)
            assert set(written) == set(exported)
            assert all(torch.equal(written[n], t.to(written[n].dtype)) for n, t in exported.items())
            copied = [nbytes for nbytes, _ in answers]
            assert sum(copied) == sum(t.nbytes for t in exported.values())
            assert max(copied) < sum(copied) / 2
            if publication.transport_data[0].base is not None:
                files = SystemFiles()
                with files.open(Path(before.path)) as old, files.open(delta_path(Path(manifest.path))) as delta:
                    made = b"".join(map(bytes, apply_delta(digest_version(before), old, delta)))
                assert made == Path(manifest.path).read_bytes()
            before = manifest
        assert not [name for name in SystemFiles().list_names(folder.path) if name.startswith(".")]
        folder.close()
    finally:
        four_ranks.call(closed)
