"""Advantages: rewards are credited to tokens, compared within a group, and become the
column `advantages`.

An episode's rewards become scores according to `algorithm.credit`, which also decides what is
compared within a group:

* `turn`: the reward of turn j with turn j of the episodes of the group that have one. All tokens of
  the turn share it.
* `trajectory`: the sum of the episode's turn rewards with that of the other episodes. All sampled
  tokens of the episode share it, in all of its samples (step-wise rows).
* `token`: at each token, the sum of the column `rewards` from there to the end of the episode, in
  the order of its turns, whichever samples they are in. Baseline and scale are those of the same
  sum at the beginning of the token's turn, over the episodes that have that turn. This is for
  rewards that are credited at tokens. (Baseline and scale are computed by turn, whereas GRPO with
  process supervision, arXiv 2402.03300, section 4.1.3, pools all steps.)

`compute_baseline_and_scale` turns scores into advantages, or your own function,
`algorithm.advantage = "module:function"`:

    def best_of_group(inputs: AdvantageInputs) -> np.ndarray:
        return np.where(inputs.scores == inputs.scores.max(), 1.0, -1.0)

Tokens that no turn sampled have advantage 0. Episodes without turns have nothing to train and are
compared with no other episode.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from r3async.config import (
    AlgorithmConfig,
    ConfigError,
    OverlongPenaltyConfig,
    import_advantage,
)
from r3async.data.tokens import Sample, Trajectory, Turn

STD_EPS = 1e-3
"""What is added to the standard deviation of scores, as a share of the largest. So rewards of 0..1
and the same times 0.001 have the same advantages, and near-ties are damped at any scale."""
SCORE_RESOLUTION = 4 * float(np.finfo(np.float32).eps)
"""The relative difference up to which scores are equal, as a share of the largest. Rewards are
stored as float32, and sums of the same rewards in another order (0.1 + 0.2, 0.3) differ by
rounding. An advantage computed from rounding would be noise, scaled to full size."""


def compute_overlong_penalty(
    length: int, max_new_tokens: int, settings: OverlongPenaltyConfig
) -> float:
    """Return the penalty, at most 0, that is added to the reward of an answer of `length` tokens.

    With `L = max_new_tokens`, it is `factor` times 0 up to `L - buffer` tokens, then
    `(L - buffer - length) / buffer`, and -1 from L on. DAPO, arXiv 2503.14476, eq. 13.
    """
    if not settings.buffer:
        return 0.0
    free = max_new_tokens - settings.buffer
    return settings.factor * min(max((free - length) / settings.buffer, -1.0), 0.0)


def is_overlong(trajectory: Trajectory) -> bool:
    """Return True if the episode ended because its context was full or time ran out, or if its
    last answer was cut."""
    return trajectory.stop_reason in ("length", "timeout") or any(
        turn.stop_reason == "length"
        for turn in sorted(trajectory.turns, key=lambda t: t.index)[-1:]
    )


def assign_advantages(
    groups: Sequence[Sequence[Trajectory]],
    config: AlgorithmConfig,
    *,
    max_new_tokens: int | None = None,
) -> tuple[list[Sample], dict[str, float]]:
    """Return the samples of all groups of a step, in order, with the column `advantages` (float32
    `[T]`), and figures.

    `loss_mask` is cleared where a filter drops a sample: `filter_zero_variance` drops groups with
    zero variance, and `overlong_filter` drops episodes that ended by length (their scores are
    still compared with those of others). `max_new_tokens` is needed for
    `compute_overlong_penalty`, whose value is added to the reward of each turn (and, with
    `credit = "token"`, to that of its last token).

    A group has zero variance if no compared scores differ without the penalty: answers that are all
    wrong have nothing to compare, whatever their lengths. Kept in training, such a group has
    advantages by length.

    The figures are always the same: `advantage/zero_variance_groups` (groups with zero variance),
    `advantage/zero_variance_share` (as a share of all groups), `advantage/overlong_samples`
    (episodes that ended by length), `advantage/filtered_tokens` (tokens that are no longer
    trained), `advantage/overlong_penalty` (mean over turns), and over trained tokens
    `advantage/mean`, `advantage/std`, `advantage/abs_max`.

    Each trajectory must be trainable (`schedule.validation.check_trajectory`). Raises `ValueError`
    if a group holds trajectories of another group.
    """
    if config.overlong_penalty.buffer and max_new_tokens is None:
        raise ValueError("`overlong_penalty` needs `max_new_tokens`")
    episodes = [
        [_EpisodeTokens.from_trajectory(t, config, max_new_tokens or 0) for t in group]
        for group in groups
    ]
    samples: list[Sample] = []
    masks: list[np.ndarray] = []
    values: list[np.ndarray] = []
    flat = 0
    overlong = 0
    before = 0
    for group in episodes:
        differs = _assign_group_advantages(group, config)
        flat += not differs
        for episode in group:
            cut = is_overlong(episode.trajectory)
            drop = (config.filter_zero_variance and not differs) or (config.overlong_filter and cut)
            overlong += cut
            for sample, advantages in zip(
                episode.trajectory.samples, episode.split_advantages(), strict=True
            ):
                mask = sample.table["loss_mask"]
                before += int(np.count_nonzero(mask))
                samples.append(sample)
                masks.append(np.zeros_like(mask) if drop else mask)
                values.append(advantages.astype(np.float32))
    # Tokens without a log-prob are not trained, so they count in no mean and no standard deviation.
    known = [
        m & np.isfinite(s.table["rollout_logprobs"]) for m, s in zip(masks, samples, strict=True)
    ]
    if config.advantage in ("reinforce_pp", "reinforce_pp_baseline"):
        values = standardize_advantages(values, known)
    trained = np.concatenate(
        [v[m] for v, m in zip(values, known, strict=True)] or [np.zeros(0)]
    ).astype(np.float64)
    penalties = [p for group in episodes for e in group for p in e.penalties.values()]
    figures = {
        "advantage/zero_variance_groups": float(flat),
        "advantage/zero_variance_share": flat / max(len(episodes), 1),
        "advantage/overlong_samples": float(overlong),
        "advantage/filtered_tokens": float(before - sum(int(np.count_nonzero(m)) for m in masks)),
        "advantage/overlong_penalty": float(np.mean(penalties)) if penalties else 0.0,
        "advantage/mean": float(trained.mean()) if len(trained) else 0.0,
        "advantage/std": float(trained.std()) if len(trained) else 0.0,
        "advantage/abs_max": float(np.abs(trained).max()) if len(trained) else 0.0,
    }
    return [
        Sample(s.sample_id, s.table.with_columns(advantages=v, loss_mask=m), s.temperature)
        for s, v, m in zip(samples, values, masks, strict=True)
    ], figures


@dataclass
class _EpisodeTokens:
    """One trajectory with the N tokens of its samples laid end to end."""

    trajectory: Trajectory
    turns: dict[int, Turn]
    penalties: dict[int, float]
    """Overlong penalty of each turn, by turn index."""
    token_turns: np.ndarray
    """int32 `[N]`: the turn that sampled each token, or -1."""
    reward_to_go: np.ndarray
    """float64 `[N]`: the sum of the column `rewards` and penalties from a token to the end; for
    credit by token only."""
    task_reward_to_go: np.ndarray
    """float64 `[N]`: the same without penalties."""
    advantages: np.ndarray
    """float64 `[N]`: the advantages, 0 until `_assign_group_advantages` sets them."""

    @staticmethod
    def from_trajectory(
        trajectory: Trajectory, config: AlgorithmConfig, max_new_tokens: int
    ) -> _EpisodeTokens:
        turns = {turn.index: turn for turn in trajectory.turns}
        penalties = {
            i: compute_overlong_penalty(t.stop - t.start, max_new_tokens, config.overlong_penalty)
            for i, t in turns.items()
        }
        tables = [sample.table for sample in trajectory.samples]
        turn = (
            tables[0]["turn"] if len(tables) == 1 else np.concatenate([t["turn"] for t in tables])
        )
        advantages = np.zeros(len(turn))
        if config.credit != "token":
            return _EpisodeTokens(
                trajectory, turns, penalties, turn, np.zeros(0), np.zeros(0), advantages
            )
        order = _order_by_turn(turn, [len(t) for t in tables])
        rewards = np.concatenate([t["rewards"] for t in tables]).astype(np.float64)
        task_to_go = _sum_to_end(rewards, order)
        for index, penalty in penalties.items():
            at = np.flatnonzero(turn == index)
            if penalty and len(at):
                rewards[at[-1]] += penalty
        return _EpisodeTokens(
            trajectory, turns, penalties, turn, _sum_to_end(rewards, order), task_to_go, advantages
        )

    def turn_reward(self, turn: int) -> float:
        """Return the reward of one turn, its penalty included."""
        return self.turns[turn].reward + self.penalties[turn]

    def split_advantages(self) -> list[np.ndarray]:
        """Return `advantages`, split by sample."""
        edges = itertools.accumulate(
            (len(sample.table) for sample in self.trajectory.samples), initial=0
        )
        return [self.advantages[start:stop] for start, stop in itertools.pairwise(edges)]


def _order_by_turn(turn: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Return int64 `[N]`: the order of an episode's tokens, laid end to end by sample, that
    follows its turns.

    A token that no turn sampled comes after the turn before it in its sample, or before all turns.

    Args:
        turn: int32 `[N]`: the turn of each token, or -1.
        lengths: The lengths of the samples.
    """
    belongs = turn.astype(np.int64)
    start = 0
    for length in lengths:
        belongs[start : start + length] = np.maximum.accumulate(belongs[start : start + length])
        start += length
    return np.argsort(belongs, kind="stable")


