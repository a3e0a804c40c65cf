"""The Megatron learner against transformers and NumPy, and its routing replay against every way to go stale."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from r3async.batching.packing import collate, pack
from r3async.config import Config, config_from_dict
from r3async.learners.base import LearnerBackend, LearnerError
from r3async.learners.megatron.backend import MegatronLearner
from r3async.learners.megatron.hf import links, read_shape
from r3async.learners.megatron.logprobs import token_logprobs
from r3async.learners.megatron.modules import TorchRMSNorm, make_plan, plan_buckets
from r3async.learners.optimizer import MasterAdamW
from r3async.records import Sample
from r3async.routing import RoutingError
from tests import helpers_models as hm

LENGTHS = [9, 40, 5, 17, 40, 6]


def settings(**changes) -> Config:
    data = {
        "learner": {"dtype": "float32", "lr": 1e-2},
        "algorithm": {"rollout_kl": {"coef": 0.1}},
        "routing": {"min_recorded_fraction": 0.0},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        data[section][name] = value
    return config_from_dict(data)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def learner(model_path):
    return MegatronLearner(settings(), model_path)


def weights(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    return learner.export()


def logits(learner: MegatronLearner, micro_batch) -> torch.Tensor:
    shape = learner._shape
    plan = make_plan(
        micro_batch.cu_seqlens,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
        dtype=learner._dtype,
        device=torch.device("cpu"),
    )
    ids = torch.from_numpy(micro_batch.table["token_ids"].astype(np.int64))
    return learner.model.logits(learner.model(ids[None], None, None, packed_seq_params=plan)[:, 0])


def gradients(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """Gradients of all parameters, under Hugging Face names."""
    return {
        name: part
        for link in links(learner.model, learner._shape)
        for name, part in zip(link.names, link.split(link.parameter.grad), strict=True)
    }


def hf_gradients(model) -> dict[str, torch.Tensor]:
    """Gradients under checkpoint names: one tensor per expert and projection."""
    out = {}
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(parameter.grad):
                prefix = name.removesuffix("gate_up_proj")
                out[f"{prefix}{e}.gate_proj.weight"], out[f"{prefix}{e}.up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(parameter.grad):
                out[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = down
        else:
            out[name] = parameter.grad
    return out


def fully_recorded(samples: list[Sample]) -> list[Sample]:
    return [replace_columns(s, routing_recorded=np.ones(len(s.table), bool)) for s in samples]


def replace_columns(sample: Sample, **columns) -> Sample:
    return Sample(sample.sample_id, sample.table.with_columns(**columns), sample.temperature)


def own_routes(learner: MegatronLearner, micro_batch) -> np.ndarray:
    """What the learner chooses by itself: uint8 `[N, L, K]`, read from its routers' maps."""
    seen = []
    routers = [layer.mlp.router for layer in learner.model.decoder.layers if hasattr(layer.mlp, "router")]
    handles = [r.register_forward_hook(lambda m, i, out: seen.append(out[1])) for r in routers]
    with torch.no_grad():
        logits(learner, micro_batch)
    for handle in handles:
        handle.remove()
    return np.stack([m.nonzero()[:, 1].reshape(len(m), -1).numpy() for m in seen], axis=1).astype(np.uint8)


def with_routes(samples: list[Sample], routes: np.ndarray) -> list[Sample]:
    out, at = [], 0
    for sample in samples:
        rows = routes[at : at + len(sample.table)]
        out.append(replace_columns(sample, routed_experts=rows, routing_recorded=np.ones(len(rows), bool)))
        at += len(rows)
    return out


