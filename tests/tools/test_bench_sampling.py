"""`python -m dev bench sampling`: real vLLM and a real learner, with the mask and without."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from dev.__main__ import app
from dev.bench.compare import HEADLINES
from dev.bench.sampling import Report, render


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(580)
def test_without_the_mask_log_probs_are_too_low():
    answer = CliRunner().invoke(app, ["bench", "sampling", "--quick", "--seeds", "0", "--json"])
    assert answer.exit_code == 0, answer.output
    report = msgspec.json.decode(answer.stdout.splitlines()[-1], type=Report)
    (seed,) = report.seeds
    assert seed.scored.whole.tokens == report.job.samples * report.job.new_tokens
    assert 1 <= report.support_tokens < report.job.vocab_size / 2
    assert report.support_bytes <= report.job.vocab_size / 8 + 3
    # What top-p leaves has 95 % at least, and less than all.
    assert seed.scored.unmasked.mean < seed.scored.masked.mean - 0.01
    assert seed.scored.unmasked.k3 > seed.scored.masked.k3
    assert "mask" in render(report)
    found = {headline.name: headline.value for headline in HEADLINES["sampling"](msgspec.to_builtins(report))}
    assert found["masked_over_unmasked"] == pytest.approx(seed.scored.masked.k3 / seed.scored.unmasked.k3)
    assert found["masked_over_whole"] == pytest.approx(seed.scored.masked.k3 / seed.scored.whole.k3)
    assert found["support_bytes"] == report.support_bytes
