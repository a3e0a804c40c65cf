"""The transformers learner against plain transformers with forced routes, in one process."""

import contextlib
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3async.data.routes import RoutingError
from r3async.data.tokens import Sample
from r3async.learner.micro_batches import collate_samples, make_padding_batch, pack_samples, pad_to_multiple
from r3async.learner.torch.backend import TorchLearner
from tests.helpers import torch as ht
from tests.helpers.models import forced_routes, gates_of, load_hf, make_samples, score
from tests.helpers.steps import train_minibatch
from tests.helpers.torch import settings

VARIANTS = {
    "qwen3": ("qwen3", {}),
    "qwen3-unnormalised-tied": ("qwen3", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "olmoe-normalised": ("olmoe", {"norm_topk_prob": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory for each variant."""
    return {
        name: ht.make_model(tmp_path_factory.mktemp(name), family, **changes)
        for name, (family, changes) in VARIANTS.items()
    }


@pytest.fixture(scope="module")
def references(models):
    """Losses and gradients of the step that the parity tests take, by variant."""
    return {
        name: ht.reference_step(
            path, ht.recorded_samples(ht.moe_layers(VARIANTS[name][0]), temperature=0.8), settings()
        )
        for name, path in models.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_all_gradients_equal_transformers_with_forced_routes(models, references, name, recompute):
    learner = TorchLearner.from_pretrained(settings(learner__recompute=recompute), models[name])
    layers = ht.moe_layers(VARIANTS[name][0])
    micro_batches = pack_samples(ht.recorded_samples(layers, temperature=0.8), ht.BUDGET)
    assert len(micro_batches) == 3
    micro_batches[1] = pad_to_multiple(micro_batches[1], 7)  # with padding rows of its own
    passes = []
    for router in learner.model.routers:
        router.register_forward_hook(lambda m, *_: passes.append(m))
    result, gradients = ht.gradients_of_step(learner, [*micro_batches, make_padding_batch(micro_batches[0])])
    losses, expected = references[name]
    for key, value in losses.items():
        assert result.metrics[key] == pytest.approx(value, rel=1e-5), key
    error, worst = ht.worst_error(gradients, expected)
    assert error < 1e-5, worst
    assert {n for n in gradients if ".gate." in n}, "routers receive gradient"
    # Recomputed passes do run the routers again, and count their tokens once. Nothing is run for nothing but padding.
    assert len(passes) == 3 * layers * (1 if recompute == "none" else 2)
    assert result.expert_load.sum(axis=1).tolist() == [sum(ht.LENGTHS) * ht.TOP_K] * layers
    assert result.layer_agreement.shape == (layers,)
    assert 0 < result.metrics["routing/agreement"] < 0.2  # random routes
    assert result.metrics["batch/micro_batches"] == 3
    assert learner.update_count == 1


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "olmoe"])
def test_logprobs_and_score_equal_transformers(models, name):
    learner, reference = TorchLearner.from_pretrained(settings(), models[name]), load_hf(models[name])
    samples = make_samples(3, ht.LENGTHS, layers=ht.moe_layers(name), vocab=ht.VOCAB, temperature=0.7)
    samples = ht.fully_recorded(samples)
    micro_batches = [*pack_samples(samples, ht.BUDGET), make_padding_batch(collate_samples(samples), 3)]
    by_id = {s.sample_id: s for s in samples}

    def expected(sample: Sample, *, replay: bool, temperature: float) -> np.ndarray:
        with forced_routes(reference, sample.table["routed_experts"]) if replay else contextlib.nullcontext():
            return score(reference, sample.table["token_ids"], temperature)

    for replay in (True, False):
        for m, got in zip(micro_batches, learner.logprobs(micro_batches, replay=replay), strict=True):
            assert got.dtype == np.float32
            assert got.shape == (m.num_tokens,)
            for i, sample_id in enumerate(m.sample_ids):
                mine = got[m.cu_seqlens[i] : m.cu_seqlens[i + 1]]
                assert mine[0] == 0
                assert np.abs(mine[1:] - expected(by_id[sample_id], replay=replay, temperature=0.7)).max() < 1e-4
            assert not got[m.num_real_tokens :].any()
    for temperature in (1.0, 0.7):
        got = learner.score_sequence(samples[1].table["token_ids"], temperature)
        assert got.dtype == np.float32
        assert np.abs(got - expected(samples[1], replay=False, temperature=temperature)).max() < 1e-4
    assert all(p.grad is None for p in learner.model.parameters())


def test_a_trace_tells_what_every_router_did(models):
    learner = TorchLearner.from_pretrained(settings(learner__recompute="full"), models["qwen3"])
    (own,) = learner.record_learner_routes([collate_samples(ht.recorded_samples(2))])
    micro_batches = pack_samples(ht.recorded_samples(2), ht.BUDGET)
    micro_batches[2] = pad_to_multiple(micro_batches[2], 7)
    before = learner.logprobs(micro_batches)
    traces = train_minibatch(learner, micro_batches, trace=True).traces
    for trace, m, logprobs in zip(traces, micro_batches, before, strict=True):
        trained = m.table["loss_mask"][: m.num_real_tokens]
        assert trace.logprobs.shape == trained.shape
        np.testing.assert_allclose(trace.logprobs[trained], logprobs[: m.num_real_tokens][trained], atol=1e-5)
        assert np.isnan(trace.logprobs[~trained]).all()
    assert [t.sample_ids for t in traces] == [m.sample_ids for m in micro_batches]
    for trace, m in zip(traces, micro_batches, strict=True):
        wanted = m.table["routed_experts"][: m.num_real_tokens]
        assert trace.columns == [0, 1]
        assert np.array_equal(np.sort(trace.used, -1), np.sort(wanted, -1))
        # The first router has replayed nothing before it.
        at = own.sample_ids.index(m.sample_ids[0])
        rows = own.table["routed_experts"][own.cu_seqlens[at] : own.cu_seqlens[at + 1], 0]
        assert np.array_equal(np.sort(trace.own[: len(rows), 0], -1), np.sort(rows, -1))
    assert train_minibatch(learner, micro_batches).traces == []


def test_record_routes_records_what_the_learner_chooses_by_itself(models):
    learner = TorchLearner.from_pretrained(settings(routing__replay="learner"), models["qwen3"])
    samples = ht.recorded_samples(2)
    padded = make_padding_batch(collate_samples(samples), 2)
    recorded, padding = learner.record_learner_routes([collate_samples(samples), padded])
    assert recorded.table["routing_recorded"].all()
    assert not padding.table["routing_recorded"].any()
    assert padding.table["routed_experts"].shape == (2, 2, ht.TOP_K)

    seen = []
    reference = load_hf(models["qwen3"])
    for gate in gates_of(reference):
        gate.register_forward_hook(lambda m, i, out: seen.append(out[2]))
    for sample, start in zip(samples, recorded.cu_seqlens, strict=False):
        seen.clear()
        with torch.no_grad():
            reference(torch.from_numpy(sample.table["token_ids"].astype(np.int64))[None])
        rows = recorded.table["routed_experts"][start : start + len(sample.table)]
        assert np.array_equal(np.sort(rows, -1), np.sort(torch.stack(seen, 1).numpy(), -1))
    result = train_minibatch(learner, [recorded, padding])
    assert result.metrics["routing/agreement"] == 1.0
    assert result.metrics["routing/recorded_fraction"] == 1.0
    assert result.expert_load.sum(axis=1).tolist() == [sum(ht.LENGTHS) * ht.TOP_K] * 2, "of this step alone"


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-unnormalised-tied", "mixtral", "olmoe"])
def test_export_and_save_have_the_names_and_bits_of_the_checkpoint(models, tmp_path, name, dtype):
    learner = TorchLearner.from_pretrained(settings(learner__dtype=dtype), models[name])
    source, exported = load_file(models[name] / "model.safetensors"), learner.export_weights()
    assert set(source) == set(exported)
    for key, tensor in exported.items():
        assert torch.equal(tensor, source[key].to(getattr(torch, dtype))), key
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    kept = {key: tensor.clone() for key, tensor in exported.items()}
    train_minibatch(learner, pack_samples(ht.recorded_samples(ht.moe_layers(VARIANTS[name][0])), ht.BUDGET))
    assert all(torch.equal(exported[key], kept[key]) for key in kept), "a snapshot"
    for _ in range(2):  # the second replaces the first
        learner.save_pretrained(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == {"stand": "in"}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype
    saved, now = load_file(tmp_path / "out/model.safetensors"), learner.export_weights()
    assert set(saved) == set(source)
    assert all(torch.equal(saved[key], now[key]) for key in now)
    assert any(not torch.equal(now[key], kept[key]) for key in kept)
    again = TorchLearner.from_pretrained(settings(learner__dtype=dtype), tmp_path / "out").export_weights()
    assert all(torch.equal(saved[key], again[key]) for key in saved)


def test_the_backward_pass_of_a_micro_batch_has_to_begin_while_its_routes_are_bound(models):
    learner, fed = TorchLearner.from_pretrained(settings(), models["mixtral"]), make_samples(9, [30], vocab=ht.VOCAB)
    with learner.replay.bind_routes(collate_samples(fed)) as routes:
        hidden = routes.track_backward(ht.logits(learner, collate_samples(fed)))
    with pytest.raises(RoutingError, match="after its routes were released"):
        hidden.sum().backward()


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_replayed_experts_without_any_probability_leave_the_step_finite(models, name):
    """A router so sharp that the probabilities of the recorded experts round to 0: their gates must not be 0/0."""
    learner = TorchLearner.from_pretrained(settings(), models[name])
    with torch.no_grad():
        for gate in gates_of(learner.model.causal_lm):
            gate.weight.mul_(1e4)
    batches = pack_samples(ht.recorded_samples(ht.moe_layers(VARIANTS[name][0])), ht.BUDGET)
    before = learner.export_weights()
    result = train_minibatch(learner, batches)
    assert result.metrics["routing/agreement"] < 1, "some tokens replay experts that the router would not choose"
    assert np.isfinite(result.metrics["grad_norm"])
    assert result.metrics["optimizer/updates"] == 1
    assert any(not torch.equal(tensor, before[key]) for key, tensor in learner.export_weights().items())
