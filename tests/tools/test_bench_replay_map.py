"""`bench replay-map`: its engine is the learner's model, its disturbances do what they say, and its statistics are right."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dev.__main__ import app
from dev.bench.replay_map import (
    MODES,
    WINDOW,
    Point,
    Report,
    Run,
    Setting,
    chosen,
    config_of,
    curve,
    difference,
    quickly,
    read,
    rows,
    run,
)
from dev.bench.replay_training import Disturbance, InProcessRun
from r3async.config import Config, ConfigError
from r3async.data.tokens import Sample
from r3async.learner.batch import pack_samples


def small(setting: Setting, replay: str = "rollout", seed: int = 0) -> Config:
    return config_of(msgspec.structs.replace(setting, groups=2, probe_share=1.0), replay, seed)


def trained(model: Path, setting: Setting, replay: str = "rollout", **disturbed: float | str) -> list[dict[str, float]]:
    return list(InProcessRun(small(setting, replay), model, Disturbance(**disturbed)).steps())  # type: ignore[arg-type]


def largest_error(made: InProcessRun, samples: list[Sample], *, replay: bool) -> float:
    """Largest |engine - learner| of the sampled tokens."""
    micro_batches = pack_samples(samples, 8192)
    scored = zip(made.learner.logprobs(micro_batches, replay=replay), micro_batches, strict=True)
    return max(float(np.abs(s - m.table["rollout_logprobs"])[m.table["loss_mask"]].max()) for s, m in scored)


def logprob_errors(model: Path, **disturbed: float | str) -> tuple[float, float]:
    """The same of one step, with the engine's routes and with the learner's own."""
    made = InProcessRun(small(Setting(steps=1)), model, Disturbance(**disturbed))  # type: ignore[arg-type]
    samples = [s for group in made.play(0) for t in group for s in t.samples]
    return largest_error(made, samples, replay=True), largest_error(made, samples, replay=False)


def test_undisturbed_the_engine_is_the_learner(untrained: Path) -> None:
    assert max(logprob_errors(untrained)) < 1e-4
    (step,) = trained(untrained, Setting(steps=1))
    assert step["routing/agreement"] == 1.0
    assert step["rollout_kl/k3"] < 1e-9


def test_what_noise_does_is_mostly_mended_by_replay(untrained: Path) -> None:
    (step,) = trained(untrained, Setting(steps=1), noise=0.3)
    assert 0.3 < step["routing/agreement"] < 1.0
    assert 0 < step["rollout_kl/k3"] < step["rollout_kl/served_k3"] / 2


def test_an_engine_in_bfloat16_rounds_and_rounds_more_with_keys_and_values_in_fp8(untrained: Path) -> None:
    bfloat16, fp8 = (logprob_errors(untrained, precision=name)[0] for name in ("bfloat16", "fp8_kv"))
    assert 1e-4 < bfloat16 < fp8 < 0.5


def test_more_noise_is_less_agreement_and_equal_seeds_are_equal_runs(untrained: Path) -> None:
    found = [trained(untrained, Setting(steps=1), noise=noise)[0]["routing/agreement"] for noise in (0.03, 0.3, 3.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[2] + 0.2
    once, again = (trained(untrained, Setting(steps=2), noise=0.1) for _ in range(2))
    assert once == again


def test_noise_in_the_learners_routers_parts_its_own_passes(untrained: Path) -> None:
    assert max(logprob_errors(untrained, learner_noise=1.0)) > 1e-3


def test_every_token_is_sampled_by_weights_as_old_as_was_asked_for(untrained: Path) -> None:
    made = InProcessRun(small(Setting(age=2)), untrained)
    parameters = list(made.learner.model.parameters())
    kept = []
    for version in range(4):
        if version:
            with torch.no_grad():
                for p in parameters:
                    p.mul_(1.1)
            made.keep()
        kept.append([p.detach().clone() for p in parameters])
    samples = [s for group in made.play(3) for t in group for s in t.samples]
    assert {int(v) for s in samples for v in s.table["policy_version"] if v >= 0} == {1}
    errors = []
    for weights in kept:
        with torch.no_grad():
            for p, weight in zip(parameters, weights, strict=True):
                p.copy_(weight)
        errors.append(largest_error(made, samples, replay=False))
    assert errors[1] < 1e-3 < min(errors[0], errors[2], errors[3])


def test_tokens_that_the_learner_is_sure_of_can_be_left_out_of_replay(untrained: Path) -> None:
    def recorded(margin: float) -> float:
        made = InProcessRun(small(Setting(steps=1)), untrained, Disturbance(noise=0.1, margin=margin))
        columns = [t.samples[0].table["routing_recorded"][:-1] for g in made.play(0) for t in g]
        return float(np.concatenate(columns).mean())

    few, all_of_them = recorded(0.05), recorded(100.0)
    assert all_of_them == 1.0
    assert 0 < few < 0.9


def test_settings_that_need_a_whole_pipeline_are_refused(untrained: Path) -> None:
    config = small(Setting(steps=1))
    config = msgspec.structs.replace(config, episode=msgspec.structs.replace(config.episode, max_turns=2))
    with pytest.raises(ConfigError, match="max_turns=1"):
        InProcessRun(config, untrained)
    with pytest.raises(ConfigError, match="precision 'int4' must be one of"):
        Disturbance(precision="int4")
    with pytest.raises(ConfigError, match="--axes 'depth' must be of apart, "):
        chosen(["apart", "depth"])


# -- statistics ----------------------------------------------------------------------------------------------------------


def a_run(replay: str, seed: int, *reward: float, point: str = "p") -> Run:
    flat = [0.1] * len(reward)
    return Run(point, Setting(), replay, seed, list(reward), flat, flat, flat, 1.0)


def test_a_difference_of_pairs_by_hand() -> None:
    found = difference([0.1, 0.2, 0.3, 0.4, 0.5])
    error = math.sqrt(0.025) / math.sqrt(5)
    assert found.mean == pytest.approx(0.3)
    assert found.half_width == pytest.approx(2.776 * error)
    assert found.detectable == pytest.approx((2.776 + 0.941) * error)


def test_what_is_called_detectable_is_found_in_four_of_five_experiments() -> None:
    rng = np.random.default_rng(0)
    detectable = (2.776 + 0.941) / math.sqrt(5)  # of five pairs with a standard deviation of 1
    found = [difference(list(rng.normal(detectable, 1.0, 5))) for _ in range(2000)]
    power = np.mean([abs(d.mean) > d.half_width for d in found])
    assert power == pytest.approx(0.8, abs=0.05)


def test_rows_pair_equal_seeds_and_count_collapses() -> None:
    runs = [a_run("off", s, 0.5, 0.8, 0.6, 0.3 + 0.1 * s) for s in range(2)]
    runs += [a_run("rollout", s, 0.5, 0.8, 0.7, 0.5) for s in (1, 0)]
    off, r3 = rows(runs)
    assert (off.replay, off.seeds, off.collapsed, r3.collapsed) == ("off", 2, 1, 0)
    assert off.gain is not None
    assert off.gain.mean == pytest.approx(0.15)
    assert r3.gain is None


def test_a_curve_leaves_out_the_steps_that_have_no_measurement() -> None:
    metrics = [{"x": 1.0}] * (WINDOW - 1) + [{}] + [{"x": 3.0}, {}, {"x": 5.0}]
    assert curve(metrics, "x") == [1.0, 4.0]
    with pytest.raises(ValueError, match="at least one data point"):
        curve([{}], "x")


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_measures_every_mode_and_adds_only_what_is_missing(tmp_path: Path) -> None:
    data = tmp_path / "runs.jsonl"
    answer = CliRunner().invoke(app, ["bench", "replay-map", "--quick", "--json", "--data", str(data)])
    assert answer.exit_code == 0, answer.output
    report = msgspec.json.decode(answer.stdout.splitlines()[-1], type=Report)
    assert [(r.replay, r.seeds) for r in report.rows] == [(mode, 2) for mode in MODES]
    off, _, r3 = report.rows
    # Without replay the loss sees what is served. Equal seeds began with equal weights, and sampled the same.
    assert off.replayed == pytest.approx(off.served)
    assert r3.replayed < r3.served
    kept = read(data)
    assert len(kept) == 2 * len(MODES)
    assert all(len(r.reward) == math.ceil(r.setting.steps / WINDOW) for r in kept)
    said: list[str] = []
    again = run(quickly(), [0, 1], said.append, data)
    assert said == []
    assert again.rows == report.rows


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="not a file of this benchmark's runs"):
        run([Point("base", Setting())], [0], print, tmp_path / "other.jsonl")
