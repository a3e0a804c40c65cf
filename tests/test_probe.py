"""The probe tells weights that arrived from weights that did not."""

import numpy as np
import pytest

from r3async.config import load_config
from r3async.weights.probe import compare_probe, probe_text, probe_tolerance

TOKENS = [5, 6, 7, 8]


def compare(engine, tolerance=1e-3):
    return compare_probe(TOKENS, np.array([-1.0, -2.0, -3.0], np.float32), np.array(engine, np.float32), tolerance)


def test_rounding_passes():
    assert compare([-1.00001, -2.0, -3.0]).passed


def test_a_mismatch_fails_and_names_the_largest_difference():
    result = compare([-1.0, -2.0, -7.5])
    assert not result.passed
    assert (result.position, result.token_id) == (3, 8)
    for part in ("4.5 at position 3", "token 8", "-3.0000", "-7.5000", "weights.probe_tolerance"):
        assert part in result.describe()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_log_prob_that_is_not_finite_fails(value):
    assert not compare([-1.0, value, -3.0]).passed


def test_a_score_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="scored"):
        compare([-1.0])


def test_the_tolerance_follows_the_precision_unless_it_is_set():
    assert probe_tolerance(load_config("quickstart")) == 1e-3
    assert probe_tolerance(load_config("quickstart", ["generator.dtype=bfloat16"])) == 0.15
    assert probe_tolerance(load_config("quickstart", ["weights.probe_tolerance=0.5"])) == 0.5


def test_the_text_fits_the_context():
    assert len(probe_text(64)) < 64
    assert 2 <= len(probe_text(100_000)) < 1000