# -- parity with transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"tie_word_embeddings": True},
        {"mlp_only_layers": [1]},
        {"decoder_sparse_step": 2, "num_key_value_heads": 4, "rope_theta": 1e6},
    ],
    ids=["normalised", "unnormalised", "tied", "dense-between", "sparse-step"],
)
def test_logits_and_all_gradients_equal_transformers(tmp_path, changes):
    path = hm.make_hf_model(tmp_path / "m", **changes)
    learner, reference = MegatronLearner(settings(), path), hm.load_hf(path)
    moe = sum(learner._shape.moe_pattern)
    assert moe == {"mlp_only_layers": 2, "decoder_sparse_step": 1}.get(next(iter(changes), ""), 3)
    samples = fully_recorded(hm.make_samples(1, LENGTHS, layers=moe))
    micro_batch = collate(samples)
    weight = torch.randn(micro_batch.tokens, hm.VOCAB, generator=torch.Generator().manual_seed(0))

    with learner.replay.bound(micro_batch):
        ours = logits(learner, micro_batch)
        (ours * weight).sum().backward()
    at = 0
    for sample in samples:
        rows = slice(at, at := at + len(sample.table))
        with hm.forced_routes(reference, sample.table["routed_experts"]):
            theirs = reference(torch.from_numpy(sample.table["token_ids"].astype(np.int64))[None]).logits[0]
        assert (ours[rows] - theirs).abs().max() < 1e-5 * theirs.abs().max()
        (theirs * weight[rows]).sum().backward()
    got, want = gradients(learner), hf_gradients(reference)
    if learner._shape.tied:
        want.pop("lm_head.weight", None)
    assert set(got) == set(want)
    for name, expected in want.items():
        assert expected.abs().max() > 0, name
        error = (got[name] - expected).norm() / expected.norm()
        assert error < 1e-5, (name, float(error))


