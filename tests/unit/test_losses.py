"""Policy losses: what each promises beyond its formula (see test_objective), and losses of one's own."""

import math
import re
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from r3async.config import BUILTIN_POLICY_LOSSES as NAMES
from r3async.config import AlgorithmConfig, ConfigError, check_policy_loss, config_from_dict, load_config
from r3async.learner.policy_loss import (
    POLICY_LOSSES,
    LossInputs,
    PolicyLoss,
    explain_gspo_clipping,
    needs_old_logprobs,
    resolve_policy_loss,
)
from tests.helpers.algorithms import algorithm, distance, make_samples, run


def inputs(config: AlgorithmConfig, ratios: list[float], advantages: list[float], **columns: list[float]) -> LossInputs:
    """One sample whose tokens have these ratios to the anchor."""
    anchor = torch.tensor(columns.pop("anchor", [-2.0] * len(ratios)), dtype=torch.float64)
    old = torch.tensor(columns.pop("old", anchor.tolist()), dtype=torch.float64)
    return LossInputs(
        logprobs=(anchor + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        anchor_logprobs=anchor,
        rollout_logprobs=anchor,
        old_logprobs=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.ones(len(ratios), dtype=torch.bool),
        episode_index=torch.zeros(len(ratios), dtype=torch.int64),
        num_episodes=1,
        config=config,
        chosen=torch.zeros(len(ratios), dtype=torch.bool),
    )


def slopes(given: LossInputs, loss: PolicyLoss) -> list[float]:
    return torch.autograd.grad(loss.value.sum(), given.logprobs)[0].tolist()


def check(name: str, settings: dict, given: tuple, slope: list, *, values=None, clipped=None, **columns) -> None:
    """Compare a loss with what is worked out by hand; `given` are ratios and advantages."""
    made = inputs(algorithm(policy_loss=name, **settings), *given, **columns)
    loss = POLICY_LOSSES[name](made)
    assert slopes(made, loss) == pytest.approx(slope)
    assert values is None or loss.value.tolist() == pytest.approx(values)
    assert clipped is None or loss.clipped.tolist() == clipped


def test_names_of_the_configuration_are_those_of_the_registry():
    assert set(NAMES) == set(POLICY_LOSSES)
    assert all(resolve_policy_loss(name) is POLICY_LOSSES[name] for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    check(name, {}, ([1.0] * 4, [1.0, -2.0, 0.5, 0.0]), [-1.0, 2.0, -0.5, 0.0], clipped=[False] * 4)


def test_bounds_of_truncated_pg_and_cispo_keep_every_token():
    given, clipped = ([0.5, 1.2, 3.0, 3.0], [1, 1, 1, -1]), [False, False, True, True]
    check("truncated_pg", {"truncated_pg": {"cap": 1.5}}, given, [-0.5, -1.2, -1.5, 1.5], clipped=clipped)
    check("cispo", {}, ([0.1, 6.0, 6.0], [1, 1, -1]), [-0.1, -5, 5])
    check("cispo", {"cispo": {"clip_low": 0.2}}, ([0.1], [1]), [-0.8])


def test_a_sequence_has_one_weight_the_capped_product_of_its_ratios():
    given = ([0.5, 2.0, 1.5], [1, 1, -1])
    check("sequence_truncated_pg", {}, given, [-1.5, -1.5, 1.5], clipped=[False] * 3)
    check("sequence_truncated_pg", {"truncated_pg": {"cap": 1.2}}, given, [-1.2, -1.2, 1.2], clipped=[True] * 3)


def test_ppo_stops_tokens_that_would_move_further_away():
    given, values = ([0.5, 0.5, 1.5, 1.5, 5.0], [1, -1, 1, -1, -1]), [-0.5, 0.8, -1.2, 1.5, 5]
    check("ppo", {}, given, [-0.5, 0, 0, 1.5, 5], values=values, clipped=[False, True, True, False, False])
    given, values = ([1.5, 5.0, 5.0], [-1, -1, 1]), [1.5, 3, -1.2]
    check("ppo", {"ppo": {"dual_clip": 3}}, given, [1.5, 0, 0], values=values, clipped=[False, True, True])


def test_gspo_clips_whole_samples():
    check("gspo", {}, ([1.2, 1.2, 1.2], [1, 1, -1]), [0, 0, 1.2], clipped=[True, True, False])
    # Ratios 2 and 1/2 cancel in the geometric mean.
    check("gspo", {}, ([2.0, 0.5], [1, 1]), [-1, -1], values=[-1, -1])


def test_gspo_in_its_token_form_has_the_gradient_of_the_sequence_form():
    config = algorithm(policy_loss="gspo", gspo={"clip_low": 0.5, "clip_high": 0.5})
    samples = make_samples(4, [6, 3], masked=0)
    for s in samples:
        s.advantages[:], s.weights[:] = s.advantages[0], 1 / (2 * len(s))
    gradients = run([samples], config, torch.float64, coef=0.0).logprob_grads
    want = []
    for s in samples:
        logprobs = torch.from_numpy(s.logprobs).requires_grad_()
        ratio = (logprobs - torch.from_numpy(s.rollout)).mean().exp()  # GSPO, eq. 7
        a = float(s.advantages[0])
        (-torch.minimum(ratio * a, ratio.clamp(0.5, 1.5) * a) / 2).backward()
        want.append(logprobs.grad.numpy())
    assert distance(gradients, want) < 1e-12


def test_sapo_weakens_both_directions_smoothly():
    given = inputs(algorithm(), [1.0, 3.0, 0.2, 3.0], [1, 1, -1, -1])
    on, up, down, negative = slopes(given, POLICY_LOSSES["sapo"](given))
    assert on == pytest.approx(-1)
    assert -3 < up < 0
    assert 0 < down < 0.2
    assert 0 < negative < -up, "the gate of negative advantages is the narrower one"


def test_dppo_bounds_probability_and_not_its_ratio():
    # A rare token may grow tenfold; 0.5 -> 0.85 is too high; 0.9 -> 0.72 is too low, unless it is on its way back.
    given, clipped = ([10.0, 1.5, 1.7, 0.8, 0.8, 1.7], [1, 1, 1, -1, 1, -1]), [False, False, True, True, False, False]
    bounds, p = {"dppo": {"threshold_low": 0.1, "threshold_high": 0.3}}, [0.001, 0.4, 0.5, 0.9, 0.5, 0.5]
    check("dppo", bounds, given, [-10, -1.5, 0, 0, -0.8, 1.7], clipped=clipped, anchor=np.log(p).tolist())


def test_cppo_narrows_with_the_drift_of_the_prefix_and_widens_with_the_position():
    # Each token moves by 0.1: under 0.15 alone, but not after two that each used more than the budget of 0.02.
    p, cppo = [0.1] * 4, {"threshold": 0.15, "weight_min": 1.0, "budget": 0.02}
    given = ([2.0] * 4, [1, 1, -1, 1])
    check("cppo", {"cppo": cppo}, given, [-2, 0, 2, 0], clipped=[False, True, False, True], anchor=np.log(p).tolist())
    # Weights 1, 0.75, 0.5: the last may move twice as far as the first.
    wide = {"threshold": 0.14, "weight_min": 0.5, "budget": 1.0}
    given, p = ([1.3, 1.3, 1.3], [1, 1, 1]), [0.6, 0.6, 0.6]
    check("cppo", {"cppo": wide}, given, [0, -1.3, -1.3], clipped=[True, False, False], anchor=np.log(p).tolist())
    # The budget is weighted, too: 1.75 of it before the third token, of which 1.75 times 0.12 are used.
    weighted, p = {"threshold": 0.08, "weight_min": 0.5, "budget": 0.1}, [0.4] * 3
    check("cppo", {"cppo": weighted}, given, [0, 0, 0], clipped=[True] * 3, anchor=np.log(p).tolist())
    # A prefix that has not moved leaves a budget, but the threshold stays.
    strict = {"threshold": 0.2, "weight_min": 1.0, "budget": 1.0}
    given, p = ([1.0, 1.0, 2.0], [1, 1, 1]), [0.1, 0.1, 0.3]
    check("cppo", {"cppo": strict}, given, [-1, -1, 0], clipped=[False, False, True], anchor=np.log(p).tolist())


def test_a_prefix_of_cppo_is_in_the_order_of_turns():
    # Between the first two rows a turn has not moved, which leaves more of the budget.
    config = algorithm(cppo={"threshold": 0.15, "weight_min": 1.0, "budget": 0.04})
    made = inputs(config, [2.0, 2.0, 1.0], [1, 1, 1], anchor=[math.log(0.1)] * 3)
    assert POLICY_LOSSES["cppo"](made).clipped.tolist() == [False, True, False]
    turns = torch.tensor([0, 2, 1], dtype=torch.int32)
    assert POLICY_LOSSES["cppo"](replace(made, turns=turns)).clipped.tolist() == [False] * 3


def test_tis_clips_to_the_learner_before_the_step_and_weighs_by_the_rollout():
    clipped, old = [False, True, True], [-2 + np.log(2), -2 + np.log(4), -2.0]
    # u = 1.1, 1, 1.5; w = 2, 3 (of 4), 1.
    cap, given = {"tis": {"cap": 3.0}}, ([2.2, 4.0, 1.5], [1, 1, 1])
    check("tis", cap, given, [-2.2, -3, 0], values=[-2.2, -3, -1.2], clipped=clipped, old=old)
    # u = e^0.1, 1, e^0.5; w = e^0.5, 2 (of e^2), 1.
    first = -math.exp(0.6)
    given, columns = (np.exp([0.6, 2.0, 0.5]).tolist(), [1, 1, 1]), {"anchor": [-1.5, -3.0, -1.0], "old": [-1.0] * 3}
    check("tis", {}, given, [first, -2, 0], values=[first, -2, -1.2], clipped=clipped, **columns)
    samples = make_samples(3, [5])
    a, b = (run([samples], algorithm(policy_loss="tis", anchor=of)) for of in ("recomputed", "rollout"))
    assert a.loss == b.loss


def test_which_losses_need_recomputed_logprobs():
    assert not needs_old_logprobs(algorithm())
    assert needs_old_logprobs(algorithm(anchor="recomputed"))
    assert needs_old_logprobs(algorithm(policy_loss="tis"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An importable module with a loss."""

    def reinforce(inputs: LossInputs) -> PolicyLoss:
        scale = inputs.config.loss_args.get("scale", 1.0)
        return PolicyLoss(-scale * inputs.advantages * inputs.logprobs, clipped=torch.zeros_like(inputs.mask))

    made = types.ModuleType("made_up_losses")
    made.reinforce = reinforce  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_losses", made)
    return made


def test_a_loss_of_one_s_own(module):
    config = algorithm(policy_loss="made_up_losses:reinforce", loss_args={"scale": 2.0})
    assert resolve_policy_loss(config.policy_loss) is module.reinforce
    samples = make_samples(3, [5, 4])
    got = run([samples], config, torch.float64, coef=0.0)
    want = [np.where(s.mask, -2 * s.advantages * s.weights, 0) for s in samples]
    assert distance(got.logprob_grads, want) < 1e-12


def test_what_a_loss_of_one_s_own_says_of_masked_tokens_does_not_matter(module):
    def careless(inputs: LossInputs) -> PolicyLoss:
        value = torch.where(inputs.mask, -inputs.advantages * inputs.logprobs, torch.nan)
        return PolicyLoss(value, clipped=torch.ones_like(inputs.mask))

    module.careless = careless
    settings = {"policy_loss": "made_up_losses:careless"}
    samples = make_samples(3, [5, 9], masked=0.3)
    got = run([samples], algorithm(**settings), torch.float64, coef=0.0, max_token_age=3)
    keeps = [s.mask & (s.ages <= 3) for s in samples]
    want = [np.where(k, -s.advantages * s.weights, 0) for s, k in zip(samples, keeps, strict=True)]
    assert distance(got.logprob_grads, want) < 1e-12
    assert got.loss == pytest.approx(sum(float(w @ x.logprobs) for w, x in zip(want, samples, strict=True)))
    kept, trained = sum(k.sum() for k in keeps), sum(s.mask.sum() for s in samples)
    assert 0 < kept < trained < 14
    assert got.sums.to_metrics()["rollout_corr/clipped_fraction"] == pytest.approx(kept / trained)


def test_what_is_no_loss_is_refused_when_the_config_is_read():
    says = rf"there is none of that name; built in: {', '.join(NAMES)}\."
    with pytest.raises(ConfigError, match=rf"^\[algorithm\] `policy_loss` = 'zzz'.*{says}"):
        load_config("quickstart", ["algorithm.policy_loss=zzz"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("made_up_losses:other", "cannot be loaded: module 'made_up_losses' has no attribute 'other'"),
        (":loss", "cannot be loaded"),
    ],
)
def test_what_is_no_loss_of_one_s_own_is_refused_when_the_run_is_checked(module, name, says):
    config = load_config("quickstart", [f"algorithm.policy_loss='{name}'"])
    with pytest.raises(ConfigError, match=rf"^\[algorithm\] `policy_loss` = '{name}'.*{re.escape(says)}"):
        check_policy_loss(config.algorithm)


KL, MAXRL = "[algorithm.rollout_kl]", {"advantage": "maxrl"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ppo": {"clip_low": 0.0}}, "[algorithm.ppo] `clip_low` must be greater than 0"),
        ({"ppo": {"dual_clip": 1.0}}, "[algorithm.ppo] `dual_clip` must be more than 1"),
        ({"tis": {"cap": 0.0}}, "[algorithm.tis] `cap`"),
        ({"clip_cov": {"share": 2.0}}, "[algorithm.clip_cov] `share` must be at most 1"),
        ({"clip_cov": {"low": 5.0}}, "[algorithm.clip_cov] `low` must be less than `high`"),
        ({"kl_cov": {"share": 2.0}}, "[algorithm.kl_cov] `share` must be at most 1"),
        ({"cppo": {"weight_min": 1.1}}, "[algorithm.cppo] `weight_min` must be at most 1"),
        ({"policy_loss": "decoupled_ppo"}, 'here it is `algorithm.policy_loss="tis"` and `algorithm.tis.cap=5`'),
        ({"sapo": {"tau_negative": 0.0}}, "[algorithm.sapo] `tau_negative`"),
        ({"correction": {"icepop_low": 1.5}}, "[algorithm.correction] `icepop_low` must be in 0..1"),
        ({"correction": {"product_high": 0.5}}, "[algorithm.correction] `product_high` must be at least 1"),
        ({"correction": {"veto_high": 0.9}}, "[algorithm.correction] `veto_high` must be at least 1"),
        ({"anchor": "old"}, "`algorithm.anchor` = 'old'"),
        ({"ratio_cap": 2.0, "policy_loss": "tis"}, "algorithm.truncated_pg.cap"),
        ({"correction": {"weight": "token"}}, "[algorithm.correction] `weight` needs `numerator`"),
        ({"correction": {"weight": "token", "numerator": "recomputed"}}, "counts recomputed / rollout twice"),
        ({"reduction": "mean"}, "`algorithm.reduction` = 'mean'"),
        (MAXRL | {"overlong_penalty": {"buffer": 4}}, "[algorithm] `overlong_penalty` makes rewards negative"),
        ({"rollout_kl": {"target": 0.1, "max": 0.1}}, "[algorithm.rollout_kl] `max` must be more than `target`"),
        ({"rollout_kl": {"target": 0.1, "coef": 0.0}}, f"{KL} with `target`, `coef` must be more than 0"),
        ({"rollout_kl": {"target": 0.1, "limit": 0.05}}, "[algorithm.rollout_kl] `limit` must be at least `target`"),
        ({"rollout_kl": {"limit": 0.1, "probe_share": 0.0}}, "[algorithm.rollout_kl] `limit` needs `probe_share`"),
        ({"rollout_kl": {"coef_min": 0.1}}, "algorithm.rollout_kl.coef"),
        ({"rollout_kl": {"target": 0.0}}, "[algorithm.rollout_kl] `target` must be greater than 0"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        config_from_dict({"algorithm": settings})


def test_sides_of_bounds_are_those_of_the_ratio_that_was_bounded():
    """Where they are not the token's own: an episode's ratio, or the ratio to another policy than the anchor."""
    config = algorithm(gspo={"clip_low": 0.2, "clip_high": 0.2})
    loss = POLICY_LOSSES["gspo"](inputs(config, [0.9, 4.0], [1, 1]))  # of one episode: 1.9
    assert loss.clipped.tolist() == [True, True]
    assert loss.high.tolist() == [True, True]
    given = inputs(algorithm(), [1.5, 0.5], [1, -1])
    assert POLICY_LOSSES["ppo"](given).high.tolist() == [True, False]
    capped = replace(given, old_logprobs=given.logprobs.detach() + 3, rollout_logprobs=given.logprobs - 3)
    assert POLICY_LOSSES["tis"](capped).high.tolist() == [True, True]  # the correction's cap


def test_equal_weights_in_bf16_are_outside_gspos_range_and_inside_the_one_that_noise_widens():
    """Ratios are 1 but for a relative rounding of 2^-9 of log-probs: nothing should be clipped."""
    rng = np.random.default_rng(0)
    lengths = [8] * 200
    noise = 0.01
    delta = np.concatenate([rng.normal(0, noise, n) for n in lengths])
    clipped = {}
    for given in (0.0, noise):
        config = algorithm(policy_loss="gspo", gspo={"noise": given})
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        advantages = torch.from_numpy(rng.choice([-1.0, 1.0], len(lengths)))[sequence]
        zeros, mask = torch.zeros(len(delta), dtype=torch.float64), torch.ones(len(delta), dtype=torch.bool)
        seen = LossInputs(torch.from_numpy(delta), zeros, zeros, None, advantages, mask, sequence, len(lengths), config)
        clipped[given] = float(POLICY_LOSSES["gspo"](seen).clipped.double().mean())
        metrics = {"rollout_corr/clipped_fraction": clipped[given], "rollout_kl/k3_staleness_0": noise**2 / 2}
        assert ("gspo.noise=0.01" in explain_gspo_clipping(config, metrics)) == (given == 0)
    assert clipped[0.0] > 0.35  # of one side each
    assert clipped[noise] < 0.01


def test_truncated_pg_is_cispo_with_its_cap():
    same = inputs(algorithm(truncated_pg={"cap": 1.7}, cispo={"clip_high": 0.7}), [0.5, 1.2, 3.0], [1, -1, 1])
    one, other = (POLICY_LOSSES[name](same).value.tolist() for name in ("truncated_pg", "cispo"))
    assert one == other
