"""The probe tells weights that arrived from weights that did not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.config import load_config
from r3async.weights.probe import (
    SampledProbe,
    choose_probe_positions,
    compare_probe,
    compare_sampled_probe,
    make_probe_pair,
    make_probe_text,
    resolve_probe_tolerance,
)

TOKENS = [5, 6, 7, 8]


def compare(engine, tolerance=1e-3):
    return compare_probe(TOKENS, np.array([-1.0, -2.0, -3.0], np.float32), np.array(engine, np.float32), tolerance)


@pytest.mark.parametrize(("value", "passes"), [(-1.00001, True), (-1.01, False), (np.nan, False), (-np.inf, False)])
def test_rounding_passes_and_what_is_further_off_or_not_finite_fails(value, passes):
    assert compare([value, -2.0, -3.0]).passed is passes


def test_a_mismatch_fails_and_names_the_largest_difference():
    result = compare([-1.0, -2.0, -7.5])
    assert not result.passed
    assert (result.position, result.token_id) == (3, 8)
    for part in ("4.5 at position 3", "token 8", "-3.0000", "-7.5000", "weights.probe_tolerance"):
        assert part in result.describe_scored()


def test_a_score_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="scored"):
        compare([-1.0])


def test_the_tolerance_follows_the_precision_unless_it_is_set():
    def resolved(*settings: str) -> list[float]:
        return [resolve_probe_tolerance(load_config("quickstart", list(settings)), on_gpu) for on_gpu in (False, True)]

    assert resolved() == [1e-3, 0.15 / 8]  # kernels of experts on GPUs multiply in TF32
    assert resolved("generator.dtype=bfloat16") == [0.15, 0.15]
    assert resolved("weights.probe_tolerance=0.5") == [0.5, 0.5]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def sampled_of(seed: int, temperature: float, reported_at: float):
    """Learner's scores and an engine's samples of one random model, which reports log-probs at temperature `reported_at`."""
    chance = np.random.default_rng(seed)
    logits = chance.normal(0, 2, (99, 50))
    text = chance.integers(0, 50, 100)
    rows = np.arange(99)
    scores = np.stack([log_softmax(logits / t)[rows, text[1:]] for t in (1.0, temperature)])
    positions = np.asarray(choose_probe_positions(100))
    tokens = np.asarray([chance.choice(50, p=np.exp(log_softmax(logits[p - 1] / temperature))) for p in positions])
    plain, reported = (log_softmax(logits[positions - 1] / t)[np.arange(len(tokens)), tokens] for t in (1, reported_at))
    return SampledProbe(positions, tokens, reported, plain), scores


@given(st.integers(0, 2**31), st.sampled_from([0.3, 0.7, 1.0, 1.5]))
def test_what_is_sampled_is_compared_at_the_runs_temperature_though_no_one_knew_the_token(seed, temperature):
    sampled, scores = sampled_of(seed, temperature, temperature)
    result = compare_sampled_probe(sampled, scores, temperature, 1e-6)
    assert result.passed
    assert result.max_difference < 1e-9


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_log_probs_before_temperature_are_found(temperature):
    sampled, scores = sampled_of(3, temperature, reported_at=1.0)
    result = compare_sampled_probe(sampled, scores, temperature, 0.15)
    assert not result.passed
    for part in (f"temperature = {temperature}", f"position {result.position}", f"token {result.token_id}", "learner"):
        assert part in result.describe_sampled(temperature)


def test_a_sampled_log_prob_that_is_not_finite_fails():
    sampled, scores = sampled_of(3, 0.7, 0.7)
    sampled.reported[2] = np.nan
    assert not compare_sampled_probe(sampled, scores, 0.7, 1.0).passed


def test_few_short_beginnings_of_the_text_are_sampled_after():
    assert choose_probe_positions(2) == [1]
    assert choose_probe_positions(5) == [1, 2, 3, 4]
    assert len(choose_probe_positions(400)) == 16
    assert (min(choose_probe_positions(400)), max(choose_probe_positions(400))) == (1, 64)


def test_the_second_text_has_the_same_tokens_in_another_order():
    first, second = make_probe_pair(TOKENS)
    assert first.tolist() == TOKENS
    assert second.tolist() == TOKENS[::-1]
    assert first.dtype == second.dtype == np.int32


def test_the_text_fits_the_context():
    assert len(make_probe_text(64)) < 64
    assert 2 <= len(make_probe_text(100_000)) < 1000