def test_score_equals_transformers_with_own_routing(learner, model_path):
    ids = np.random.default_rng(0).integers(0, hm.VOCAB, 33)
    with torch.no_grad():
        theirs = torch.log_softmax(hm.load_hf(model_path)(torch.from_numpy(ids)[None]).logits[0], -1)
    expected = theirs[:-1].gather(1, torch.from_numpy(ids)[1:, None])[:, 0].numpy()
    got = learner.score(ids.astype(np.int32))
    assert got.dtype == np.float32
    assert np.abs(got - expected).max() < 1e-4
    assert all(p.grad is None for p in learner.model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_save_then_load_gives_the_same_bits(tmp_path, dtype, tied):
    from transformers import Qwen3MoeForCausalLM

    path = hm.make_hf_model(tmp_path / "m", tie_word_embeddings=tied, mlp_only_layers=[0])
    learner = MegatronLearner(settings(learner__dtype=dtype), path)
    learner.train_step(pack(hm.make_samples(2, LENGTHS, layers=2), 64))
    assert learner.version == 1
    exported = learner.export()
    for _ in range(2):  # the second replaces the first
        learner.save(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == {"stand": "in"}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype

    loaded, info = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == getattr(torch, dtype)
    again = MegatronLearner(settings(learner__dtype=dtype), tmp_path / "out").export()
    assert set(again) == set(exported)
    for name, tensor in exported.items():
        assert torch.equal(again[name], tensor), name
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    for parameter in loaded.parameters():
        parameter.grad = parameter.data
    for name, tensor in hf_gradients(loaded).items():
        assert torch.equal(
            tensor, exported["model.embed_tokens.weight" if tied and name == "lm_head.weight" else name]
        ), name


def test_export_is_a_snapshot(learner):
    before = learner.export()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    learner.train_step(pack(hm.make_samples(2, LENGTHS), 4096))
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    after = learner.export()
    assert all(not torch.equal(after[name], kept[name]) for name in kept if "experts" not in name)


# -- routing replay --------------------------------------------------------------------------------------------------


def test_replaying_own_routes_changes_no_bit(learner):
    samples = hm.make_samples(3, LENGTHS)
    plain = logits(learner, collate(samples))
    routes = own_routes(learner, collate(samples))
    replayed = collate(with_routes(samples, routes[:, :, ::-1]))  # the order of a row's columns says nothing
    with learner.replay.bound(replayed) as agreement:
        assert torch.equal(logits(learner, replayed), plain)
    assert agreement.share == 1.0
    assert agreement.compared == replayed.tokens * hm.LAYERS
    every_other = [
        replace_columns(s, routing_recorded=np.arange(len(s.table)) % 2 == 0) for s in with_routes(samples, routes)
    ]
    with learner.replay.bound(collate(every_other)) as agreement:
        assert torch.equal(logits(learner, collate(every_other)), plain)
    assert agreement.share == 1.0
    assert agreement.compared < replayed.tokens * hm.LAYERS


def test_unrecorded_rows_route_by_themselves(learner):
    samples = hm.make_samples(4, LENGTHS)
    micro_batch = collate(samples)
    plain = logits(learner, micro_batch)
    nothing = collate([replace_columns(s, routing_recorded=np.zeros(len(s.table), bool)) for s in samples])
    with learner.replay.bound(nothing) as agreement:
        assert torch.equal(logits(learner, nothing), plain)
    assert agreement.compared == 0
    assert agreement.share == 0.0
    without = collate([Sample(s.sample_id, s.table.without("routed_experts", "routing_recorded")) for s in samples])
    with learner.replay.bound(without):
        assert torch.equal(logits(learner, without), plain)

    # A record from position 4 on changes nothing before it, and something behind it.
    late = [replace_columns(s, routing_recorded=np.arange(len(s.table)) >= 4) for s in samples]
    with learner.replay.bound(collate(late)):
        mixed = logits(learner, collate(late))
    early = micro_batch.positions < 4
    assert torch.equal(mixed[early], plain[early])
    assert not torch.equal(mixed[~early], plain[~early])


def test_agreement_is_measured_with_replay_on_and_off(model_path):
    samples = fully_recorded(hm.make_samples(5, [12, 30]))
    for mode in ("rollout", "off"):
        learner = MegatronLearner(settings(routing__replay=mode), model_path)
        routes = own_routes(learner, collate(samples))
        routes[:21, 0] = routes[:21, 0] + 1 & 7  # half of the 42 rows of one of three layers: some other set
        same = (np.sort(routes, -1) == np.sort(own_routes(learner, collate(samples)), -1)).all(-1)[:, 0].sum()
        metrics = learner.train_step([collate(with_routes(samples, routes))])
        if mode == "off":
            assert metrics["routing/agreement"] == pytest.approx((42 * 2 + same) / 126)
        else:  # replaying other experts in the first layer changes what the later ones see
            assert metrics["routing/agreement"] <= (42 * 2 + same) / 126
        assert metrics["routing/recorded_fraction"] == 1.0


def test_nothing_is_left_behind_after_an_exception(learner):
    micro_batch = collate(hm.make_samples(6, LENGTHS))
    plain = logits(learner, micro_batch)
    last = learner.model.decoder.layers[-1]
    calls = iter([None, RuntimeError("broken expert")])  # the second micro-batch's forward

    def break_once(*args) -> None:
        if error := next(calls):
            raise error

    handle = last.mlp.experts.register_forward_pre_hook(break_once)
    before = weights(learner)
    with pytest.raises(RuntimeError, match="broken expert"):
        learner.train_step([collate(hm.make_samples(7, [8])), micro_batch])
    handle.remove()
    assert all(hook.target is None for _, hook in learner.replay._routers)
    assert all(p.grad is None for p in learner.model.parameters())
    assert torch.equal(logits(learner, micro_batch), plain)
    assert all(torch.equal(before[n], t) for n, t in weights(learner).items())
    assert learner.version == 0


def test_replay_can_not_outlive_or_overlap_its_micro_batch(learner):
    from megatron.core.transformer.moe.router_replay import RouterReplay

    samples = hm.make_samples(8, LENGTHS)
    micro_batch = collate(samples)
    plain = logits(learner, micro_batch)
    with learner.replay.bound(micro_batch):
        assert not torch.equal(logits(learner, micro_batch), plain)
        with pytest.raises(RoutingError, match="still bound"), learner.replay.bound(micro_batch):
            pass
        assert not torch.equal(logits(learner, micro_batch), plain)
    assert torch.equal(logits(learner, micro_batch), plain)
    assert RouterReplay.global_router_replay_instances == []  # nothing that Megatron's class-wide calls could reach


@pytest.mark.parametrize("other", [[30], [5, 5]])
def test_more_or_fewer_rows_than_tokens_raise(learner, other):
    bound, fed = collate(hm.make_samples(9, [20])), collate(hm.make_samples(9, other))
    with pytest.raises(
        RoutingError, match=rf"layer 1: routes of shape \(20, 2\) are bound, but the router got {sum(other)}"
    ):
        with learner.replay.bound(bound):
            logits(learner, fed)
    assert all(hook.target is None for _, hook in learner.replay._routers)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows[:, :2], "expected .n, 3, 2"),
        (lambda rows: np.where(rows == rows[2, 1, 0], np.uint8(8), rows), "expert id 8"),
        (lambda rows: np.repeat(rows[..., :1], 2, axis=-1), "twice"),
    ],
    ids=["layers", "range", "duplicate"],
)
def test_invalid_records_are_refused_before_the_forward(learner, spoil, message):
    (sample,) = hm.make_samples(10, [12])
    rows = spoil(sample.table["routed_experts"].copy())
    bad = collate([replace_columns(sample, routed_experts=rows)])
    with pytest.raises(RoutingError, match=message), learner.replay.bound(bad):
        pytest.fail("entered")


