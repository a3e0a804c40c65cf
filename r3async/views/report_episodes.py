"""Episodes in a report: a few conversations, and a few token by token, coloured by what the learner knew of each token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from r3async.record.catalogue import finite
from r3async.record.reading import read_objects
from r3async.record.routes import Entry, RouteFileError, RouteIndex, TrainedRoutes, load
from r3async.record.verify import engine_rows, same_experts
from r3async.views.summary import format_number
from r3async.views.tokens import RunTokenizer, roles

MAX_EPISODES, MAX_TURNS, MAX_TEXT = 6, 8, 1200
MAX_SAMPLES, MAX_TOKENS = 4, 1500
PALETTE = 6
"""Colours for versions, in turn."""

MODES = (
    ("loss", "loss mask", "coloured: sampled by the policy and trained"),
    ("surprise", "log-prob", "the rollout policy's; the stronger, the less likely was the token (full: 4 nats)"),
    ("ratio", "log-ratio", "learner less rollout, nats; orange: less likely for the learner, blue: more (full: 0.2)"),
    ("version", "version", "of the weights that sampled the token"),
    (
        "agreement",
        "agreement",
        "red: MoE layers in which the learner would choose other experts; dotted: no route recorded",
    ),
)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, from the first to the last."""
    shown = min(most, count)
    return [round(i * (count - 1) / max(1, shown - 1)) for i in range(shown)]


# -- conversations -----------------------------------------------------------------------------------------------------


def read_conversations(path: Path, most: int = MAX_EPISODES) -> tuple[list[dict[str, Any]], int]:
    """A few episodes in words, from the first to the last step; and how many there are."""
    found = [e for e in read_objects(path) if isinstance(e.get("turns"), list)]
    return [_episode(found[index]) for index in spread(len(found), most)], len(found)


def _episode(episode: dict[str, Any]) -> dict[str, Any]:
    turns = [t for t in episode["turns"] if isinstance(t, dict)]
    reward = finite(episode.get("reward"))
    return {
        "step": episode.get("step", "?"),
        "reward": format_number(reward),
        "kind": "" if reward is None else "good" if reward >= 0.8 else "warn" if reward >= 0.4 else "bad",
        "turns": [
            {
                "user": _cut(turn.get("user")),
                "assistant": _cut(turn.get("assistant")),
                "reward": "" if (earned := finite(turn.get("reward"))) is None else format_number(earned),
            }
            for turn in turns[:MAX_TURNS]
        ],
        "more": max(0, len(turns) - MAX_TURNS),
    }


def _cut(text: Any) -> str:
    text = "" if text is None else str(text)
    return f"{text[:MAX_TEXT]} …" if len(text) > MAX_TEXT else text


# -- tokens ------------------------------------------------------------------------------------------------------------


def read_samples(run_dir: Path) -> tuple[list[Sample], int]:
    """A few samples whose routes were kept, from the first to the last; and how many there are."""
    index = RouteIndex(run_dir)
    tokenizer = RunTokenizer(run_dir)
    samples = []
    for at in spread(len(index.trained), MAX_SAMPLES):
        try:
            samples.append(Sample(index, index.trained[at], tokenizer))
        except RouteFileError:
            continue
    return samples, len(index.trained)


class Sample:
    """One trained sample, token by token. `agreement` float `[T]`: the share of MoE layers that agree, NaN where nothing is
    recorded; `ratio` float32 `[T]`: the log-ratio of learner and rollout, None if the learner's log-probs were not kept."""

    def __init__(self, index: RouteIndex, entry: Entry, tokenizer: RunTokenizer):
        self._trained = trained = load(entry, TrainedRoutes)
        found = engine_rows(trained, index.calls_of(trained.trajectory_id))
        self.agreement = np.full(len(trained.token_ids), np.nan)
        if found is not None:
            rows, recorded = found
            self.agreement[recorded] = same_experts(rows, trained.own).mean(axis=-1)[recorded]
        self.ratio = None if trained.learner_logprobs is None else trained.learner_logprobs - trained.rollout_logprobs
        self._roles = roles(trained.token_ids, trained.loss_mask, tokenizer.end_id)
        self._texts = [tokenizer.text(int(token)) for token in trained.token_ids[:MAX_TOKENS]]
        self.step, self.name = trained.step, trained.sample_id
        self.hidden = max(0, len(trained.token_ids) - MAX_TOKENS)
        """Tokens that are not shown."""

    @property
    def facts(self) -> str:
        trained = self._trained
        versions = sorted({int(v) for v in trained.policy_version if v >= 0})
        of = f"version {versions[0]}" if len(versions) == 1 else f"versions {', '.join(map(str, versions))}"
        return f"{len(trained.token_ids)} tokens, {int(trained.loss_mask.sum())} trained, {of}"

    @property
    def blocks(self) -> Iterator[tuple[str, str, list[dict[str, str]]]]:
        """Role, its name, and the tokens of each stretch."""
        turn, at = 0, 0
        while at < len(self._texts):
            role, end = self._roles[at], at
            while end < len(self._texts) and self._roles[end] == role:
                end += 1
            turn += role == "sampled"
            yield role, f"turn {turn}" if role == "sampled" else role, [self._token(i) for i in range(at, end)]
            at = end

    def _token(self, at: int) -> dict[str, str]:
        """Colours are worked out here, as numbers from 0 to 1; what they look like is the style sheet's."""
        trained, sampled = self._trained, bool(self._trained.loss_mask[at])
        kinds, style = ["t"] * sampled, []
        title = [f"{at}: token {int(trained.token_ids[at])}"]
        if sampled:
            logprob = float(trained.rollout_logprobs[at])
            style.append(f"--p:{_unit(-logprob / 4)}")
            kinds.append(f"v{max(0, int(trained.policy_version[at])) % PALETTE}")
            title.append(f"log-prob {logprob:.3f}, version {int(trained.policy_version[at])}")
            if self.ratio is not None and math.isfinite(ratio := float(self.ratio[at])):
                style.append(f"--r:{_unit(abs(ratio) / 0.2)}")
                kinds += ["down"] * (ratio < 0)
                title.append(f"log-ratio {ratio:+.4f}")
        agreement = float(self.agreement[at])
        if math.isnan(agreement):
            kinds.append("u")
            title.append("no route recorded")
        else:
            title.append(f"{100 * agreement:.0f} % of layers agree")
            if agreement < 1:
                style.append(f"--a:{_unit(1 - agreement)}")
        # A newline shows where it is, and breaks the line.
        text = self._texts[at].replace("\n", "↵\n") or "·"
        return {"kinds": " ".join(kinds), "style": ";".join(style), "title": ", ".join(title), "text": text}


def _unit(value: float) -> str:
    return "0" if not math.isfinite(value) else f"{min(1.0, max(0.0, value)):.2g}"
