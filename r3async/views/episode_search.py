"""Search over the episodes of a running run: conversations, and kept tokens and routes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.config import ConfigError, EnvConfig
from r3async.config.load import parse_mix_entries
from r3async.data.container import FramedRecord, map_file
from r3async.data.metrics import finite_or_none
from r3async.record.routes import ROUTES_CONTAINER, RouteEntry, RouteIndex, parse_episode_id
from r3async.schedule.environment_mix import EnvironmentOrder
from r3async.views.episodes import RunTokenizer, StepVersions, describe_conversation, load_samples
from r3async.views.follow import FollowedFile
from r3async.views.number_formats import format_number
from r3async.views.templates import TEMPLATES

MAX_INDEXED_EPISODES = 20_000
"""Maximum number of episodes in the index; the newest are kept."""
MAX_SEARCHED_CHARACTERS = 2000
"""Number of characters of an episode that are searched."""
EPISODES_PER_PAGE = 50
MAX_MEMBERS_SHOWN = 16
"""Maximum number of members of a group that are shown beside each other."""
SORT_KEYS = {
    "newest": lambda one: (-(one.step or 0), one.trajectory),
    "best": lambda one: (-(one.reward if one.reward is not None else -np.inf), -(one.step or 0)),
    "worst": lambda one: (one.reward if one.reward is not None else np.inf, -(one.step or 0)),
}


class EpisodeEntry(msgspec.Struct):
    """An episode in the index: the data that a list shows, and the places of the rest.

    Attributes:
        tokens: Number of tokens; None if only the text was kept.
        oldest_version: Version of the oldest sampled token; None if only the text was kept.
        conversation: The episode's line of `episodes.jsonl`.
        route_entries: The episode's samples in the route files.
    """

    step: int | None
    trajectory: str
    group: int | None = None
    environment: str = ""
    reward: float | None = None
    turns: int = 0
    tokens: int | None = None
    oldest_version: int | None = None
    search_text: str = ""
    conversation: dict[str, Any] | None = None
    route_entries: list[RouteEntry] = []

    @property
    def key(self) -> str:
        """The key of the episode in URLs."""
        return f"{self.step}.{self.trajectory}"


class EpisodeQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A search for episodes. A field that is None or empty matches any episode.

    Attributes:
        text: Part of the conversation, or the beginning of an id.
    """

    text: str = ""
    environment: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    step_min: int | None = None
    step_max: int | None = None
    order: str = "newest"
    page: int = 0

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> EpisodeQuery:
        """Parse a query. Raises `ValueError` for a value that is not a number, or
        an unknown order."""
        try:
            query = msgspec.convert(
                {name: word for name, word in params.items() if word}, cls, strict=False
            )
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        if query.order not in SORT_KEYS or query.page < 0:
            raise ValueError(f"order must be one of {', '.join(SORT_KEYS)}, and page 0 or more")
        return query

    def matches_episode(self, episode: EpisodeEntry) -> bool:
        """Return True if the episode matches. An unknown reward or step matches only a query
        without limits for it."""
        words = self.text.casefold().strip()
        return (
            (not self.environment or self.environment == episode.environment)
            and _is_within(episode.reward, self.reward_min, self.reward_max)
            and _is_within(episode.step, self.step_min, self.step_max)
            and (not words or words in episode.search_text or episode.trajectory.startswith(words))
        )


def _is_within(value: float | None, low: float | None, high: float | None) -> bool:
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


def make_environment_lookup(config: dict[str, Any]) -> Callable[[int | None], str]:
    """Return a function from a group to the label of the environment that poses its task.

    `config` is the run's configuration as `read_run_config` returns it.
    """
    env = config.get("env", {})
    name = str(env.get("name", ""))
    try:
        entries = parse_mix_entries(msgspec.convert(env, EnvConfig))
    except (ConfigError, msgspec.ValidationError):
        entries = {}
    if not entries:
        return lambda group: name
    labels, order = list(entries), EnvironmentOrder([entry.weight for entry in entries.values()])
    return lambda group: name if group is None else labels[order.environment_of(group)]