def test_routes_are_bound_by_layer_number(tmp_path):
    path = hm.make_hf_model(tmp_path / "m", num_hidden_layers=4, mlp_only_layers=[0, 2])
    learner = MegatronLearner(settings(), path)
    assert [(i, hook.layer_number) for i, hook in learner.replay._routers] == [(0, 2), (1, 4)]


def test_recomputed_forward_replays_the_same_routes(learner, monkeypatch):
    from megatron.core.tensor_parallel import checkpoint

    micro_batch = collate(hm.make_samples(11, LENGTHS))

    def grads() -> dict[str, torch.Tensor]:
        with learner.replay.bound(micro_batch):
            logits(learner, micro_batch).square().sum().backward()
        taken = {n: g.clone() for n, g in gradients(learner).items()}
        learner._optimizer.clear()
        return taken

    plain = grads()
    for layer in learner.model.decoder.layers:
        forward = layer.mlp.forward
        monkeypatch.setattr(
            layer.mlp,
            "forward",
            lambda h, padding_mask=None, forward=forward: (checkpoint(lambda x: forward(x)[0], False, h), None),
        )
    recomputed = grads()
    for name, expected in plain.items():
        assert (recomputed[name] - expected).norm() <= 1e-6 * expected.norm(), name


# -- the training step -----------------------------------------------------------------------------------------------


def reference_step(path, samples: list[Sample], config: Config) -> tuple[float, float, float]:
    """Policy loss, KL loss and gradient norm of a step, by transformers and NumPy-like code."""
    model = hm.load_hf(path)
    policy_sum = kl_sum = torch.zeros((), dtype=torch.float64)
    count = 0
    for s in samples:
        table = s.table
        with hm.forced_routes(model, table["routed_experts"]):
            out = model(torch.from_numpy(table["token_ids"].astype(np.int64))[None]).logits[0]
        logp = torch.log_softmax(out.double() / s.temperature, -1)
        for t in range(1, len(table)):
            if table["loss_mask"][t] and np.isfinite(table["rollout_logprobs"][t]):
                lp, mu = logp[t - 1, int(table["token_ids"][t])], float(table["rollout_logprobs"][t])
                ratio = min(float(torch.exp(lp.detach() - mu)), config.algorithm.ratio_cap)
                policy_sum = policy_sum - ratio * float(table["advantages"][t]) * lp
                kl_sum = kl_sum + config.algorithm.rollout_kl.coef * (lp - mu) ** 2 / 2
                count += 1
    loss = (policy_sum + kl_sum) / count
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return policy_sum.item() / count, kl_sum.item() / count, norm.item()


