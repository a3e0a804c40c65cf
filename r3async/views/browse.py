"""The episodes of a run, to be searched while it goes on: conversations, and trajectories whose tokens and routes were kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.config import MIX
from r3async.data.container import Record, map_file
from r3async.record.catalogue import finite
from r3async.record.routes import ROUTES, Entry, RouteIndex, parse_id
from r3async.schedule.mix import Order
from r3async.views.episodes import Ages, RunTokenizer, conversation, samples_of
from r3async.views.follow import FollowedFile
from r3async.views.summary import format_number
from r3async.views.templates import TEMPLATES

MAX_LISTED = 20_000
"""Episodes that are kept in mind; of more, the newest."""
MAX_SEARCHED = 2000
"""Characters of an episode that are searched."""
PER_PAGE = 50
MAX_BESIDE = 16
"""Members of a group that are shown beside each other."""
ORDERS = {
    "newest": lambda one: (-(one.step or 0), one.trajectory),
    "best": lambda one: (-(one.reward if one.reward is not None else -np.inf), -(one.step or 0)),
    "worst": lambda one: (one.reward if one.reward is not None else np.inf, -(one.step or 0)),
}


class Episode(msgspec.Struct):
    """What a list shows of one, and where the rest is. `tokens`, `oldest` (version of the oldest sampled token): None where
    only its words were kept. `talk`: its line of `episodes.jsonl`. `entries`: its samples in the files of routes."""

    step: int | None
    trajectory: str
    group: int | None = None
    environment: str = ""
    reward: float | None = None
    turns: int = 0
    tokens: int | None = None
    oldest: int | None = None
    text: str = ""
    talk: dict[str, Any] | None = None
    entries: list[Entry] = []

    @property
    def key(self) -> str:
        """In addresses."""
        return f"{self.step}.{self.trajectory}"


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which episodes are looked for; None or empty: any. `text`: in what was said, or the beginning of an id."""

    text: str = ""
    environment: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    step_min: int | None = None
    step_max: int | None = None
    order: str = "newest"
    page: int = 0

    @classmethod
    def of(cls, words: Mapping[str, str]) -> Query:
        """Raises `ValueError` for what is no number, or an order that there is not."""
        try:
            query = msgspec.convert({name: word for name, word in words.items() if word}, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        if query.order not in ORDERS or query.page < 0:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, and page 0 or more")
        return query

    def keeps(self, episode: Episode) -> bool:
        """What is unknown is neither above nor below."""
        words = self.text.casefold().strip()
        return (
            (not self.environment or self.environment == episode.environment)
            and _within(episode.reward, self.reward_min, self.reward_max)
            and _within(episode.step, self.step_min, self.step_max)
            and (not words or words in episode.text or episode.trajectory.startswith(words))
        )


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


def environment_of(config: dict[str, Any]) -> Callable[[int | None], str]:
    """Which environment of a run poses the task of a group. `config`: of the run, as `read_run_config` returns it."""
    env = config.get("env", {})
    name, parts = str(env.get("name", "")), env.get("args", {})
    if name != MIX or not parts:
        return lambda group: name
    labels = sorted(parts)
    order = Order([float(parts[label].get("weight", 1.0)) for label in labels])
    return lambda group: name if group is None else labels[order.entry(group)]


class Episodes:
    """All episodes of which a run kept words or tokens. `look` takes in what is new."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._talks = FollowedFile(run_dir / "episodes.jsonl")
        self.skipped: list[dict[str, Any]] = []
        """Events that say which lines were passed over; whoever tells of them takes them out."""
        self._index = RouteIndex(run_dir)
        self._tokenizer: RunTokenizer | None = None
        self._found: dict[str, Episode] = {}
        self._take_traces(self._index.trained)

    def look(self, environment: Callable[[int | None], str]) -> bool:
        """Take in what was written since the last look; whether that was anything. `environment`: of the task of a group."""
        lines, skipped = self._talks.read_new()
        self.skipped += skipped
        talks = [line for line in lines if "turns" in line]
        for line in talks:
            self._take_talk(line)
        new = self._index.read_on()
        self._take_traces(new)
        for episode in self._found.values():
            episode.environment = episode.environment or environment(episode.group)
        for key in list(self._found)[: -MAX_LISTED or None]:
            del self._found[key]
        return bool(talks or new)

    def close(self) -> None:
        self._talks.close()

    def _take_talk(self, line: dict[str, Any]) -> None:
        step, reward = line.get("step"), finite(line.get("reward"))
        name = str(line.get("trajectory") or f"line-{len(self._found)}")
        episode = self._named(step, name)
        turns = line["turns"]
        said = "\n".join(str(turn.get(who) or "") for turn in turns for who in ("user", "assistant"))
        episode.talk, episode.turns = line, len(turns)
        episode.text = said[:MAX_SEARCHED].casefold()
        episode.reward = reward if episode.reward is None else episode.reward

    def _take_traces(self, entries: Iterable[Entry]) -> None:
        for (step, name), parts in groupby(entries, lambda e: (e.facts["step"], e.facts["trajectory_id"])):
            kept = list(parts)
            episode = self._named(step, name)
            if {entry.path for entry in episode.entries} != {entry.path for entry in kept}:
                episode.entries = []  # of a start of the run that a resume took back
            episode.entries = [*episode.entries, *kept]
            columns = [found for entry in episode.entries if (found := _columns(entry))]
            if columns:
                self._describe(episode, columns)

    def _describe(self, episode: Episode, columns: Sequence[dict[str, np.ndarray]]) -> None:
        versions = np.concatenate([each["policy_version"][each["loss_mask"]] for each in columns])
        turns = np.concatenate([each["turn"][each["loss_mask"]] for each in columns])
        episode.tokens = sum(len(each["token_ids"]) for each in columns)
        episode.oldest = int(versions.min()) if len(versions) else None
        episode.turns = int(turns.max()) + 1 if len(turns) else 0
        reward = finite(sum(float(each["rewards"].sum(dtype=np.float64)) for each in columns))
        episode.reward = None if reward is None else round(reward, 9)
        if not episode.talk:
            ids = np.concatenate([each["token_ids"] for each in columns])[:MAX_SEARCHED]
            episode.text = self.tokenizer.whole(ids.tolist())[:MAX_SEARCHED].casefold()

    def _named(self, step: int | None, name: str) -> Episode:
        which = parse_id(name)
        made = Episode(step, name, which.group_index if which else None)
        return self._found.setdefault(made.key, made)

    @property
    def tokenizer(self) -> RunTokenizer:
        """Made when it is needed: a run that just begins has none yet."""
        if self._tokenizer is None or not self._tokenizer.known:
            self._tokenizer = RunTokenizer(self._run_dir)
        return self._tokenizer

    # -- what is shown ---------------------------------------------------------------------------------------------

    def listed(self, query: Query, ages: Ages) -> str:
        """A page of those that were looked for, as HTML."""
        found = sorted(filter(query.keeps, self._found.values()), key=ORDERS[query.order])
        first = query.page * PER_PAGE
        return TEMPLATES.get_template("report_found.html").render(
            episodes=[(one, _age(one, ages), _kind(one.reward)) for one in found[first : first + PER_PAGE]],
            environments=sorted({one.environment for one in self._found.values()}),
            count=len(found),
            every=len(self._found),
            page=query.page,
            pages=-(-len(found) // PER_PAGE),
        )

    def opened(self, key: str, ages: Ages, *, group: bool = False) -> str | None:
        """An episode, or all of its group that were kept beside each other, as HTML; None if there is none of this name."""
        one = self._found.get(key)
        if one is None:
            return None
        members = list(self._group(one))
        shown = members[:MAX_BESIDE] if group else [one]
        return TEMPLATES.get_template("report_opened.html").render(
            episodes=[(each, _age(each, ages), _kind(each.reward), self._told(each, ages)) for each in shown],
            members=[(each, _kind(each.reward)) for each in members],
            opened=one,
            beside=group,
        )

    def _group(self, one: Episode) -> Iterator[Episode]:
        if one.group is None:
            yield one
            return
        found = [each for each in self._found.values() if (each.step, each.group) == (one.step, one.group)]
        yield from sorted(found, key=lambda each: each.trajectory)

    def _told(self, episode: Episode, ages: Ages) -> dict[str, Any]:
        samples = samples_of(self._index, episode.entries, self.tokenizer, ages) if episode.entries else []
        return {"talk": conversation(episode.talk) if episode.talk else None, "samples": samples}


def _age(episode: Episode, ages: Ages) -> int | None:
    version = ages.trained.get(episode.step)
    return None if version is None or episode.oldest is None else version - episode.oldest


def _kind(reward: float | None) -> tuple[str, str]:
    """A reward in words, and how good it looks."""
    kind = "" if reward is None else "good" if reward >= 0.8 else "warn" if reward >= 0.4 else "bad"
    return format_number(reward), kind


COLUMNS = ("token_ids", "loss_mask", "policy_version", "turn", "rewards")


def _columns(entry: Entry) -> dict[str, np.ndarray]:
    """The short columns of a record, without its routes, which are most of it; {} if it is damaged. Its checksum is of all of it:
    it is verified when the episode is opened."""
    record = next(ROUTES.records(map_file(entry.path), entry.offset), None)
    if not isinstance(record, Record):
        return {}
    places = {name: (dtype, at) for at, (name, dtype, _) in enumerate(entry.arrays, start=1) if name in COLUMNS}
    try:
        found = {name: np.frombuffer(record.frames[at], np.dtype(dtype)) for name, (dtype, at) in places.items()}
    except (IndexError, TypeError, ValueError):
        return {}
    sound = set(found) == set(COLUMNS) and len({len(column) for column in found.values()}) == 1
    return found if sound and found["loss_mask"].dtype == np.bool_ else {}
