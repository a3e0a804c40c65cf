"""Episodes as views show them: conversations, and samples token by token, with the text, role and routes of each token."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.record.catalogue import finite
from r3async.record.reading import read_objects, read_run_config
from r3async.record.routes import Entry, RouteFileError, RouteIndex, TrainedRoutes, load
from r3async.record.verify import engine_rows, same_experts
from r3async.untrusted import decode_python_json
from r3async.views.summary import format_number

MAX_EPISODES, MAX_TURNS, MAX_TEXT = 6, 8, 1200
MAX_SAMPLES, MAX_TOKENS = 4, 1500
PALETTE = 6
"""Colours for versions, in turn."""

MODES = (
    ("loss", "loss mask", "coloured: sampled by the policy and trained"),
    ("surprise", "log-prob", "the rollout policy's; the stronger, the less likely was the token (full: 4 nats)"),
    ("ratio", "log-ratio", "learner less rollout, nats; orange: less likely for the learner, blue: more (full: 0.2)"),
    ("advantage", "advantage", "what the policy loss took; blue: more of it, orange: less (full: 2)"),
    ("age", "age", "versions between sampling and training; the stronger, the older (full: the bound)"),
    ("version", "version", "of the weights that sampled the token"),
    (
        "agreement",
        "routes",
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
    found = [e for e in read_objects(path) if "turns" in e]
    return [conversation(found[index]) for index in spread(len(found), most)], len(found)


def conversation(episode: dict[str, Any]) -> dict[str, Any]:
    """A line of `episodes.jsonl` as a page shows it."""
    turns = episode["turns"]
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


class RunTokenizer:
    """The text of single tokens, and the end-of-sequence token, of a run's model; ids alone if there is no tokenizer."""

    def __init__(self, run_dir: Path):
        self._decode: Callable[[list[int]], str] = lambda tokens: " ".join(f"#{token}" for token in tokens)
        self.end_id: int | None = None
        self.known = False
        path = read_run_config(run_dir).get("model", {}).get("path")
        for directory in [run_dir / "init", *([Path(path)] if path else []), run_dir / "model"]:
            if (directory / "tokenizer.json").is_file():
                self._read(directory)
                return

    def _read(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Reader

        reader = Reader.from_file(str(directory / "tokenizer.json"))
        self._decode = lambda tokens: reader.decode(tokens, skip_special_tokens=False)
        self.known = True
        described = directory / "tokenizer_config.json"
        end = decode_python_json(described.read_bytes()).get("eos_token") if described.is_file() else None
        end = end.get("content") if isinstance(end, dict) else end
        self.end_id = reader.token_to_id(end) if end else None

    def text(self, token: int) -> str:
        return self._decode([token])

    def whole(self, tokens: list[int]) -> str:
        """The text of all of them."""
        return self._decode(tokens)


def roles(tokens: np.ndarray, loss_mask: np.ndarray, end_id: int | None) -> list[str]:
    """Of each token: prompt, sampled, observation, or injected. An end of sequence that follows a sampled token which is
    none itself was injected."""
    sampled_at = np.flatnonzero(loss_mask)
    first = int(sampled_at[0]) if len(sampled_at) else len(tokens)
    found = []
    for at, token in enumerate(tokens):
        if loss_mask[at]:
            found.append("sampled")
        elif at < first:
            found.append("prompt")
        elif token == end_id and loss_mask[at - 1] and tokens[at - 1] != end_id:
            found.append("injected")
        else:
            found.append("observation")
    return found


class TracedSample:
    """A trained sample whose routes were kept, with the engine's rows beside the learner's.

    `owned`: the engine's record of it was found; if not, what was replayed is unknown, and no row counts as recorded. `rows`
    `[T, L, K]`: the engine's experts, where `recorded` bool `[T]`. `agree` bool `[T, L]`: the learner would choose them; means
    nothing where nothing is recorded. Raises `RouteFileError`.
    """

    def __init__(self, index: RouteIndex, entry: Entry):
        self.trained = trained = load(entry, TrainedRoutes)
        found = engine_rows(trained, index.calls_of(trained.trajectory_id))
        self.owned = found is not None
        self.rows, self.recorded = found or (np.zeros_like(trained.used), np.zeros(len(trained.token_ids), bool))
        self.agree = same_experts(self.rows, trained.own)


# -- samples of a report -----------------------------------------------------------------------------------------------


class Ages(msgspec.Struct, frozen=True):
    """From which tokens' ages count. `trained`: by step, the version of the weights that it changed."""

    trained: dict[Any, int] = {}
    bound: int | None = None

    @classmethod
    def of(cls, rows: Iterable[dict[str, Any]], bound: int | None) -> Ages:
        """A step's row has the version that the step made."""
        made = ((row.get("step"), row.get("version")) for row in rows)
        return cls({step: version - 1 for step, version in made if isinstance(version, int)}, bound)


def read_samples(run_dir: Path, ages: Ages) -> tuple[list[Sample], int]:
    """A few samples whose routes were kept, from the first to the last; and how many there are."""
    index = RouteIndex(run_dir)
    shown = [index.trained[at] for at in spread(len(index.trained), MAX_SAMPLES)]
    return samples_of(index, shown, RunTokenizer(run_dir), ages), len(index.trained)


def samples_of(index: RouteIndex, entries: Iterable[Entry], tokenizer: RunTokenizer, ages: Ages) -> list[Sample]:
    """Those that can be read."""
    samples = []
    for entry in entries:
        with contextlib.suppress(RouteFileError):
            samples.append(Sample(index, entry, tokenizer, ages))
    return samples


def modes_of(samples: Sequence[Sample]) -> list[tuple[str, str, str]]:
    """The colours that any of them has values for."""
    have = {
        "ratio": any(sample.ratio is not None for sample in samples),
        "advantage": any(sample.trained.advantages is not None for sample in samples),
        "age": any(sample.version is not None for sample in samples),
    }
    return [mode for mode in MODES if have.get(mode[0], True)]


class Sample(TracedSample):
    """The same for a page. `agreement` float `[T]`: the share of MoE layers that agree, NaN where nothing is recorded; `ratio`
    float32 `[T]`: the log-ratio of learner and rollout, None if the learner's log-probs were not kept. `version`: of the
    weights that it trained, None if unknown."""

    def __init__(self, index: RouteIndex, entry: Entry, tokenizer: RunTokenizer, ages: Ages):
        super().__init__(index, entry)
        trained = self.trained
        self.agreement = np.where(self.recorded, self.agree.mean(axis=-1), np.nan)
        self.ratio = None if trained.learner_logprobs is None else trained.learner_logprobs - trained.rollout_logprobs
        self._roles = roles(trained.token_ids, trained.loss_mask, tokenizer.end_id)
        self._texts = [tokenizer.text(int(token)) for token in trained.token_ids[:MAX_TOKENS]]
        self.step, self.name = trained.step, trained.sample_id
        self.version, self._bound = ages.trained.get(trained.step), ages.bound
        self.hidden = max(0, len(trained.token_ids) - MAX_TOKENS)
        """Tokens that are not shown."""

    @property
    def facts(self) -> str:
        trained = self.trained
        versions = sorted({int(v) for v in trained.policy_version if v >= 0})
        of = f"version {versions[0]}" if len(versions) == 1 else f"versions {', '.join(map(str, versions))}"
        return f"{len(trained.token_ids)} tokens, {int(trained.loss_mask.sum())} trained, {of}"

    @property
    def blocks(self) -> Iterator[tuple[str, str, list[dict[str, str]]]]:
        """Role, its name, and the tokens of each stretch."""
        turn = 0
        for role, places in groupby(range(len(self._texts)), key=lambda at: self._roles[at]):
            turn += role == "sampled"
            yield role, f"turn {turn}" if role == "sampled" else role, [self._token(at) for at in places]

    def _token(self, at: int) -> dict[str, str]:
        """Colours are worked out here, as numbers from 0 to 1; what they look like is the style sheet's."""
        trained, sampled = self.trained, bool(self.trained.loss_mask[at])
        kinds, style = ["t"] * sampled, []
        title = [f"{at}: token {int(trained.token_ids[at])}"]
        if sampled:
            for kind, css, words in self._sampled(at):
                kinds += [kind] * bool(kind)
                style += [css] * bool(css)
                title.append(words)
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

    def _sampled(self, at: int) -> Iterator[tuple[str, str, str]]:
        """Of a token that the policy sampled: class, style and words for each thing that is known."""
        trained, version = self.trained, int(self.trained.policy_version[at])
        logprob = float(trained.rollout_logprobs[at])
        yield (
            f"v{max(0, version) % PALETTE}",
            f"--p:{_unit(-logprob / 4)}",
            f"log-prob {logprob:.3f}, version {version}",
        )
        if self.version is not None:
            age = self.version - version
            yield "", f"--o:{_unit(age / (self._bound or 1))}", f"age {age}"
        if self.ratio is not None and math.isfinite(ratio := float(self.ratio[at])):
            yield "down" * (ratio < 0), f"--r:{_unit(abs(ratio) / 0.2)}", f"log-ratio {ratio:+.4f}"
        if trained.advantages is not None:
            gain = float(trained.advantages[at])
            yield "minus" * (gain < 0), f"--g:{_unit(abs(gain) / 2)}", f"advantage {gain:+.3f}"


def _unit(value: float) -> str:
    return "0" if not math.isfinite(value) else f"{min(1.0, max(0.0, value)):.2g}"