def test_step_equals_the_reference(learner, model_path):
    samples = fully_recorded(hm.make_samples(12, LENGTHS, temperature=0.7))
    samples[1].temperature = 1.3
    rollout = samples[0].table["rollout_logprobs"].copy()
    rollout[[5, 7]] = np.nan, -np.inf
    samples[0] = replace_columns(samples[0], rollout_logprobs=rollout)
    policy, kl, norm = reference_step(model_path, samples, settings())
    metrics = learner.train_step(pack(samples, 64))
    assert metrics["loss/policy"] == pytest.approx(policy, rel=1e-4)
    assert metrics["loss/rollout_kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    tokens = sum(LENGTHS)
    assert metrics["tokens/dropped_non_finite"] == 2
    assert metrics["batch/tokens"] == tokens
    assert metrics["batch/trained_tokens"] == tokens - 3 * len(LENGTHS) - 2
    assert metrics["batch/micro_batches"] == 2
    assert metrics["batch/fill"] == pytest.approx(tokens / (2 * 16384))
    assert metrics["lr"] == pytest.approx(1e-2)
    assert metrics["optimizer/skipped"] == 0
    assert learner.version == 1


def test_metric_names_are_those_of_the_protocol(learner):
    backend: LearnerBackend = learner
    names = {
        "loss/policy", "loss/rollout_kl", "rollout_kl/k1", "rollout_kl/k2", "rollout_kl/k3", "ratio/max", "ratio/ess",
        "entropy/mean", "routing/recorded_fraction", "routing/agreement", "grad_norm", "lr", "optimizer/skipped",
        "tokens/dropped_non_finite", "batch/tokens", "batch/trained_tokens", "batch/micro_batches", "batch/fill",
    }  # fmt: skip
    for batch in ([], pack(hm.make_samples(0, [8]), 64)):
        metrics = backend.train_step(batch)
        assert set(metrics) == names
        assert all(type(value) is float and np.isfinite(value) for value in metrics.values())


def test_gradient_does_not_depend_on_packing(model_path):
    samples = hm.make_samples(13, LENGTHS)
    results = []
    for budget in (4096, 64, 40):
        learner = MegatronLearner(settings(), model_path)
        taken = {}
        learner._optimizer._adam.register_step_pre_hook(
            lambda *a, learner=learner, taken=taken: taken.update(gradients(learner))
        )
        metrics = learner.train_step(pack(samples, budget))
        results.append((metrics, {n: g.clone() for n, g in taken.items()}))
    assert [m["batch/micro_batches"] for m, _ in results] == [1, 2, 3]
    whole, whole_grads = results[0]
    for metrics, grads in results[1:]:
        for name, expected in whole_grads.items():
            assert (grads[name] - expected).norm() <= 2e-5 * expected.norm(), name
        for name in set(whole) - {"batch/micro_batches", "batch/fill"}:
            assert metrics[name] == pytest.approx(whole[name], rel=1e-4), name


def test_too_few_recorded_routes_stop_the_step_before_any_forward(model_path):
    learner = MegatronLearner(settings(routing__min_recorded_fraction=0.9), model_path)
    learner.model.register_forward_pre_hook(lambda *a: pytest.fail("forward"))
    samples = [replace_columns(s, routing_recorded=np.arange(len(s.table)) < 5) for s in hm.make_samples(14, [12, 12])]
    with pytest.raises(
        LearnerError, match=r"only 0\.333 of the trained tokens .* routing\.min_recorded_fraction is 0\.9"
    ):
        learner.train_step(pack(samples, 64))
    off = MegatronLearner(settings(routing__min_recorded_fraction=0.9, routing__replay="off"), model_path)
    assert off.train_step(pack(samples, 64))["routing/recorded_fraction"] == pytest.approx(1 / 3)


def test_recorded_fraction_is_that_of_the_inputs(model_path):
    """Tokens 3 to 11 are trained, so rows 2 to 10 must be recorded; row 11 is never used."""
    learner = MegatronLearner(settings(routing__min_recorded_fraction=1.0), model_path)
    assert learner.train_step(pack(hm.make_samples(15, [12]), 64))["routing/recorded_fraction"] == 1.0


def test_a_step_without_trained_tokens_changes_nothing(learner):
    samples = [replace_columns(s, loss_mask=np.zeros(len(s.table), bool)) for s in hm.make_samples(16, [8, 8])]
    before = weights(learner)
    metrics = learner.train_step(pack(samples, 64))
    assert metrics["batch/trained_tokens"] == 0
    assert metrics["optimizer/skipped"] == 1
    assert all(np.isfinite(v) for v in metrics.values())
    assert learner.version == 0
    assert all(torch.equal(before[n], t) for n, t in weights(learner).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_changes_nothing(model_path, dtype):
    learner = MegatronLearner(settings(learner__dtype=dtype), model_path)
    (sample,) = hm.make_samples(17, [12])
    advantages = sample.table["advantages"].copy()
    advantages[6] = np.inf
    before = weights(learner)
    metrics = learner.train_step([collate([replace_columns(sample, advantages=advantages)])])
    assert metrics["optimizer/skipped"] == 1
    assert not np.isfinite(metrics["grad_norm"])
    assert learner.version == 0
    assert all(torch.equal(before[n], t) for n, t in weights(learner).items())
    assert learner.train_step([collate([sample])])["optimizer/skipped"] == 0


def test_unusable_batches_name_the_sample(learner):
    (sample,) = hm.make_samples(18, [12])
    with pytest.raises(LearnerError, match="s0: column 'advantages' is missing"):
        learner.train_step([collate([Sample("s0", sample.table.without("advantages"))])])
    with pytest.raises(LearnerError, match="sample s0: its first token"):
        learner.train_step([collate([replace_columns(sample, loss_mask=np.ones(12, bool))])])


def test_training_raises_the_probability_of_what_was_good(model_path):
    """Also from a thread that is not the main one, where grad mode and such have their own state."""
    learner = MegatronLearner(settings(routing__replay="off"), model_path)
    (sample,) = hm.make_samples(19, [20])
    ids = sample.table["token_ids"]
    before = learner.score(ids)[2:].mean()

    def train() -> None:
        for _ in range(5):
            mu = np.concatenate([[0.0], learner.score(ids)]).astype(np.float32)
            learner.train_step(
                [collate([replace_columns(sample, rollout_logprobs=mu, advantages=np.ones(20, np.float32))])]
            )

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert learner.version == 5
    assert learner.score(ids)[2:].mean() > before + 0.5


# -- parts -----------------------------------------------------------------------------------------------------------


def test_rms_norm_and_its_gradient_equal_torch():
    x = torch.randn(37, 2, 24, generator=torch.Generator().manual_seed(1)) * 3 + 1
    norm = TorchRMSNorm(SimpleNamespace(params_dtype=torch.float64, sequence_parallel=False), 24, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 24))
    results = []
    for dtype in (torch.float32, torch.float64):  # float64 takes torch's own path
        norm.to(dtype)
        given = x.to(dtype).requires_grad_()
        out = norm(given)
        results.append((out, *torch.autograd.grad(out.pow(3).sum(), [given, norm.weight])))
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).norm() < 1e-6 * exact.norm()


