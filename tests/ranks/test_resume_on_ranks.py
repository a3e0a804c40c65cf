"""Ranks that were stopped and continued are, bit by bit, those that were never stopped; on any number of them."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from r3async.checkpoint import CheckpointError
from r3async.checkpoint.rank_files import LearnerStateReader
from tests.helpers import checkpoint as hc
from tests.helpers import models as hm
from tests.helpers.checkpoint import assert_same, begun, continued, fresh, in_two_parts, on_ranks, paths, settings


@pytest.mark.parametrize(
    ("backend", "parallel"),
    [("megatron", {"dp": 2}), ("megatron", {"tp": 2}), ("torch", {"dp": 2}), ("torch", {"dp": 2, "ep": 2})],
)
def test_ten_steps_of_ranks_equal_five_and_five(two_ranks, model_path, tmp_path, backend, parallel):
    in_two_parts(two_ranks, model_path, tmp_path, settings(backend, **parallel))


LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "one": {},
    "dp2-tp2-ep4": {"dp": 2, "tp": 2, "ep": 4},
    "tp2-pp2-ep2": {"tp": 2, "pp": 2, "ep": 2},
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("dp2", "one"),
        ("tp2", "one"),
        ("pp2", "one"),
        ("one", "tp2"),
        ("one", "pp2"),
        ("tp2", "ep2"),
        ("cp2", "ep2"),
        ("dp2-tp2-ep4", "one"),
        ("tp2-pp2-ep2", "dp2-tp2-ep4"),
        ("ep2", "tp2-pp2-ep2"),
    ],
)
def test_another_layout_loads_the_same_weights_and_optimizer(ranks_of, model_path, tmp_path, saved, loaded):
    _round_trip(ranks_of, model_path, tmp_path, settings(**LAYOUTS[saved]), settings(**LAYOUTS[loaded]))


FSDP_LAYOUTS = {"one": {}, "dp2": {"dp": 2}, "dp4": {"dp": 4}, "ep2": {"dp": 2, "ep": 2}, "dp4-ep2": {"dp": 4, "ep": 2}}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("dp2", "one"), ("one", "dp2"), ("dp4", "dp2"), ("dp4-ep2", "one"), ("one", "dp4-ep2"), ("dp4", "ep2")],
)
def test_another_layout_of_fsdp_loads_the_same(ranks_of, model_path, tmp_path, saved, loaded):
    first, second = (settings("torch", **FSDP_LAYOUTS[name]) for name in (saved, loaded))
    _round_trip(ranks_of, model_path, tmp_path, first, second)


@pytest.mark.parametrize(("saved", "loaded"), [({"pp": 2}, {"tp": 2}), ({}, {"pp": 2})])
def test_a_tied_embedding_is_saved_once_and_loaded_by_both_stages(ranks_of, tmp_path, saved, loaded):
    path = hm.make_hf_model(
        tmp_path / "tied", num_hidden_layers=4, mlp_only_layers=[1], vocab_size=97, tie_word_embeddings=True
    )
    _round_trip(ranks_of, path, tmp_path, settings(**saved), settings(**loaded))


def _round_trip(ranks_of, model_path, tmp_path, saved, loaded):
    first, second = fresh(tmp_path / "first"), fresh(tmp_path / "second")
    on_ranks(ranks_of(saved.learner.parallel.world_size), begun, model_path, saved, 2, first)
    world = loaded.learner.parallel.world_size
    on_ranks(ranks_of(world), continued, model_path, loaded, paths(first), 2, 0, second)
    assert len(paths(second)) == world
    assert_same(paths(first), paths(second))


def test_no_value_is_written_by_two_ranks(ranks_of, model_path, tmp_path):
    """What one rank alone writes is as many bytes as what four write together, less their headers."""
    alone, four = fresh(tmp_path / "alone"), fresh(tmp_path / "four")
    begun(model_path, settings(), 1, alone)
    on_ranks(ranks_of(4), begun, model_path, settings(**LAYOUTS["dp2-tp2-ep4"]), 1, four)
    sizes = [sum(t.nbytes for t in hc.contents(paths(out)).values()) for out in (alone, four)]
    assert sizes[0] == sizes[1]
    assert sum(p.stat().st_size for p in paths(four)) < sizes[0] + 4 * 100_000


def test_torch_distributed_checkpoint_reads_the_files(ranks_of, model_path, tmp_path):
    on_ranks(ranks_of(2), begun, model_path, settings(tp=2), 1, tmp_path)
    expected = hc.contents(paths(tmp_path))
    read = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_a_rank_s_missing_file_is_named(ranks_of, model_path, tmp_path):
    on_ranks(ranks_of(2), begun, model_path, settings(tp=2), 1, tmp_path)
    with pytest.raises(CheckpointError, match="2 ranks wrote it, but there are learner-00000-of-00002"):
        LearnerStateReader(paths(tmp_path)[:1])
