"""Ranks that divide the optimizer's state among copies make the updates, the checkpoints and the weights of those that do not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from r3async.checkpoint.rank_files import write_rank_file
from r3async.config import Config
from r3async.learner import build_learner
from tests.helpers.checkpoint import assert_same, batches, begun, continued, fresh, on_ranks, paths, settings, train

LAYOUTS = {
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},  # experts alone have copies
    "dp2-ep2": {"dp": 2, "ep": 2},
    "dp2-tp2": {"dp": 2, "tp": 2},
    "dp4-ep2": {"dp": 4, "ep": 2},
    "dp2-pp2": {"dp": 2, "pp": 2},
    "one": {},
}


def sharded(name: str, **options: Any) -> Config:
    config = settings(**options, **LAYOUTS[name])
    config.learner.shard_optimizer = True
    return config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["dp2", "cp2", "tp2", "dp2-ep2", "dp2-tp2", "dp4-ep2", "dp2-pp2"])
def test_shares_train_the_same_bits_as_copies(ranks_of, model_path, tmp_path, layout, dtype):
    config, divided = settings(dtype=dtype, **LAYOUTS[layout]), sharded(layout, dtype=dtype)
    ranks = ranks_of(config.learner.parallel.world_size)
    straight, half, whole = (fresh(tmp_path / name) for name in ("straight", "half", "whole"))
    copies = on_ranks(ranks, begun, model_path, config, 4, straight)
    first = on_ranks(ranks, begun, model_path, divided, 2, half)
    rest = on_ranks(ranks, continued, model_path, divided, paths(half), 2, 2, whole)
    assert_same(paths(straight), paths(whole))
    for (expected, _), (before, _), (after, _) in zip(copies, first, rest, strict=True):
        assert before + after == expected, "every metric, the norm of the gradient among them"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["dp2", "cp2", "tp2", "dp2-ep2", "dp2-tp2", "dp2-pp2"])
def test_divided_gradients_make_the_same_steps(ranks_of, model_path, layout, dtype):
    """Bit by bit with one micro-batch a step. With several the sums add up in another order: equal to rounding."""
    config, divided = (sharded(layout, dtype=dtype) for _ in range(2))
    divided.learner.shard_gradients = True
    ranks = ranks_of(config.learner.parallel.world_size)
    for count in (1, 2):
        expected, found = (ranks.call(stepped, model_path, each, count) for each in (config, divided))
        for (before, _), (after, kept) in zip(expected, found, strict=True):
            for name, tensor in before.items():
                if count == 1:
                    assert torch.equal(tensor, after[name]), name
                else:
                    torch.testing.assert_close(
                        tensor, after[name], rtol=2e-2 if dtype == "bfloat16" else 1e-4, atol=1e-4
                    )
            assert kept, "gradients of shares alone, wherever there are copies"


def stepped(path: Path, config: Config, count: int) -> tuple[dict[str, torch.Tensor], bool]:
    """The weights of a rank after two steps of `count` micro-batches, and whether it held gradients of shares alone."""
    learner = build_learner(config, path)
    kept: list[bool] = []
    squared_norm, optimizer = learner.optimizer.reducer.compute_squared_norm, learner.optimizer

    def note(gradients: Any) -> float:
        parts = zip(optimizer.parameters, optimizer.shares, gradients, strict=True)
        kept.append(all(g.shape == share.select_rows(p).shape for p, share, g in parts))
        return squared_norm(gradients)

    optimizer.reducer.compute_squared_norm = note
    try:
        width = config.learner.parallel.dp
        train(learner, config, [step[: count * width] for step in batches(2)])
        return {name: p.detach().clone() for name, p in learner.model.named_parameters()}, all(kept)
    finally:
        learner.close()


@pytest.mark.parametrize(("saved", "loaded"), [("dp2-tp2", "one"), ("dp4-ep2", "tp2"), ("dp2", "dp4-ep2")])
def test_a_divided_checkpoint_is_read_by_any_layout_and_the_other_way_round(
    ranks_of, model_path, tmp_path, saved, loaded
):
    written, taken, back = (fresh(tmp_path / name) for name in ("written", "taken", "back"))
    ranks, others = (ranks_of(settings(**LAYOUTS[name]).learner.parallel.world_size) for name in (saved, loaded))
    on_ranks(ranks, begun, model_path, sharded(saved), 2, written)
    on_ranks(others, continued, model_path, settings(**LAYOUTS[loaded]), paths(written), 2, 0, taken)
    assert_same(paths(written), paths(taken))
    on_ranks(ranks, continued, model_path, sharded(saved), paths(taken), 2, 0, back)
    assert_same(paths(written), paths(back))


def test_a_rank_holds_and_writes_its_share_alone(ranks_of, model_path, tmp_path):
    sizes = {}
    for name, config in (("copies", settings(dp=2)), ("shares", sharded("dp2"))):
        out = fresh(tmp_path / name)
        held = on_ranks(ranks_of(2), state_bytes, model_path, config, out)
        sizes[name] = held, [path.stat().st_size for path in paths(out)]
    (whole, _), (part, written) = sizes["copies"], sizes["shares"]
    assert max(part) < 0.51 * whole[0] == 0.51 * whole[1]
    assert sum(part) == whole[0]
    assert max(written) < 0.55 * sum(sizes["copies"][1])


def state_bytes(path: Path, config: Config, out: Path) -> int:
    """Of the masters and moments of a rank after a step, in memory of their own or not."""
    learner = build_learner(config, path)
    try:
        train(learner, config, batches(1))
        write_rank_file(out, learner.capture_state())
        return sum(t.nbytes for state in learner.optimizer.iter_states() for name, t in state.items() if name != "step")
    finally:
        learner.close()


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"offload_moments": True}, {"lora": True}])
@pytest.mark.parametrize("layout", ["dp2", "dp2-tp2"])
def test_a_shortened_step_and_what_is_published_are_the_same(ranks_of, model_path, layout, options):
    config = settings(dtype=options.get("dtype", "float32"), **LAYOUTS[layout])
    divided = sharded(layout, dtype=options.get("dtype", "float32"))
    for each in (config, divided):
        each.learner.offload_moments = "offload_moments" in options
        each.learner.lora.rank = 4 if "lora" in options else 0
    ranks = ranks_of(config.learner.parallel.world_size)
    expected, found = (ranks.call(shortened, model_path, each) for each in (config, divided))
    assert expected[0][0].keys() == found[0][0].keys()
    for name, tensor in expected[0][0].items():
        assert torch.equal(tensor, found[0][0][name]), name
    assert [own for _, own in expected] == [own for _, own in found], "the weights of every rank"


def shortened(path: Path, config: Config) -> tuple[dict[str, torch.Tensor], int]:
    """What is published of a rank after a step of which 0.4 is made, after a whole one; and a digest of its own weights."""
    from r3async.learner.digests import compute_digest, sum_digests

    learner = build_learner(config, path)
    try:
        train(learner, config, batches(2))
        learner.optimizer.shorten_step(1.0, 0.7)
        learner.optimizer.shorten_step(0.7, 0.4)
        own = sum_digests(compute_digest(name, p) for name, p in learner.model.named_parameters())
        return learner.export_weights(), own
    finally:
        learner.close()
