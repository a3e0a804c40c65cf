"""Training over supports: log-probs are a dense renormalisation, and losses and gradients of both backends are those of plain
transformers whose logits are masked one token at a time, whatever is packed together or shared.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data.supports import SupportSets
from r3async.data.tokens import Sample
from r3async.learner import build_learner
from r3async.learner.micro_batches import make_padding_batch, pack_samples, pad_to_multiple
from r3async.learner.token_logprobs import SupportMask, select_supports, token_logprobs
from r3async.learner.torch.backend import TorchLearner
from tests.helpers import models as hm
from tests.helpers import torch as ht
from tests.helpers.learner import settings as learner_settings
from tests.helpers.parity import gradients_of_rank


def with_supports(samples: Sequence[Sample], vocab_size: int, seed: int = 0) -> list[Sample]:
    """Each trained token with a random set that it is in: few tokens, many, or all of them."""
    rng = np.random.default_rng(seed)
    out = []
    for sample in samples:
        (rows,) = np.nonzero(sample.table["loss_mask"])
        dense = rng.random((len(rows), vocab_size)) < rng.choice([0.02, 0.3, 0.97, 1.0], (len(rows), 1))
        dense[np.arange(len(rows)), sample.table["token_ids"][rows]] = True
        sets = SupportSets.from_bitmaps(np.packbits(dense, axis=1, bitorder="little"), vocab_size)
        column = SupportSets.from_parts(len(sample.table), [(int(at), sets[i : i + 1]) for i, at in enumerate(rows)])
        out.append(Sample(sample.sample_id, sample.table.with_columns(support=column), sample.temperature))
    return out


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_loss_and_all_gradients_equal_transformers_with_masked_logits(tmp_path, recompute):
    path = ht.make_model(tmp_path / "m", "qwen3")
    layers = ht.moe_layers("qwen3")
    samples = with_supports(ht.recorded_samples(layers, temperature=0.8), ht.VOCAB)
    settings = ht.settings(learner__recompute=recompute)
    losses, expected = ht.reference_step(path, samples, settings)
    micro_batches = pack_samples(samples, ht.BUDGET)
    micro_batches[1] = pad_to_multiple(micro_batches[1], 7)
    learner = TorchLearner.from_pretrained(settings, path)
    result, gradients = ht.gradients_of_step(learner, [*micro_batches, make_padding_batch(micro_batches[0])])
    for key, value in losses.items():
        assert result.metrics[key] == pytest.approx(value, rel=1e-5), key
    error, worst = ht.worst_error(gradients, expected)
    assert error < 1e-5, worst
    bare, _ = ht.reference_step(path, ht.recorded_samples(layers, temperature=0.8), settings)
    assert bare["loss/policy"] != pytest.approx(losses["loss/policy"], rel=1e-2)


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_log_probs_are_those_of_masked_logits(tmp_path, backend):
    path = hm.make_hf_model(tmp_path / "m")
    changes = {"learner__backend": backend, "algorithm__reference_kl": {"coef": 0.1}, "routing__replay": "off"}
    learner = build_learner(learner_settings(**changes), path)
    samples = with_supports(hm.make_families(1), hm.VOCAB)
    micro_batches = pack_samples(samples, 4096, share_prefixes=True)
    assert sum(m.num_shared_tokens for m in micro_batches) > 60
    model, by_name = hm.load_hf(path), {s.sample_id: s for s in samples}
    found = learner.logprobs(micro_batches, replay=False, trained_only=True)
    of_reference = learner.logprobs(micro_batches, replay=False, trained_only=True, use_reference=True)
    for m, values, reference in zip(micro_batches, found, of_reference, strict=True):
        np.testing.assert_allclose(values, reference, atol=1e-6)  # the start model's, over the same supports
        whole, edges = m.expanded_samples
        for s, name in enumerate(m.sample_ids):
            table = by_name[name].table
            ids = torch.from_numpy(table["token_ids"].astype(np.int64))
            with torch.no_grad():
                logits = model(ids[None]).logits[0, :-1].double() / by_name[name].temperature
            left = torch.from_numpy(table["support"].to_dense_mask(hm.VOCAB)[1:])
            exact = logits.masked_fill(~left, -torch.inf).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            mask = table["loss_mask"][1:]
            np.testing.assert_allclose(values[whole[edges[s] : edges[s + 1]]][1:][mask], exact[mask], atol=3e-5)


def test_megatron_has_the_same_gradient_however_samples_are_packed(tmp_path):
    path = hm.make_hf_model(tmp_path / "m")
    settings = learner_settings(algorithm__entropy_coef=0.1)
    samples = with_supports(hm.make_families(0), hm.VOCAB)
    packed = [
        pack_samples(samples, 4096, share_prefixes=True),
        pack_samples(samples, 80),
        pack_samples(hm.make_families(0), 4096),
    ]
    one, other, bare = (gradients_of_rank(str(path), settings, m)["gradients"] for m in packed)
    for name, gradient in one.items():
        assert np.linalg.norm(other[name] - gradient) <= 1e-5 * max(np.linalg.norm(gradient), 1e-6), name
    assert any(np.linalg.norm(bare[name] - gradient) > 0.1 * np.linalg.norm(gradient) for name, gradient in one.items())


def case(vocab_size: int, tokens: int, seed: int):
    """Hidden states, output matrix, targets, temperatures, bool `[tokens, vocab_size]` and the same as supports."""
    rng = np.random.default_rng(seed)
    dense = rng.random((tokens, vocab_size)) < rng.choice([0.0, 0.03, 0.5, 0.97, 1.0], (tokens, 1))
    targets = rng.integers(0, vocab_size, tokens)
    dense[np.arange(tokens), targets] = True
    sets = SupportSets.from_bitmaps(np.packbits(dense, axis=1, bitorder="little"), vocab_size)
    bare = rng.random(tokens) < 0.2  # nobody recorded one: all could be sampled
    dense[bare] = True
    sets = SupportSets.from_parts(tokens, [(int(i), sets[i : i + 1]) for i in np.flatnonzero(~bare)])
    hidden, matrix = rng.standard_normal((tokens, 4)), 3 * rng.standard_normal((vocab_size, 4))
    floats = (torch.tensor(x, requires_grad=True) for x in (hidden, matrix))
    return *floats, torch.from_numpy(targets), torch.from_numpy(0.5 + rng.random(tokens)), dense, sets


@settings(max_examples=60)
@given(st.sampled_from([1, 2, 8, 33, 300]), st.integers(0, 9), st.integers(0, 999), st.integers(1, 4), st.booleans())
def test_renormalised_over_the_support_as_a_dense_softmax_is(vocab_size, tokens, seed, chunk, entropy_gradient):
    hidden, matrix, targets, temperatures, dense, sets = case(vocab_size, tokens, seed)
    options = {"chunk_elements": chunk * vocab_size, "entropy_gradient": entropy_gradient, "supports": sets}
    found = token_logprobs(matrix, hidden, targets, temperatures, **options)
    # Of double logits rounded to single ones, as they are computed there: probabilities of what is left, divided by their sum.
    probs = ((hidden @ matrix.T).float() / temperatures[:, None]).double().softmax(-1) * torch.from_numpy(dense)
    probs = probs / probs.sum(-1, keepdim=True)
    logs = torch.where(probs > 0, probs, 1.0).log()
    expected = logs.gather(1, targets[:, None])[:, 0], -(probs * logs).sum(-1)
    weights = torch.linspace(-1, 2, tokens)

    def gradients(scores):
        loss = (scores[0] * weights).sum() + ((scores[1] * weights).sum() if entropy_gradient else 0)
        return torch.autograd.grad(loss, [hidden, matrix], retain_graph=True)

    for ours, dense_one in zip(found, expected, strict=True):
        assert torch.allclose(ours.double(), dense_one.double(), atol=1e-4)
    if tokens:
        for ours, dense_one in zip(gradients(found), gradients(expected), strict=True):
            assert torch.allclose(ours, dense_one, atol=1e-4 * (1 + float(dense_one.abs().max())))


@pytest.mark.parametrize(("first", "columns"), [(0, 300), (0, 150), (150, 150), (3, 7), (297, 3), (299, 0)])
def test_a_rank_masks_its_own_part_of_the_vocabulary(first, columns):
    *_, dense, sets = case(300, 40, 5)
    mask = SupportMask(sets, torch.device("cpu"), first, columns).build_excluded()
    assert np.array_equal(mask.numpy(), ~dense[:, first : first + columns])


def test_without_supports_nothing_is_masked():
    assert select_supports(None, np.arange(3)) is None
    assert select_supports(SupportSets.unrecorded(5), np.arange(3)) is None
    *_, sets = case(33, 9, 1)
    assert select_supports(sets, np.arange(4)) == sets[:4]