def test_log_probs_in_chunks_equal_those_at_once():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(50, 16, generator=generator, requires_grad=True)
    hidden = torch.randn(23, 16, generator=generator, requires_grad=True)
    targets = torch.randint(50, (23,), generator=generator)
    temperatures = torch.rand(23, generator=generator) + 0.5
    results, rows = [], []

    def logits_of(some: torch.Tensor) -> torch.Tensor:
        rows.append(len(some))
        return some @ matrix.T

    for elements in (10**6, 200):
        logprobs, entropies = token_logprobs(logits_of, hidden, targets, temperatures, 50, elements)
        results.append((logprobs, entropies, *torch.autograd.grad(logprobs.square().sum(), [hidden, matrix])))
    assert sorted(rows) == sorted([23] + 2 * [4, 4, 4, 4, 4, 3])  # the chunks once forward and once backward
    for at_once, chunked in zip(*results, strict=True):
        assert (at_once - chunked).norm() < 1e-5 * at_once.norm()
    exact = torch.distributions.Categorical(logits=(hidden @ matrix.T) / temperatures[:, None])
    assert torch.allclose(results[0][0], exact.log_prob(targets), atol=1e-5)
    assert torch.allclose(results[0][1], exact.entropy(), atol=1e-5)


def test_buckets_hold_every_sample_once_with_little_padding():
    lengths = np.random.default_rng(0).integers(1, 3000, 200)
    buckets = plan_buckets(lengths)
    assert sorted(np.concatenate(buckets).tolist()) == list(range(200))
    for members in buckets:
        longest = lengths[members].max()
        assert lengths[members[0]] == longest
        assert (longest - lengths[members] <= max(16, longest // 4)).all()
    assert len(buckets) < 30


def test_master_weights_keep_small_updates():
    config = settings().learner
    config.lr, config.warmup_steps, config.max_grad_norm, config.weight_decay = 1e-4, 4, 1e9, 0.5
    start = torch.ones(2, 2)
    low, high = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.clone())
    norm = torch.nn.Parameter(torch.ones(3))
    optimizers = [MasterAdamW([low], config), MasterAdamW([high, norm], config)]
    assert optimizers[0].lr == pytest.approx(2.5e-5)
    for _ in range(40):
        for optimizer, parameter in zip(optimizers, (low, high), strict=True):
            for factor in (1.5, -0.5):
                (factor * parameter.float()).sum().backward()
                optimizer.accumulate()
            norm.grad = torch.zeros(3)
            optimizer.step()
    assert torch.equal(low, high.bfloat16())
    assert high.max() < 0.997  # one step of 1e-4 is lost in bfloat16, forty are not
    assert torch.equal(norm, torch.ones(3))  # no weight decay without a gradient on one-dimensional parameters


def test_unsupported_models_are_refused_with_the_reason(tmp_path):
    path = hm.make_hf_model(tmp_path / "m")
    described = json.loads((path / "config.json").read_text())

    def rewrite(**changes) -> None:
        (path / "config.json").write_text(json.dumps(described | changes))

    for changes, message in [
        ({"model_type": "mixtral"}, "model type 'mixtral' is not supported"),
        ({"attention_bias": True}, "`attention_bias` = True"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "`rope_type` = 'linear'"),
        ({"num_hidden_layers": 4}, "lacks model.layers.3.input_layernorm.weight, .* and "),
        ({"num_hidden_layers": 2}, "has tensors that Qwen3-MoE has not: model.layers.2.input_layernorm.weight"),
        (
            {"moe_intermediate_size": 40},
            r"experts.0.gate_proj.weight .*: shape \(96, 64\), config.json means \(80, 64\)",
        ),
    ]:
        rewrite(**changes)
        with pytest.raises(LearnerError, match=message):
            MegatronLearner(settings(), path)
    with pytest.raises(LearnerError, match="has no config"):
        read_shape(tmp_path)
