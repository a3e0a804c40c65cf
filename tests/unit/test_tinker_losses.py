"""The losses of the Tinker API: values and gradients beside plain formulas on plain transformers with forced routes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from r3async.data.tokens import Sample, TokenTable
from r3async.learner import train_step as verbs
from r3async.learner.micro_batches import collate_samples, pad_to_multiple
from r3async.learner.optimizer import AdamSettings
from r3async.learner.torch.backend import TorchLearner
from r3async.tinker.backend import LossBatch
from r3async.tinker.datum_minibatch import run_training
from r3async.tinker.kept_sequences import RoutedDatum
from r3async.tinker.losses import LOSS_KEYS, check_datum, check_loss, compute_token_losses
from r3async.tinker.protocol import ApiError, Datum
from tests.helpers.learner import settings
from tests.helpers.models import VOCAB, forced_routes, load_hf, make_hf_model, random_routes

RNG = np.random.default_rng(3)
LENGTHS = [9, 14, 5, 11]
CONFIGS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
}


def plain_loss(name, config, logprobs, inputs):
    """The formulas of the documentation, token by token."""
    total = torch.zeros(())
    for t in range(len(logprobs)):
        lp = logprobs[t]
        if name == "cross_entropy":
            total = total - (inputs["weights"][t] * lp).sum()
            continue
        q, a = inputs["logprobs"][t], inputs["advantages"][t]
        ratio = torch.exp(lp - q)
        if name == "importance_sampling":
            total = total - ratio * a
        elif name == "ppo":
            clipped = min(max(ratio, config["clip_low_threshold"]), config["clip_high_threshold"])
            total = total - min(ratio * a, clipped * a)
        elif name == "cispo":
            weight = min(max(ratio.item(), config["clip_low_threshold"]), config["clip_high_threshold"])
            total = total - weight * a * lp
        else:
            total = total - (a * lp - config["beta"] / 2 * (lp - q) ** 2)
    return total


def make_datum(length, loss, shape=()):
    tokens = RNG.integers(0, VOCAB, length + 1)
    targets = RNG.integers(0, VOCAB, (length, *shape)) if shape else tokens[1:]
    inputs = {"target_tokens": targets.astype(np.int64)}
    if loss == "cross_entropy":
        inputs["weights"] = RNG.uniform(0, 1, targets.shape).astype(np.float32)
    else:
        sampled = np.arange(length) >= 2
        inputs["logprobs"] = np.where(sampled, RNG.normal(-4, 0.4, length), 0).astype(np.float32)
        inputs["advantages"] = np.where(sampled, RNG.normal(size=length), 0).astype(np.float32)
    return Datum(tokens[:-1].astype(np.int32), inputs, [], [])


def routed(datum, version=0):
    length = len(datum.tokens)
    versions = np.where(np.arange(length) >= 2, version, -1).astype(np.int32)
    return RoutedDatum(datum, random_routes(RNG, length), np.ones(length, bool), versions)


def reference(model, batch):
    """The loss, the log-probs and the gradients of a batch in transformers, datum by datum."""
    model.zero_grad()
    loss, rows = 0.0, []
    for one in batch.data:
        tokens = torch.from_numpy(one.datum.tokens.astype(np.int64))
        with forced_routes(model, one.routes):
            logits = torch.log_softmax(model(tokens[None]).logits[0], -1)
        targets = torch.from_numpy(one.datum.inputs["target_tokens"])
        logprobs = logits.gather(1, targets.reshape(len(tokens), -1)).reshape(targets.shape)
        inputs = {name: torch.from_numpy(values) for name, values in one.datum.inputs.items()}
        of_datum = plain_loss(batch.loss_fn, batch.loss_settings, logprobs, inputs)
        of_datum.backward()
        loss += of_datum.item()
        rows.append(logprobs.detach().numpy())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss, rows, gradients


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(path):
    return TorchLearner.from_pretrained(settings(), path)


@pytest.fixture
def learner(shared):
    shared.optimizer.zero_grad()
    return shared


@pytest.fixture(autouse=True)
def equal_numbers_in_any_order():
    global RNG
    RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def plain(path):
    return load_hf(path)


@pytest.mark.parametrize(("loss", "shape"), [*((loss, ()) for loss in CONFIGS), ("cross_entropy", (3,))])
def test_losses_and_gradients_equal_plain_formulas_with_forced_routes(learner, plain, loss, shape):
    data = [routed(make_datum(n, loss, shape)) for n in LENGTHS]
    batch = LossBatch(loss, check_loss(loss, CONFIGS[loss]), data, 0)
    expected, rows, gradients = reference(plain, batch)
    result = run_training(learner, batch, 20, forward_only=False)
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    for mine, theirs in zip(result.logprobs, rows, strict=True):
        assert mine.shape == theirs.shape
        assert np.abs(mine - theirs).max() < 1e-4
    mine = {n: p.grad for n, p in learner.model.causal_lm.named_parameters() if p.grad is not None}
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (mine[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


def test_requests_add_up_and_a_forward_between_them_changes_nothing(learner):
    data = [routed(make_datum(n, "importance_sampling")) for n in LENGTHS]

    def run(some, forward_only=False):
        batch = LossBatch("importance_sampling", {}, some, 0)
        return run_training(learner, batch, 64, forward_only=forward_only)

    def gradients():
        return {n: p.grad.clone() for n, p in learner.model.causal_lm.named_parameters() if p.grad is not None}

    whole = run(data)
    expected = gradients()
    learner.optimizer.zero_grad()
    first = run(data[:2])
    forward = run(data, forward_only=True)
    second = run(data[2:])
    for name, gradient in gradients().items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-7, name
    learner.optimizer.zero_grad()
    assert forward.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], abs=1e-4)
    total = first.metrics["loss:sum"] + second.metrics["loss:sum"]
    assert total == pytest.approx(whole.metrics["loss:sum"], abs=1e-4)
    for mine, theirs in zip(forward.logprobs, whole.logprobs, strict=True):
        assert np.allclose(mine, theirs, atol=1e-5)


def test_metrics_say_what_was_recorded_and_how_old_it_was(learner):
    data = [routed(make_datum(8, "ppo"), version=3), routed(make_datum(8, "ppo"), version=5)]
    data[1].recorded[:] = False
    batch = LossBatch("ppo", check_loss("ppo", {}), data, 6)
    metrics = run_training(learner, batch, 64, forward_only=True).metrics
    assert all(name.rpartition(":")[2] in ("sum", "mean", "max") for name in metrics)
    assert metrics["routes/recorded:mean"] == 0.5
    assert 0 <= metrics["routes/agreement:mean"] < 0.3  # random routes
    assert (metrics["staleness:mean"], metrics["staleness:max"]) == (2.0, 3.0)
    deltas = []
    for one, logprobs in zip(data, run_training(learner, batch, 64, forward_only=True).logprobs, strict=True):
        deltas += (logprobs - one.datum.inputs["logprobs"])[2:].tolist()
    assert metrics["k3:mean"] == pytest.approx(np.mean([math.exp(d) - 1 - d for d in deltas]), rel=1e-4)
    unknown = [one._replace(routes=None, recorded=np.zeros(8, bool), versions=np.full(8, -1, np.int32)) for one in data]
    metrics = run_training(learner, batch._replace(data=unknown), 64, forward_only=True).metrics
    assert metrics["routes/recorded:mean"] == 0.0
    assert not {"routes/agreement:mean", "staleness:mean"} & metrics.keys()


def test_settings_of_a_step_are_those_of_the_request(path):
    learner = TorchLearner.from_pretrained(settings(), path)
    weight = next(p for p in learner.optimizer.parameters if p.ndim == 2)
    before = weight.detach().clone()
    batch = LossBatch("cross_entropy", {}, [routed(make_datum(9, "cross_entropy"))], 0)
    run_training(learner, batch, 64, forward_only=False)
    gradient = weight.grad.clone()
    learner.optimizer.use_settings(AdamSettings(0.25, (0.5, 0.75), 1e-3, 0.1, math.inf))
    update = verbs.optim_step(learner)
    assert update.lr == 0.25
    expected = before * (1 - 0.25 * 0.1) - 0.25 * gradient / (gradient.abs() + 1e-3)  # Adam's first step
    assert torch.allclose(weight.detach(), expected, atol=1e-6)
    run_training(learner, batch, 64, forward_only=False)
    learner.optimizer.use_settings(AdamSettings(0.0, (0.5, 0.75), 1e-3, 0.0, math.inf))
    now = weight.detach().clone()
    verbs.optim_step(learner)
    assert torch.equal(weight.detach(), now)


def token_losses(loss, config, logprobs, sampling, advantages):
    inputs = {"logprobs": torch.tensor(sampling), "advantages": torch.tensor(advantages)}
    return compute_token_losses(loss, check_loss(loss, config), torch.tensor(logprobs), inputs)


def test_masks_take_tokens_out_of_the_loss_and_not_out_of_the_kl_term():
    logprobs, sampling = [-5.0, -1.0, -1.0], [0.0, -1.1, -3.0]  # a prompt's token, a close one, a drifted one
    advantages = [0.0, 1.0, 1.0]
    masked = token_losses(
        "importance_sampling", {"icepop_low": 0.5, "icepop_high": 5.0}, logprobs, sampling, advantages
    )
    assert masked.tolist() == pytest.approx([0.0, -math.exp(0.1), 0.0])
    both = {"icepop_high": 5.0, "rollout_kl": 0.2}
    with_kl = token_losses("importance_sampling", both, logprobs, sampling, advantages)
    assert with_kl.tolist() == pytest.approx([0.0, -math.exp(0.1) + 0.2 * 0.1**2 / 2, 0.2 * 2.0**2 / 2])
    by_episode = token_losses("ppo", {"geometric_high": 1.5}, logprobs, sampling, advantages)
    assert by_episode.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("no_such_loss", {}, "the loss 'no_such_loss' is not supported"),
        ("gspo", {}, "cross_entropy, importance_sampling, ppo, cispo, dro are"),
        ("ppo", {"beta": 0.1}, "not a key of ppo, whose are: clip_low_threshold"),
        ("cross_entropy", {"rollout_kl": 0.1}, "whose are: none"),
        ("dro", {"beta": "much"}, "must be a finite number, not 'much'"),
        ("dro", {"beta": math.nan}, "must be a finite number"),
    ],
)
def test_unknown_losses_and_keys_are_refused_by_name(loss, config, message):
    with pytest.raises(ApiError, match=message):
        check_loss(loss, config)


def test_defaults_are_those_of_the_documentation():
    assert LOSS_KEYS["ppo"] == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert check_loss("ppo", {"clip_high_threshold": 1.28}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": None}, "takes target_tokens, logprobs, advantages, not"),
        ({"mask": np.ones(5, np.float32)}, "not target_tokens, logprobs, advantages, mask"),
        ({"logprobs": np.zeros(4, np.float32)}, "logprobs has the shape"),
        ({"logprobs": np.full(5, np.nan, np.float32)}, "logprobs has values that are not finite"),
        ({"advantages": np.full(5, np.inf, np.float32)}, "not finite"),
        ({"target_tokens": np.full(5, VOCAB, np.int64)}, "a token id is not one of 0 .. 95"),
        ({"target_tokens": np.full(5, -1, np.int64)}, "a token id is not one of"),
        ({"target_tokens": np.zeros(5, np.float32)}, "has to be int64"),
        ({"target_tokens": np.zeros((5, 2), np.int64)}, "has 2 dimensions"),
    ],
)
def test_data_that_a_loss_cannot_take_are_refused(change, message):
    datum = make_datum(5, "ppo")
    inputs = {name: values for name, values in (datum.inputs | change).items() if values is not None}
    with pytest.raises(ApiError, match=message):
        check_datum(0, datum._replace(inputs=inputs), "ppo", VOCAB, 64)
    for length in (0, 64):
        one = make_datum(length, "ppo")
        with pytest.raises(ApiError, match=f"{length} tokens, of 1 to 63"):
            check_datum(0, one, "ppo", VOCAB, 64)


def test_alternatives_stay_where_they_are_when_a_micro_batch_is_padded():
    of_samples = collate_samples([Sample("s", TokenTable.from_tokens(np.arange(5)), 0.5)])
    micro_batch = replace(of_samples, alternatives=np.array([[0, 7], [3, 8]]))
    padded = pad_to_multiple(micro_batch, 4)
    rows = np.array([-1, 2, -2])
    for one in (micro_batch, padded):
        assert one.previous_rows(rows).tolist() == [0, 1, 3]
        assert one.scored_ids(rows).tolist() == [7, 2, 8]
        assert one.scored_temperatures(rows).tolist() == [0.5, 0.5, 0.5]
