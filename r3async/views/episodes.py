"""Episodes as views show them: conversations, and samples token by token, with text, role and
routes of each token."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.data.metrics import finite_or_none
from r3async.record.reading import read_json_objects, read_run_config
from r3async.record.route_verification import find_engine_routes, same_experts
from r3async.record.routes import (
    RouteEntry,
    RouteFileError,
    RouteIndex,
    TrainedRoutes,
    load_route_record,
)
from r3async.untrusted import MalformedError, decode_python_json
from r3async.views.number_formats import format_number
from r3async.world.files import read_file

MAX_EPISODES = 6
MAX_TURNS = 8
MAX_TEXT = 1200
MAX_SAMPLES = 4
MAX_TOKENS = 1500
VERSION_COLORS = 6
"""Number of colors for versions, used in turn."""

TOKEN_COLORINGS = (
    ("loss", "loss mask", "coloured: sampled by the policy and trained"),
    (
        "surprise",
        "log-prob",
        "the rollout policy's; the stronger, the less likely was the token (full: 4 nats)",
    ),
    (
        "ratio",
        "log-ratio",
        "learner less rollout, nats; orange: less likely for the learner, blue: more (full: 0.2)",
    ),
    (
        "advantage",
        "advantage",
        "what the policy loss took; blue: more of it, orange: less (full: 2)",
    ),
    (
        "age",
        "age",
        "versions between sampling and training; the stronger, the older (full: the bound)",
    ),
    ("version", "version", "of the weights that sampled the token"),
    (
        "agreement",
        "routes",
        (
            "red: MoE layers in which the learner would choose other experts; dotted: "
            "no route recorded"
        ),
    ),
)


def select_evenly(count: int, limit: int) -> list[int]:
    """Return at most `limit` of `count` indices, evenly spaced from the first to the last."""
    shown = min(limit, count)
    return [round(i * (count - 1) / max(1, shown - 1)) for i in range(shown)]


# -- conversations ---------------------------------------------------------------------------------


def read_conversations(path: Path, limit: int = MAX_EPISODES) -> tuple[list[dict[str, Any]], int]:
    """Read at most `limit` conversations, from the first to the last step. Also returns
    how many there are."""
    found = [e for e in read_json_objects(path) if "turns" in e]
    return [describe_conversation(found[index]) for index in select_evenly(len(found), limit)], len(
        found
    )


def describe_conversation(episode: dict[str, Any]) -> dict[str, Any]:
    """Convert a line of `episodes.jsonl` to the form that a page shows."""
    turns = episode["turns"]
    reward = finite_or_none(episode.get("reward"))
    return {
        "step": episode.get("step", "?"),
        "reward": format_number(reward),
        "kind": ""
        if reward is None
        else "good"
        if reward >= 0.8
        else "warn"
        if reward >= 0.4
        else "bad",
        "turns": [
            {
                "user": _shorten_text(turn.get("user")),
                "assistant": _shorten_text(turn.get("assistant")),
                "reward": ""
                if (earned := finite_or_none(turn.get("reward"))) is None
                else format_number(earned),
            }
            for turn in turns[:MAX_TURNS]
        ],
        "more": max(0, len(turns) - MAX_TURNS),
    }


def _shorten_text(text: Any) -> str:
    text = "" if text is None else str(text)
    return f"{text[:MAX_TEXT]} …" if len(text) > MAX_TEXT else text


# -- tokens ----------------------------------------------------------------------------------------


class RunTokenizer:
    """The decoder of a run's tokens to text, with the end-of-sequence token of the model.

    It shows the ids of tokens that it cannot decode, and all ids without a tokenizer.

    Attributes:
        problems: What of its files cannot be read; a run that has none, such as one that just
            started, has no problem.
    """

    def __init__(self, run_dir: Path):
        self.end_id: int | None = None
        self.problems: list[str] = []
        self._reader: Any = None
        path = read_run_config(run_dir).get("model", {}).get("path")
        for directory in [run_dir / "init", *([Path(path)] if path else []), run_dir / "model"]:
            self._load_tokenizer(directory)
            if self.is_loaded:
                return

    @property
    def is_loaded(self) -> bool:
        """True if there is a tokenizer."""
        return self._reader is not None

    def _load_tokenizer(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Reader

        try:
            data = read_file(directory / "tokenizer.json")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self.problems.append(
                f"{directory / 'tokenizer.json'}: {getattr(error, 'strerror', None) or error}"
            )
            return
        try:
            self._reader = Reader.from_buffer(data)
        except Exception as error:  # tokenizers has no class of errors
            self.problems.append(f"{directory / 'tokenizer.json'} is no tokenizer: {error}")
            return
        try:
            self.end_id = self._find_end_id(directory / "tokenizer_config.json")
        except (OSError, MalformedError, msgspec.ValidationError) as error:
            self.problems.append(f"{directory / 'tokenizer_config.json'} cannot be read: {error}")

    def _find_end_id(self, path: Path) -> int | None:
        try:
            data = read_file(path)
        except FileNotFoundError:
            return None
        end = msgspec.convert(decode_python_json(data), _TokenizerSettings).eos_token
        text = end.content if isinstance(end, _AddedToken) else end
        return self._reader.token_to_id(text) if text else None

    def decode_token(self, token: int) -> str:
        return self.decode_tokens([token])

    def decode_tokens(self, tokens: list[int]) -> str:
        """Return the text of a sequence of tokens."""
        if self._reader is not None:
            with contextlib.suppress(OverflowError):  # an id that is negative, or beyond 32 bits
                return self._reader.decode(tokens, skip_special_tokens=False)
        return " ".join(f"#{token}" for token in tokens)


class _AddedToken(msgspec.Struct):
    content: str


class _TokenizerSettings(msgspec.Struct):
    eos_token: str | _AddedToken | None = None


def label_token_roles(tokens: np.ndarray, loss_mask: np.ndarray, end_id: int | None) -> list[str]:
    """Return the role of each token: `prompt`, `sampled`, `observation` or `injected`.

    An unsampled end-of-sequence token was injected if the token before it was sampled and is not
    itself an end of sequence.
    """
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
    """A trained sample whose routes were kept, with the engine's routes beside the learner's.
    Raises `RouteFileError`.

    Attributes:
        has_engine_record: True if the engine's record of the sample was found. If not, the replayed
            routes are unknown, and no row counts as recorded.
        engine_experts: The engine's experts, `[T, L, K]`, valid where `recorded`.
        recorded: Tokens with recorded engine routes, bool `[T]`.
        agrees: True where the learner would choose the engine's experts, bool `[T, L]`; meaningless
            where not `recorded`.
    """

    def __init__(self, index: RouteIndex, entry: RouteEntry):
        self.trained_routes = trained = load_route_record(entry, TrainedRoutes)
        found = find_engine_routes(trained, index.load_calls(trained.trajectory_id))
        self.has_engine_record = found is not None
        self.engine_experts, self.recorded = found or (
            np.zeros_like(trained.used),
            np.zeros(len(trained.token_ids), bool),
        )
        self.agrees = same_experts(self.engine_experts, trained.own)


# -- samples of a report ---------------------------------------------------------------------------


class StepVersions(msgspec.Struct, frozen=True):
    """The weight versions from which the ages of tokens count.

    Attributes:
        by_step: Version of the weights that each step changed.
        bound: Maximum age of a trained token, None if unknown.
    """

    by_step: dict[Any, int] = {}
    bound: int | None = None

    @classmethod
    def from_rows(cls, rows: Iterable[dict[str, Any]], bound: int | None) -> StepVersions:
        """Take the versions from rows of steps; a row has the version that its step produced."""
        made = ((row.get("step"), row.get("version")) for row in rows)
        return cls({step: version - 1 for step, version in made if isinstance(version, int)}, bound)


def read_traced_samples(
    run_dir: Path, versions: StepVersions
) -> tuple[list[SampleView], int, list[str]]:
    """Read a few samples whose routes were kept, from the first to the last. Also returns how many
    there are, and what could not be read."""
    index = RouteIndex(run_dir)
    shown = [
        index.trained_entries[at] for at in select_evenly(len(index.trained_entries), MAX_SAMPLES)
    ]
    samples, problems = (
        load_samples(index, shown, RunTokenizer(run_dir), versions) if shown else ([], [])
    )
    return samples, len(index.trained_entries), [*index.problems, *problems]


def load_samples(
    index: RouteIndex,
    entries: Iterable[RouteEntry],
    tokenizer: RunTokenizer,
    versions: StepVersions,
) -> tuple[list[SampleView], list[str]]:
    """Load the samples of those entries that can be read. Also returns what could not be read."""
    samples = list[SampleView]()
    problems = [*tokenizer.problems]
    for entry in entries:
        try:
            samples.append(SampleView(index, entry, tokenizer, versions))
        except RouteFileError as error:
            problems.append(str(error))
    return samples, problems


def select_colorings(samples: Sequence[SampleView]) -> list[tuple[str, str, str]]:
    """Return the token colorings that any of the samples has values for."""
    have = {
        "ratio": any(sample.log_ratio is not None for sample in samples),
        "advantage": any(sample.trained_routes.advantages is not None for sample in samples),
        "age": any(sample.trained_version is not None for sample in samples),
    }
    return [mode for mode in TOKEN_COLORINGS if have.get(mode[0], True)]


class SampleView(TracedSample):
    """A traced sample as a page shows it.

    Attributes:
        agreement: Share of MoE layers that agree, float `[T]`; NaN where nothing is recorded.
        log_ratio: Log-ratio of learner to rollout policy, float32 `[T]`; None if the learner's
            log-probs were not kept.
        trained_version: Version of the weights that the sample trained, None if unknown.
    """

    def __init__(
        self, index: RouteIndex, entry: RouteEntry, tokenizer: RunTokenizer, versions: StepVersions
    ):
        super().__init__(index, entry)
        trained = self.trained_routes
        self.agreement = np.where(self.recorded, self.agrees.mean(axis=-1), np.nan)
        self.log_ratio = (
            None
            if trained.learner_logprobs is None
            else trained.learner_logprobs - trained.rollout_logprobs
        )
        self._roles = label_token_roles(trained.token_ids, trained.loss_mask, tokenizer.end_id)
        self._texts = [
            tokenizer.decode_token(int(token)) for token in trained.token_ids[:MAX_TOKENS]
        ]
        self.step = trained.step
        self.sample_id = trained.sample_id
        self.trained_version = versions.by_step.get(trained.step)
        self._bound = versions.bound
        self.hidden_tokens = max(0, len(trained.token_ids) - MAX_TOKENS)
        """Number of tokens that are not shown."""

    @property
    def summary(self) -> str:
        trained = self.trained_routes
        versions = sorted({int(v) for v in trained.policy_version if v >= 0})
        of = (
            f"version {versions[0]}"
            if len(versions) == 1
            else f"versions {', '.join(map(str, versions))}"
        )
        return f"{len(trained.token_ids)} tokens, {int(trained.loss_mask.sum())} trained, {of}"

    @property
    def role_blocks(self) -> Iterator[tuple[str, str, list[dict[str, str]]]]:
        """The stretches of tokens of one role: the role, its label, and the tokens of each."""
        turn = 0
        for role, places in groupby(range(len(self._texts)), key=lambda at: self._roles[at]):
            turn += role == "sampled"
            yield (
                role,
                f"turn {turn}" if role == "sampled" else role,
                [self._describe_token(at) for at in places],
            )

    def _describe_token(self, position: int) -> dict[str, str]:
        """Describe a token for the page. Color strengths are numbers from 0 to 1; the style
        sheet has the colors."""
        trained = self.trained_routes
        sampled = bool(self.trained_routes.loss_mask[position])
        kinds = ["t"] * sampled
        style = []
        title = [f"{position}: token {int(trained.token_ids[position])}"]
        if sampled:
            for kind, css, words in self._describe_sampled(position):
                if kind:
                    kinds += [kind]
                if css:
                    style += [css]
                title.append(words)
        agreement = float(self.agreement[position])
        if math.isnan(agreement):
            kinds.append("u")
            title.append("no route recorded")
        else:
            title.append(f"{100 * agreement:.0f} % routing agreement")
            if agreement < 1:
                style.append(f"--a:{_format_unit_interval(1 - agreement)}")
        # A newline is shown as a sign, and breaks the line.
        text = self._texts[position].replace("\n", "↵\n") or "·"
        return {
            "kinds": " ".join(kinds),
            "style": ";".join(style),
            "title": ", ".join(title),
            "text": text,
        }

    def _describe_sampled(self, position: int) -> Iterator[tuple[str, str, str]]:
        """Yield class, style and text for each known property of a token that
        the policy sampled."""
        trained = self.trained_routes
        version = int(self.trained_routes.policy_version[position])
        logprob = float(trained.rollout_logprobs[position])
        yield (
            f"v{max(0, version) % VERSION_COLORS}",
            f"--p:{_format_unit_interval(-logprob / 4)}",
            f"log-prob {logprob:.3f}, version {version}",
        )
        if self.trained_version is not None:
            age = self.trained_version - version
            yield "", f"--o:{_format_unit_interval(age / (self._bound or 1))}", f"age {age}"
        if self.log_ratio is not None:
            ratio = float(self.log_ratio[position])
            if math.isfinite(ratio):
                yield (
                    "down" if ratio < 0 else "",
                    f"--r:{_format_unit_interval(abs(ratio) / 0.2)}",
                    f"log-ratio {ratio:+.4f}",
                )
        if trained.advantages is not None:
            gain = float(trained.advantages[position])
            yield (
                "minus" if gain < 0 else "",
                f"--g:{_format_unit_interval(abs(gain) / 2)}",
                f"advantage {gain:+.3f}",
            )


def _format_unit_interval(value: float) -> str:
    return "0" if not math.isfinite(value) else f"{min(1.0, max(0.0, value)):.2g}"