class EpisodeIndex:
    """An index of all episodes whose text or tokens a run kept. `read_new` adds new ones."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._conversations_file = FollowedFile(run_dir / "episodes.jsonl")
        self.skipped_events: list[dict[str, Any]] = []
        """Events that report skipped lines; the caller that reports them removes them."""
        self._index = RouteIndex(run_dir)
        self._tokenizer: RunTokenizer | None = None
        self._entries: dict[str, EpisodeEntry] = {}
        self._add_traces(self._index.trained_entries)

    def read_new(self, find_environment: Callable[[int | None], str]) -> bool:
        """Index everything written since the last call, and return True if there was anything.

        `find_environment` returns the environment of the task of a group.
        """
        lines, skipped = self._conversations_file.read_new()
        self.skipped_events += skipped
        talks = [line for line in lines if "turns" in line]
        for line in talks:
            self._add_conversation(line)
        new = self._index.read_new()
        self._add_traces(new)
        for episode in self._entries.values():
            episode.environment = episode.environment or find_environment(episode.group)
        for key in list(self._entries)[: -MAX_INDEXED_EPISODES or None]:
            del self._entries[key]
        return bool(talks or new)

    def close(self) -> None:
        self._conversations_file.close()

    def _add_conversation(self, line: dict[str, Any]) -> None:
        step = line.get("step")
        reward = finite_or_none(line.get("reward"))
        name = str(line.get("trajectory") or f"line-{len(self._entries)}")
        episode = self._get_or_create(step, name)
        turns = line["turns"]
        said = "\n".join(
            str(turn.get(who) or "") for turn in turns for who in ("user", "assistant")
        )
        episode.conversation = line
        episode.turns = len(turns)
        episode.search_text = said[:MAX_SEARCHED_CHARACTERS].casefold()
        episode.reward = reward if episode.reward is None else episode.reward

    def _add_traces(self, entries: Iterable[RouteEntry]) -> None:
        for (step, name), parts in groupby(
            entries, lambda e: (e.facts["step"], e.facts["trajectory_id"])
        ):
            kept = list(parts)
            episode = self._get_or_create(step, name)
            if {entry.path for entry in episode.route_entries} != {entry.path for entry in kept}:
                # They are from an earlier start, and a resume repeated the step.
                episode.route_entries = []
            episode.route_entries = [*episode.route_entries, *kept]
            columns = [found for entry in episode.route_entries if (found := _read_columns(entry))]
            if columns:
                self._fill_from_columns(episode, columns)

    def _fill_from_columns(
        self, episode: EpisodeEntry, columns: Sequence[dict[str, np.ndarray]]
    ) -> None:
        versions = np.concatenate([each["policy_version"][each["loss_mask"]] for each in columns])
        turns = np.concatenate([each["turn"][each["loss_mask"]] for each in columns])
        episode.tokens = sum(len(each["token_ids"]) for each in columns)
        episode.oldest_version = int(versions.min()) if len(versions) else None
        episode.turns = int(turns.max()) + 1 if len(turns) else 0
        reward = finite_or_none(
            sum(float(each["rewards"].sum(dtype=np.float64)) for each in columns)
        )
        episode.reward = None if reward is None else round(reward, 9)
        if not episode.conversation:
            ids = np.concatenate([each["token_ids"] for each in columns])[:MAX_SEARCHED_CHARACTERS]
            episode.search_text = self.tokenizer.decode_tokens(ids.tolist())[
                :MAX_SEARCHED_CHARACTERS
            ].casefold()

    def _get_or_create(self, step: int | None, name: str) -> EpisodeEntry:
        which = parse_episode_id(name)
        made = EpisodeEntry(step, name, which.group_index if which else None)
        return self._entries.setdefault(made.key, made)

    @property
    def tokenizer(self) -> RunTokenizer:
        """The run's tokenizer, loaded when needed, because a run that just started has none yet."""
        if self._tokenizer is None or not self._tokenizer.is_loaded:
            self._tokenizer = RunTokenizer(self._run_dir)
        return self._tokenizer

    # -- rendering ---------------------------------------------------------------------------------

    def render_list(self, query: EpisodeQuery, versions: StepVersions) -> str:
        """Render a page of the episodes that match `query`, as HTML."""
        found = sorted(
            filter(query.matches_episode, self._entries.values()), key=SORT_KEYS[query.order]
        )
        first = query.page * EPISODES_PER_PAGE
        return TEMPLATES.get_template("report_found.html").render(
            episodes=[
                (one, _compute_staleness(one, versions), _format_reward(one.reward))
                for one in found[first : first + EPISODES_PER_PAGE]
            ],
            environments=sorted({one.environment for one in self._entries.values()}),
            count=len(found),
            every=len(self._entries),
            page=query.page,
            pages=-(-len(found) // EPISODES_PER_PAGE),
        )

    def render_episode(
        self, key: str, versions: StepVersions, *, group: bool = False
    ) -> str | None:
        """Render an episode as HTML, or with `group` all kept episodes of its group
        beside each other.

        Returns None if there is no episode `key`.
        """
        one = self._entries.get(key)
        if one is None:
            return None
        members = list(self._list_group(one))
        shown = members[:MAX_MEMBERS_SHOWN] if group else [one]
        return TEMPLATES.get_template("report_opened.html").render(
            episodes=[
                (
                    each,
                    _compute_staleness(each, versions),
                    _format_reward(each.reward),
                    self._render_details(each, versions),
                )
                for each in shown
            ],
            members=[(each, _format_reward(each.reward)) for each in members],
            opened=one,
            beside=group,
        )

    def _list_group(self, episode: EpisodeEntry) -> Iterator[EpisodeEntry]:
        if episode.group is None:
            yield episode
            return
        found = [
            each
            for each in self._entries.values()
            if (each.step, each.group) == (episode.step, episode.group)
        ]
        yield from sorted(found, key=lambda each: each.trajectory)

    def _render_details(self, episode: EpisodeEntry, versions: StepVersions) -> dict[str, Any]:
        samples, problems = (
            load_samples(self._index, episode.route_entries, self.tokenizer, versions)
            if episode.route_entries
            else ([], [])
        )
        return {
            "talk": describe_conversation(episode.conversation) if episode.conversation else None,
            "samples": samples,
            "problems": problems,
        }


def _compute_staleness(episode: EpisodeEntry, versions: StepVersions) -> int | None:
    version = versions.by_step.get(episode.step)
    return (
        None
        if version is None or episode.oldest_version is None
        else version - episode.oldest_version
    )


def _format_reward(reward: float | None) -> tuple[str, str]:
    """Format a reward as text, with its kind: `good`, `warn`, `bad`, or empty if unknown."""
    kind = "" if reward is None else "good" if reward >= 0.8 else "warn" if reward >= 0.4 else "bad"
    return format_number(reward), kind


EPISODE_COLUMNS = ("token_ids", "loss_mask", "policy_version", "turn", "rewards")


def _read_columns(entry: RouteEntry) -> dict[str, np.ndarray]:
    """Read the short columns of a record, without its routes, which are most of its bytes; {}
    if it is damaged.

    The checksum covers the whole record, so it is verified only when the episode is opened.
    """
    try:
        record = next(ROUTES_CONTAINER.iter_records(map_file(entry.path), entry.offset), None)
    except OSError:
        return {}
    if not isinstance(record, FramedRecord):
        return {}
    places = {
        name: (dtype, at)
        for at, (name, dtype, _) in enumerate(entry.arrays, start=1)
        if name in EPISODE_COLUMNS
    }
    try:
        found = {
            name: np.frombuffer(record.frames[at], np.dtype(dtype))
            for name, (dtype, at) in places.items()
        }
    except (IndexError, TypeError, ValueError):
        return {}
    sound = (
        set(found) == set(EPISODE_COLUMNS) and len({len(column) for column in found.values()}) == 1
    )
    return found if sound and found["loss_mask"].dtype == np.bool_ else {}
