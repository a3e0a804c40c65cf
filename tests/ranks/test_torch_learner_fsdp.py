"""The transformers learner on two ranks (FSDP2 over gloo) against plain transformers in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers as tf

from r3async.learner import LearnerError
from r3async.learner.micro_batches import MicroBatch, collate_samples, make_padding_batch, pack_samples
from r3async.learner.torch.backend import TorchLearner
from r3async.learner.train_step import agree_on_counts
from tests.helpers import architectures as ha
from tests.helpers import published
from tests.helpers import torch as ht
from tests.helpers.steps import train_minibatch
from tests.helpers.torch import settings

QWEN2 = {"intermediate_size": 56, "moe_intermediate_size": 40, "num_experts": 8, "shared_expert_intermediate_size": 40}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {name: ht.make_model(tmp_path_factory.mktemp(name), name) for name in ht.FAMILIES}
    made["tied"] = ht.make_model(tmp_path_factory.mktemp("tied"), "qwen3", tie_word_embeddings=True)
    # Its shared expert's gate has one row: a rank is left without any of it.
    made["qwen2"] = ht.save_random(tmp_path_factory.mktemp("qwen2"), tf.Qwen2MoeConfig(**ht.SHARED, **QWEN2))
    return made


def _layers(name: str) -> int:
    return ht.moe_layers("qwen3" if name == "tied" else name)


def _share(micro_batches: list[MicroBatch], rank: int) -> list[MicroBatch]:
    """Of three micro-batches the first rank gets two; the other makes up with padding."""
    assert len(micro_batches) == 3
    return micro_batches[:2] if rank == 0 else [micro_batches[2], make_padding_batch(micro_batches[0])]


def _learner(path: Path, **changes: Any) -> TorchLearner:
    return TorchLearner.from_pretrained(settings(learner__parallel={"dp": 2}, **changes), path)


def _step(path: Path, micro_batches: list[MicroBatch], recompute: str) -> dict[str, Any]:
    learner = _learner(path, learner__recompute=recompute)
    mine = _share(micro_batches, dist.get_rank())
    before = learner.score_sequence(np.arange(20))
    result, gradients = ht.gradients_of_step(learner, mine)
    after = learner.score_sequence(np.arange(20))
    return {
        "result": result,
        "gradients": {n: g.numpy() for n, g in gradients.items()},
        "moved": np.abs(after - before).max(),
        "after": after,
        "version": learner.update_count,
        "exported": {n: t.numpy() for n, t in learner.export_weights().items()},
    }


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *((name, r) for name in ht.FAMILIES for r in ("none", "full")),
        ("qwen3", "selective"),
        ("tied", "none"),
        ("qwen2", "full"),
    ],
)
def test_loss_and_all_gradients_equal_transformers_with_forced_routes(two_ranks, models, name, recompute):
    samples = ht.recorded_samples(_layers(name), temperature=0.8)
    micro_batches = pack_samples(samples, ht.BUDGET)
    first, second = two_ranks.call(_step, models[name], micro_batches, recompute)
    alone = TorchLearner.from_pretrained(settings(), models[name])
    if name == "qwen2":  # its reference would need to know its shared expert; one rank equals transformers, see there
        result, expected = ht.gradients_of_step(alone, micro_batches)
        losses = {k: result.metrics[k] for k in ("loss/policy", "loss/rollout_kl", "grad_norm")}
    else:
        losses, expected = ht.reference_step(models[name], samples, settings())
        train_minibatch(alone, micro_batches)
    for rank in (first, second):
        gradients = {n: torch.from_numpy(g) for n, g in rank["gradients"].items()}
        error, worst = ht.worst_error(gradients, expected)
        assert error < 1e-5, worst
        for key, value in losses.items():
            assert rank["result"].metrics[key] == pytest.approx(value, rel=1e-5), key
        assert rank["version"] == 1
        assert rank["moved"] > 1e-2
    assert first["result"].metrics == second["result"].metrics
    assert first["result"].metrics["batch/micro_batches"] == 3
    assert first["result"].expert_load.sum(axis=1).tolist() == [sum(ht.LENGTHS) * ht.TOP_K] * _layers(name)
    # The optimizer did to the shards what it does to the whole, and export puts them together.
    assert second["exported"] == {}
    want = alone.export_weights()
    assert set(first["exported"]) == set(want)
    for key, tensor in want.items():
        # Adam's first step is lr * sign(gradient): where a gradient is almost nothing its sign may differ.
        assert np.abs(first["exported"][key] - tensor.numpy()).mean() < 1e-2 * 1e-3, key
    assert np.array_equal(first["after"], second["after"])
    assert np.abs(first["after"] - alone.score_sequence(np.arange(20))).max() < 1e-3


def _fail_then_train(path: Path, micro_batches: list[MicroBatch], at: str) -> dict[str, Any]:
    learner = _learner(path, learner__recompute="full")
    mine = _share(micro_batches, dist.get_rank())
    exact = {n: t.clone() for n, t in learner.export_weights().items()}
    plain = learner.logprobs(mine)
    calls = []

    def break_once(*_: Any) -> None:
        calls.append(None)
        if len(calls) == {"forward": 3, "backward": 4}[at]:  # of the second micro-batch
            raise RuntimeError("broken expert")

    handle = learner.model.layers[-1].mlp.experts.register_forward_pre_hook(break_once)
    with pytest.raises(RuntimeError, match="broken expert"):
        train_minibatch(learner, mine)
    handle.remove()
    assert learner.update_count == 0
    assert learner.replay.current_routes is None
    assert all(p.grad is None for p in learner.model.parameters())
    assert all(torch.equal(t, exact[n]) for n, t in learner.export_weights().items())
    assert all(np.array_equal(a, b) for a, b in zip(plain, learner.logprobs(mine), strict=True))
    return train_minibatch(learner, mine).metrics


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_failed_step_leaves_weights_and_sharding_as_they_were(two_ranks, models, at):
    micro_batches = pack_samples(ht.recorded_samples(3), ht.BUDGET)
    first, second = two_ranks.call(_fail_then_train, models["mixtral"], micro_batches, at)
    alone = train_minibatch(TorchLearner.from_pretrained(settings(), models["mixtral"]), micro_batches).metrics
    assert first == second
    for key in ("loss/policy", "grad_norm", "routing/agreement"):
        assert first[key] == pytest.approx(alone[key], rel=1e-5)


def _passes(path: Path, micro_batches: list[MicroBatch], out: Path) -> tuple[Any, ...]:
    learner = _learner(path, learner__dtype="bfloat16", routing__replay="learner")
    mine = _share(micro_batches, dist.get_rank())
    before = learner.logprobs(mine)
    recorded = learner.record_learner_routes(mine)
    after = learner.logprobs(recorded)
    assert all(np.array_equal(a, b) for a, b in zip(before, learner.logprobs(mine), strict=True))
    assert np.array_equal(
        recorded[0].table["routing_recorded"], np.arange(recorded[0].num_tokens) < recorded[0].num_real_tokens
    )
    free = learner.logprobs(mine, replay=False)
    metrics = train_minibatch(learner, recorded).metrics
    learner.save_pretrained(out)
    assert (out / "model.safetensors.index.json").is_file(), "on every rank, when the call returns"
    with pytest.raises(LearnerError, match="between 1 and 2 micro-batches"):
        agree_on_counts(learner, mine[: 1 + dist.get_rank()])
    with pytest.raises(LearnerError, match=r"learner\.parallel\.dp is 1, but 2 ranks"):
        TorchLearner.from_pretrained(settings(), path)
    return (
        metrics,
        all(np.array_equal(a, b) for a, b in zip(after, free, strict=True)),
        learner.score_sequence(np.arange(30)),
    )


def test_passes_without_gradient_records_and_files(two_ranks, models, tmp_path):
    micro_batches = pack_samples(ht.recorded_samples(2), ht.BUDGET)
    (metrics, same, score), (_, same_second, _) = two_ranks.call(
        _passes, models["qwen3"], micro_batches, tmp_path / "out"
    )
    assert same
    assert same_second
    assert metrics["routing/agreement"] == 1.0
    assert metrics["routing/recorded_fraction"] == 1.0
    saved = TorchLearner.from_pretrained(settings(learner__dtype="bfloat16"), tmp_path / "out")
    assert saved.export_weights()["lm_head.weight"].dtype == torch.bfloat16
    assert np.abs(saved.score_sequence(np.arange(30)) - score).max() < 1e-2
    assert np.abs(saved.logprobs([collate_samples(ht.recorded_samples(2))])[0]).max() > 1


def _export(path: Path, out: Path) -> dict[str, np.ndarray]:
    learner = _learner(path)
    learner.save_pretrained(out)
    return {name: tensor.numpy() for name, tensor in learner.export_weights().items()}


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_ranks_read_and_write_published_forms_as_one_does(two_ranks, tmp_path, form):
    """Parts of matrices do not begin with a block of fp8."""
    if form == "fp8":
        path = published.make_vision_model(tmp_path / "m", hidden_size=192)
        published.quantize_to_fp8(path)
    else:
        path = ha.make_model(tmp_path / "m", "gpt_oss", hidden_size=64, intermediate_size=96)
        published.quantize_to_mxfp4(path)
    whole, nothing = two_ranks.call(_export, path, tmp_path / "ranks")
    alone = TorchLearner.from_pretrained(settings(), path)
    expected = alone.export_weights()
    assert not nothing
    assert whole.keys() == expected.keys()
    assert all(np.array_equal(whole[name], tensor) for name, tensor in expected.items())
    alone.save_pretrained(tmp_path / "alone")
    written, same = published.read(tmp_path / "ranks"), published.read(tmp_path / "alone")
    assert written.keys() == same.keys()
    assert bool(alone.carried) == (form == "fp8")
    assert all(torch.equal(written[name], tensor) for name, tensor in same.items())
