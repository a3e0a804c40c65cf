"""Episodes in a report: a few conversations, and a few token by token, coloured by what the learner knew of each token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from r3async.observe.charts import finite
from r3async.observe.jsonl import read_objects
from r3async.observe.routes import Entry, RouteFileError, RouteIndex, TrainedRoutes, load
from r3async.observe.summary import format_number
from r3async.observe.tokens import RunTokenizer, roles
from r3async.observe.verify import engine_rows, same_experts

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


def conversations(path: Path, most: int = MAX_EPISODES) -> tuple[list[str], int]:
    """A few episodes as cards, from the first to the last step; and how many there are."""
    found = [e for e in read_objects(path) if isinstance(e.get("turns"), list)]
    return [_episode(found[index]) for index in spread(len(found), most)], len(found)


def _episode(episode: dict[str, Any]) -> str:
    turns = [t for t in episode["turns"] if isinstance(t, dict)]
    said = []
    for turn in turns[:MAX_TURNS]:
        said.append(_say(turn.get("user"), "say"))
        said.append(_say(turn.get("assistant"), "say policy"))
        if (earned := finite(turn.get("reward"))) is not None:
            said.append(f"<div class='earned'>reward {format_number(earned)}</div>")
    if len(turns) > MAX_TURNS:
        said.append(f"<div class='earned'>and {len(turns) - MAX_TURNS} more turns</div>")
    reward = finite(episode.get("reward"))
    kind = "" if reward is None else "good" if reward >= 0.8 else "warn" if reward >= 0.4 else "bad"
    chip = f"<span class='chip {kind}'>reward {format_number(reward)}</span>"
    top = f"<div class='top'><span>step {escape(str(episode.get('step', '?')))}</span>{chip}</div>"
    return f"<article class='card episode'>{top}{''.join(said)}</article>"


def _say(text: Any, kind: str) -> str:
    text = "" if text is None else str(text)
    if not text:
        return f"<div class='{kind} empty'>nothing</div>"
    return f"<div class='{kind}'>{escape(text[:MAX_TEXT])}{' …' if len(text) > MAX_TEXT else ''}</div>"


def conversations_section(path: Path) -> str:
    cards, count = conversations(path)
    if not cards:
        return ""
    heading = f"<h2>Episodes<small>{len(cards)} of {count}, first to last</small></h2>"
    return f"{heading}\n<div class='episodes'>{''.join(cards)}</div>"


# -- tokens ------------------------------------------------------------------------------------------------------------


def tokens_section(run_dir: Path) -> str:
    """Samples whose routes were kept, token by token; a control chooses what the colours mean."""
    index = RouteIndex(run_dir)
    tokenizer = RunTokenizer(run_dir)
    samples = []
    for at in spread(len(index.trained), MAX_SAMPLES):
        try:
            samples.append(_Sample(index, index.trained[at], tokenizer))
        except RouteFileError:
            continue
    if not samples:
        return ""
    modes = [mode for mode in MODES if mode[0] != "ratio" or any(s.ratio is not None for s in samples)]
    controls = "".join(
        f"<label><input type='radio' name='tokens' value='{key}'{' checked' if key == 'loss' else ''}>{label}</label>"
        for key, label, _ in modes
    )
    notes = "".join(f"<p class='mode {key}'>{note}</p>" for key, _, note in modes)
    heading = f"<h2>Tokens<small>{len(samples)} of {len(index.trained)} samples whose routes were kept</small></h2>"
    cards = "".join(sample.card() for sample in samples)
    return f"{heading}\n<div class='tokens'><div class='modes'>{controls}</div>{notes}<div class='samples'>{cards}</div></div>"


class _Sample:
    """One trained sample. `agreement` float `[T]`: the share of MoE layers that agree, NaN where nothing is recorded."""

    def __init__(self, index: RouteIndex, entry: Entry, tokenizer: RunTokenizer):
        self.trained = trained = load(entry, TrainedRoutes)
        found = engine_rows(trained, index.calls_of(trained.trajectory_id))
        self.agreement = np.full(len(trained.token_ids), np.nan)
        if found is not None:
            rows, recorded = found
            self.agreement[recorded] = same_experts(rows, trained.own).mean(axis=-1)[recorded]
        self.ratio = None if trained.learner_logprobs is None else trained.learner_logprobs - trained.rollout_logprobs
        self.roles = roles(trained.token_ids, trained.loss_mask, tokenizer.end_id)
        self.texts = [tokenizer.text(int(token)) for token in trained.token_ids[:MAX_TOKENS]]

    def card(self) -> str:
        trained = self.trained
        versions = sorted({int(v) for v in trained.policy_version if v >= 0})
        of = f"version {versions[0]}" if len(versions) == 1 else f"versions {', '.join(map(str, versions))}"
        facts = f"{len(trained.token_ids)} tokens, {int(trained.loss_mask.sum())} trained, {of}"
        top = (
            f"<div class='top'><span>step {trained.step} · {escape(trained.sample_id)}</span><span>{facts}</span></div>"
        )
        return f"<article class='card sample'>{top}{''.join(self._blocks())}</article>"

    def _blocks(self) -> Iterator[str]:
        turn, at = 0, 0
        while at < len(self.texts):
            role, end = self.roles[at], at
            while end < len(self.texts) and self.roles[end] == role:
                end += 1
            turn += role == "sampled"
            label = f"turn {turn}" if role == "sampled" else role
            cells = "".join(self._token(i) for i in range(at, end))
            yield f"<div class='block {role}'><b>{label}</b><div>{cells}</div></div>"
            at = end
        if len(self.trained.token_ids) > MAX_TOKENS:
            yield f"<div class='earned'>and {len(self.trained.token_ids) - MAX_TOKENS} more tokens</div>"

    def _token(self, at: int) -> str:
        """Colours are worked out here, as numbers from 0 to 1; what they look like is the style sheet's."""
        trained, sampled = self.trained, bool(self.trained.loss_mask[at])
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
        styled = f" style='{';'.join(style)}'" if style else ""
        # A newline shows where it is, and breaks the line.
        text = escape(self.texts[at]).replace("\n", "↵\n") or "·"
        return f"<i class='{' '.join(kinds)}'{styled} title='{escape(', '.join(title), quote=True)}'>{text}</i>"


def _unit(value: float) -> str:
    return "0" if not math.isfinite(value) else f"{min(1.0, max(0.0, value)):.2g}"


def beside(run_dirs: Sequence[Path], names: Sequence[str], most: int = 2) -> str:
    """The first and last kept conversations of several runs, a column each."""
    columns = [conversations(run_dir / "episodes.jsonl", most)[0] for run_dir in run_dirs]
    if not any(columns):
        return ""
    cells = "".join(
        f"<div><h3>{escape(name)}</h3>{''.join(cards) or '<p>none</p>'}</div>"
        for name, cards in zip(names, columns, strict=True)
    )
    return f"<h2>Episodes<small>first and last of each run</small></h2>\n<div class='beside'>{cells}</div>"