def _sum_to_end(rewards: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return float64 `[N]`: the sum of `rewards` from each token to the end, in this
    order of tokens."""
    sums = np.zeros(len(rewards))
    sums[order] = np.cumsum(rewards[order][::-1])[::-1]
    return sums


class _ComparedEpisode(NamedTuple):
    """An episode in one comparison within its group.

    Attributes:
        tokens: The tokens that the comparison is about.
        earned: What each of them earned, float64.
        score: What is compared, with penalties.
        task_score: The same without penalties.
    """

    episode: _EpisodeTokens
    tokens: np.ndarray
    earned: np.ndarray | float
    score: float
    task_score: float


@dataclass(frozen=True)
class AdvantageInputs:
    """The inputs of your own advantage estimator: n members of a group that are compared, at least
    two, whose scores differ. Where none do, there is nothing to compare, and advantages are 0."""

    scores: np.ndarray
    """float64 `[n]`: scores, with the penalties of `algorithm.overlong_penalty`."""
    lengths: np.ndarray
    """int64 `[n]`: the number of sampled tokens of what has the score."""
    config: AlgorithmConfig


def compute_custom_advantages(inputs: AdvantageInputs) -> np.ndarray:
    """Return float64 `[n]`: the advantages by the function that `algorithm.advantage` names.

    Raises `ValueError` if it returns anything but a finite number for each score.
    """
    path = inputs.config.advantage
    made = np.asarray(import_advantage(path)(inputs), np.float64)
    if made.shape != inputs.scores.shape or not np.isfinite(made).all():
        raise ValueError(
            f"`algorithm.advantage` = {path!r} must return one finite number a score, here "
            f"{len(inputs.scores)}, and returned {made.tolist()}"
        )
    return made


def check_custom_advantage(config: AlgorithmConfig) -> None:
    """Raise `ConfigError` if your own advantage estimator cannot be loaded, or returns for two
    made up samples anything but two finite numbers."""
    import_advantage(config.advantage)
    try:
        compute_custom_advantages(AdvantageInputs(np.array([0.0, 1.0]), np.array([3, 5]), config))
    except Exception as error:
        raise ConfigError(
            f"`algorithm.advantage` = {config.advantage!r} fails with two made up samples: "
            f"{type(error).__name__}: {error}"
        ) from error


def _assign_group_advantages(group: Sequence[_EpisodeTokens], config: AlgorithmConfig) -> bool:
    """Set the advantages of one group's episodes. Return True if any compared scores differ
    without penalties."""
    indices = {e.trajectory.group_index for e in group}
    if len(indices) > 1:
        raise ValueError(
            f"advantages are relative to one group, got trajectories of groups {sorted(indices)}"
        )
    differs = False
    for compared in _iter_comparisons(group, config.credit):
        scores = np.array([each.score for each in compared])
        if ":" not in config.advantage:
            baselines, scale = compute_baseline_and_scale(scores, config.advantage)
        elif has_variance(scores):
            lengths = [len(each.episode.token_turns[each.tokens]) for each in compared]
            inputs = AdvantageInputs(scores.copy(), np.asarray(lengths, np.int64), config)
            baselines, scale = scores - compute_custom_advantages(inputs), 1.0
        else:
            baselines, scale = scores, 0.0
        for each, baseline in zip(compared, baselines.tolist(), strict=True):
            each.episode.advantages[each.tokens] = scale * (each.earned - baseline)
        differs |= has_variance([each.task_score for each in compared])
    return differs


def group_has_variance(
    group: Sequence[Trajectory], config: AlgorithmConfig, max_new_tokens: int
) -> bool:
    """Return True if any compared scores in a group differ without penalties.

    `advantage/zero_variance_groups` counts the groups where none do.
    """
    episodes = [_EpisodeTokens.from_trajectory(t, config, max_new_tokens) for t in group]
    comparisons = _iter_comparisons(episodes, config.credit)
    return any(has_variance([each.task_score for each in compared]) for compared in comparisons)


def _iter_comparisons(
    group: Sequence[_EpisodeTokens], credit: str
) -> Iterator[list[_ComparedEpisode]]:
    """Yield the comparisons within a group."""
    if credit == "trajectory":
        compared = []
        for e in group:
            if e.turns:
                total = float(sum(e.turn_reward(i) for i in e.turns))
                task_total = float(sum(turn.reward for turn in e.turns.values()))
                compared.append(_ComparedEpisode(e, e.token_turns >= 0, total, total, task_total))
        yield compared
        return
    for index in sorted({i for e in group for i in e.turns}):
        compared = []
        for e in group:
            if index not in e.turns:
                continue
            at = np.flatnonzero(e.token_turns == index)
            if credit == "turn":
                reward = e.turn_reward(index)
                compared.append(_ComparedEpisode(e, at, reward, reward, e.turns[index].reward))
            elif len(at):
                earned = e.reward_to_go[at]
                first = at[0]
                compared.append(
                    _ComparedEpisode(
                        e, at, earned, float(earned[0]), float(e.task_reward_to_go[first])
                    )
                )
        yield compared


# -- advantages from scores ------------------------------------------------------------------------


def has_variance(scores: Sequence[float] | np.ndarray) -> bool:
    """Return True if two scores differ by more than `SCORE_RESOLUTION`."""
    if len(scores) < 2:
        return False
    low = float(np.min(scores))
    high = float(np.max(scores))
    return high - low > SCORE_RESOLUTION * max(abs(low), abs(high))


def compute_baseline_and_scale(
    scores: Sequence[float] | np.ndarray, estimator: str
) -> tuple[np.ndarray, float]:
    """Return the baselines, float64 `[n]`, and the scale for `scores` `[n]`, according to
    `algorithm.advantage`.

    The scores `r` of a group's n members are compared with each other; each estimator is a baseline
    `b_i` and a scale `c`, and gives the advantage `c (r_i - b_i)`:

    | name                                | `b_i`                | `c`                 | source                             |
    |-------------------------------------|----------------------|---------------------|------------------------------------|
    | `grpo`                              | mean(r)              | 1 / (std(r) + eps)  | arXiv 2402.03300, section 4.1.2    |
    | `dr_grpo`                           | mean(r)              | 1                   | arXiv 2503.20783                   |
    | `rloo`                              | mean of the others' r | 1                  | arXiv 2402.14740                   |
    | `maxrl`, for `r >= 0`               | mean(r)              | 1 / mean(r)         | arXiv 2602.02710                   |
    | `reinforce_pp_baseline`             | mean(r)              | 1, then batch       | arXiv 2501.03262, "w/ Baseline"    |
    | `reinforce_pp`                      | 0                    | 1, then batch       | arXiv 2501.03262                   |

    std has n - 1 in the denominator, and eps is `STD_EPS` times the largest |r|: advantages do not
    depend on the scale of rewards. "Then batch": the mean of the advantages of all trained tokens
    of the step is subtracted from them, and they are divided by their standard deviation
    (`standardize_advantages`).

    Fewer than two scores, or equal ones, have nothing to compare: their advantages are exactly 0,
    except under `reinforce_pp`, which compares with the whole batch. So a batch has variance
    exactly where a trained token's advantage is not 0, and this decides whether an update is made
    (`minibatch.Minibatch.skip_cause`).
    """
    values = np.asarray(scores, np.float64)
    n = len(values)
    if estimator == "reinforce_pp":
        return np.zeros(n), 1.0
    if not has_variance(values):
        return np.zeros(n), 0.0
    if estimator == "rloo":
        return (values.sum() - values) / (n - 1), 1.0
    mean = np.full(n, values.mean())
    if estimator == "grpo":
        return mean, float(1 / (values.std(ddof=1) + STD_EPS * np.abs(values).max()))
    if estimator == "maxrl":
        if values.min() < 0:
            raise ValueError(
                f"`advantage` = 'maxrl' is for rewards >= 0, and there is one of {values.min():g}"
            )
        return mean, float(1 / values.mean())
    if estimator in ("dr_grpo", "reinforce_pp_baseline"):
        return mean, 1.0
    raise ValueError(f"advantage {estimator!r} is not known")


def standardize_advantages(
    advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return float32 `[T_i]`: `(a - mean) / std` where `masks` is True, and 0 elsewhere.

    Mean and standard deviation are over all tokens of the step where `masks` is True. If these are
    all equal, the result is 0 everywhere.
    """
    trained = np.concatenate(
        [a[m] for a, m in zip(advantages, masks, strict=True)] or [np.zeros(0)]
    ).astype(np.float64)
    if has_variance(trained):
        mean = float(trained.mean())
        scale = 1 / float(trained.std())
    else:
        mean = 0.0
        scale = 0.0
    return [
        np.where(m, (a.astype(np.float64) - mean) * scale, 0.0).astype(np.float32)
        for a, m in zip(advantages, masks, strict=True)
    ]
