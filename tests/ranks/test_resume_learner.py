"""A learner that was stopped and continued is, bit by bit, the one that was never stopped; on any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from r3async.checkpoint import CheckpointError
from r3async.checkpoint.tensors import LearnerParts, write_part
from r3async.learner import build_learner
from tests.helpers import checkpoint as hc
from tests.helpers import models as hm
from tests.helpers.checkpoint import assert_same, begun, continued, fresh, on_ranks, paths, settings

MODEL = {"num_hidden_layers": 4, "mlp_only_layers": [1], "vocab_size": 97}
"""The vocabulary does not divide by 2, and one layer is dense."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), **MODEL)


@pytest.fixture
def ranks_of(request):
    """The shared process group of so many ranks; None for one."""
    return lambda world: None if world == 1 else request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world])


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_ten_steps_equal_five_and_five_after_a_restart(model_path, tmp_path, backend):
    _in_two_parts(None, model_path, tmp_path, settings(backend))


@pytest.mark.parametrize(
    ("backend", "parallel"), [("megatron", {"dp": 2}), ("megatron", {"tp": 2}), ("torch", {"dp": 2})]
)
def test_ten_steps_of_ranks_equal_five_and_five(two_ranks, model_path, tmp_path, backend, parallel):
    _in_two_parts(two_ranks, model_path, tmp_path, settings(backend, **parallel))


def _in_two_parts(ranks, model_path, tmp_path, config):
    straight, half, whole = (fresh(tmp_path / name) for name in ("straight", "half", "whole"))
    ten = on_ranks(ranks, begun, model_path, config, 10, straight)
    five = on_ranks(ranks, begun, model_path, config, 5, half)
    rest = on_ranks(ranks, continued, model_path, config, paths(half), 5, 5, whole)
    for (all_steps, _), (before, _), (after, _) in zip(ten, five, rest, strict=True):
        assert before + after == all_steps
        assert len({m["rollout_kl/coef"] for m in all_steps}) == 10, "the controller has to have moved"
        assert len({m["lr"] for m in all_steps}) == 8, "and the warm-up"
    assert_same(paths(straight), paths(whole))
    moved = hc.contents(paths(whole)), hc.contents(paths(half))
    assert not any(torch.equal(moved[0][n], moved[1][n]) for n in moved[0] if n.endswith("input_layernorm.weight"))


CHILD = """
import sys
from pathlib import Path
from tests.helpers.checkpoint import continued, paths, settings
model, half, out = sys.argv[1:]
print(continued(Path(model), settings(dtype="bfloat16"), paths(Path(half)), 5, 5, Path(out))[0])
"""


def test_a_new_process_continues_in_bf16_from_the_float32_weights(model_path, tmp_path):
    config = settings(dtype="bfloat16")
    straight, half, whole = (fresh(tmp_path / name) for name in ("straight", "half", "whole"))
    ten, _ = begun(model_path, config, 10, straight)
    begun(model_path, config, 5, half)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CHILD, *map(str, (model_path, half, whole))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == repr(ten[5:])
    assert_same(paths(straight), paths(whole))


LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
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
        ("dp2-tp2-ep4", "one"),
        ("tp2-pp2-ep2", "dp2-tp2-ep4"),
        ("ep2", "tp2-pp2-ep2"),
    ],
)
def test_another_layout_loads_the_same_weights_and_optimizer(ranks_of, model_path, tmp_path, saved, loaded):
    _round_trip(ranks_of, model_path, tmp_path, settings(**LAYOUTS[saved]), settings(**LAYOUTS[loaded]))


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2), (4, 2)])
def test_fsdp_loads_what_another_number_of_ranks_saved(ranks_of, model_path, tmp_path, saved, loaded):
    _round_trip(ranks_of, model_path, tmp_path, settings("torch", dp=saved), settings("torch", dp=loaded))


@pytest.mark.parametrize(("saved", "loaded"), [({"pp": 2}, {"tp": 2}), ({}, {"pp": 2})])
def test_a_tied_embedding_is_saved_once_and_loaded_by_both_stages(ranks_of, tmp_path, saved, loaded):
    path = hm.make_hf_model(tmp_path / "tied", **MODEL, tie_word_embeddings=True)
    _round_trip(ranks_of, path, tmp_path, settings(**saved), settings(**loaded))


def _round_trip(ranks_of, model_path, tmp_path, saved, loaded):
    first, second = fresh(tmp_path / "first"), fresh(tmp_path / "second")
    on_ranks(ranks_of(saved.learner.parallel.world), begun, model_path, saved, 2, first)
    world = loaded.learner.parallel.world
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


def test_a_state_does_not_change_with_later_steps(model_path, tmp_path):
    config = settings()
    learner = build_learner(config, model_path)
    hc.train(learner, config, hc.batches(1))
    state = learner.state()
    now, later = fresh(tmp_path / "now"), fresh(tmp_path / "later")
    record = write_part(now, state)
    hc.train(learner, config, hc.batches(2))
    assert write_part(later, state) == record


def test_the_reference_model_is_the_start_path_s_after_a_resume(model_path, tmp_path):
    config, batch = settings(), hc.batches(1)[0]
    first = build_learner(config, model_path)
    expected = first.logprobs(batch)
    hc.train(first, config, hc.batches(2))
    write_part(tmp_path, first.state())
    config.algorithm.reference_kl.coef = 0.1
    second = build_learner(config, model_path)
    second.restore(LearnerParts(paths(tmp_path)))
    assert all((a == b).all() for a, b in zip(second.logprobs(batch, reference=True), expected, strict=True))
    assert any((a != b).any() for a, b in zip(second.logprobs(batch), expected, strict=True))


def test_random_numbers_go_on_where_they_were(model_path, tmp_path):
    learner = build_learner(settings(), model_path)
    torch.manual_seed(5)
    write_part(tmp_path, learner.state())
    expected = torch.rand(4)
    learner.restore(LearnerParts(paths(tmp_path)))
    assert torch.equal(torch.rand(4), expected)
    state = learner.state()
    for piece in state.pieces:
        if piece.place.name == "rng/cpu/0":
            piece.tensor.fill_(255)
    write_part(fresh(tmp_path), state)
    with pytest.raises(CheckpointError, match="rng/cpu/0: "):
        learner.restore(LearnerParts(paths(tmp_path)))


def test_another_backend_or_model_is_refused(model_path, tmp_path):
    write_part(tmp_path, build_learner(settings(), model_path).state())
    parts = LearnerParts(paths(tmp_path))
    with pytest.raises(CheckpointError, match=r'learner\.backend = "megatron"'):
        build_learner(settings("torch"), model_path).restore(parts)
    other = hm.make_hf_model(tmp_path / "other", **(MODEL | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"it is of another model"):
        build_learner(settings(), other).restore(parts)


def test_a_rank_s_missing_file_is_named(ranks_of, model_path, tmp_path):
    on_ranks(ranks_of(2), begun, model_path, settings(tp=2), 1, tmp_path)
    with pytest.raises(CheckpointError, match="2 ranks wrote it, but there are learner-00000-of-00002"):
        LearnerParts(paths(tmp_path)[:1])
