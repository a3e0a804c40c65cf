"""The training rows of one episode: every engine call lands in a row whose tokens are exactly what the engine saw."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from r3async.config import RowsMode
from r3async.engines.base import Generation, RoutingShape
from r3async.records import SCHEMA, Sample, TokenTable, Turn
from r3async.routing import RoutingTrace
from r3async.versions import expand


class PrefixBroken(ValueError):
    """A prompt that does not extend the episode's row, where only one row is allowed."""


class SampleBuilder:
    """Grows one training row, token by token as the engine saw them.

    Observation tokens and injected end-of-sequence tokens are in the sequence with `loss_mask` False; sampled tokens
    carry log-prob, version and turn. Routes are kept by position (`RoutingTrace`).
    """

    def __init__(self, routing: RoutingShape | None):
        self.token_ids: list[int] = []
        self.trace = (
            RoutingTrace(layers=routing.layers, top_k=routing.top_k, num_experts=routing.num_experts)
            if routing
            else None
        )
        self._answers: list[tuple[int, int, Generation]] = []
        self._rewards: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def routes_from(self) -> int:
        return self.trace.fed if self.trace is not None else 0

    @property
    def trained(self) -> bool:
        """Whether this row sampled any token."""
        return any(len(generation.token_ids) for _, _, generation in self._answers)

    def observe(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)

    def answer(self, turn: int, generation: Generation) -> tuple[int, int]:
        """Append what the policy sampled when it was fed all tokens so far. Returns its rows `start, stop`.

        A call that sampled nothing (an abort) has fed what it returned rows for, and nothing else.
        """
        start = len(self)
        self.token_ids.extend(generation.token_ids.tolist())
        stop = len(self)
        self._answers.append((turn, start, generation))
        if self.trace is not None:
            rows, first = generation.routed_experts, generation.routes_from
            if stop > start:
                # The last sampled token has not been fed: its row belongs to the next call that feeds it.
                self.trace.record(first, rows, fed=stop - 1)
            elif rows is not None and len(rows):
                self.trace.record(first, rows, fed=min(start, first + len(rows)))
        return start, stop

    def branch(self, length: int) -> SampleBuilder:
        """A new row whose context is the first `length` tokens of this one, with their routes.

        For a context that is rewritten from there on, and for step-wise rows. None of the shared tokens is trained in
        the new row: the row that sampled them does that. Raises `ValueError` if there are not so many tokens.
        """
        if not 0 <= length <= len(self):
            raise ValueError(f"a branch can not share {length} of {len(self)} tokens")
        other = SampleBuilder(None)
        other.token_ids = self.token_ids[:length]
        other.trace = self.trace.branch(length) if self.trace is not None else None
        return other

    def reward(self, at: int, reward: float) -> None:
        self._rewards.append((at, reward))

    def build(self) -> TokenTable:
        n = len(self)
        columns = {name: column.filled(n) for name, column in SCHEMA.columns.items() if not column.optional}
        columns["token_ids"] = np.asarray(self.token_ids, np.int32)
        for turn, start, generation in self._answers:
            rows = slice(start, start + len(generation.token_ids))
            columns["loss_mask"][rows] = True
            columns["turn"][rows] = turn
            columns["rollout_logprobs"][rows] = generation.logprobs
            columns["policy_version"][rows] = expand(generation.version_spans, len(generation.token_ids))
        for at, reward in self._rewards:
            columns["rewards"][at] += reward
        if self.trace is not None:
            columns["routed_experts"], columns["routing_recorded"] = self.trace.materialise(n)
        return TokenTable(columns)


class Call(msgspec.Struct):
    """One engine call that has begun, and the row it lands in. `routes_from`: what to ask the engine for."""

    row: SampleBuilder
    prompt_length: int

    @property
    def routes_from(self) -> int:
        return self.row.routes_from


class _Answer(msgspec.Struct):
    row: SampleBuilder
    start: int
    stop: int
    stop_reason: str
    reward: float = 0.0


class EpisodeRows:
    """Decides for every prompt which row it continues.

    A prompt that extends a row exactly continues it (in `merged` and `auto`), so the tokens of training are those of the
    episode, once. Any other prompt **branches**: a new row shares the routes of the longest common prefix and trains only
    what is sampled in it. With `stepwise` every prompt branches: one row a turn. With `merged` a prompt that does not
    extend the one row raises `PrefixBroken`.

    Calls may overlap (an agent that asks twice at once): a row that waits for its answer is branched from, not continued.
    Pure; owns nothing but memory.
    """

    def __init__(self, routing: RoutingShape | None, mode: RowsMode = "auto"):
        self._routing, self._mode = routing, mode
        self._rows: list[SampleBuilder] = []
        self._waiting: list[SampleBuilder] = []
        self._answers: dict[int, _Answer] = {}

    @property
    def turns(self) -> int:
        """Answers so far."""
        return len(self._answers)

    def begin(self, prompt_ids: Sequence[int]) -> Call:
        """A call with the prompt `prompt_ids` `[P]`. Raises `PrefixBroken`."""
        prompt = list(prompt_ids)
        row = self._continued(prompt)
        if row is None:
            row = self._branched(prompt)
            self._rows.append(row)
        self._waiting.append(row)
        return Call(row, len(prompt))

    def _continued(self, prompt: list[int]) -> SampleBuilder | None:
        """The longest row that the prompt extends, grown to the prompt; None if there is none, or rows are not merged."""
        if self._mode == "stepwise":
            # Only a call that failed, asked again.
            fits = [r for r in self._rows if self._free(r) and not r.trained and r.token_ids == prompt]
        else:
            fits = [r for r in self._rows if self._free(r) and r.token_ids == prompt[: len(r)]]
        if not fits:
            return None
        row = max(reversed(fits), key=len)  # of equal ones the newest: that is the conversation that goes on
        row.observe(prompt[len(row) :])
        return row

    def _free(self, row: SampleBuilder) -> bool:
        return all(row is not other for other in self._waiting)

    def _branched(self, prompt: list[int]) -> SampleBuilder:
        shared = [(common_prefix(r.token_ids, prompt), i) for i, r in enumerate(self._rows)]
        if not shared:
            row = SampleBuilder(self._routing)
        elif self._mode == "merged":
            raise PrefixBroken(
                f"the prompt of turn {self.turns} differs from what the model has seen at position {max(shared)[0]}: the chat "
                'template, or the environment, rewrites history. episode.rows = "merged" allows one row an episode; with '
                '"auto" such an episode becomes several'
            )
        else:
            length, longest = max(shared)
            row = self._rows[longest].branch(length)
        row.observe(prompt[len(row) :])
        return row

    def end(self, call: Call, generation: Generation) -> int:
        """Take the call's answer, whose turn is returned. An empty one (an abort) is no turn: -1."""
        self.cancel(call)
        turn = len(self._answers)
        start, stop = call.row.answer(turn, generation)
        if stop == start:
            return -1
        self._answers[turn] = _Answer(call.row, start, stop, generation.stop_reason)
        return turn

    def cancel(self, call: Call) -> None:
        """The call failed. Its prompt may be asked again."""
        self._waiting = [row for row in self._waiting if row is not call.row]

    def reward(self, turn: int, reward: float) -> None:
        """Credit `reward`, in addition, at the last token of that turn. Raises `KeyError` for a turn that there is not."""
        answer = self._answers[turn]
        answer.reward += reward
        answer.row.reward(answer.stop - 1, reward)

    def build(
        self, trajectory_id: str, temperature: float, turns: int | None = None
    ) -> tuple[list[Sample], list[Turn]]:
        """The rows that sampled anything, in the order of their first answers, and their turns: all, or the first `turns`."""
        answers = list(self._answers.items())[:turns]
        rows: list[SampleBuilder] = []
        described = []
        for index, answer in answers:
            at = next((i for i, row in enumerate(rows) if row is answer.row), len(rows))
            if at == len(rows):
                rows.append(answer.row)
            described.append(Turn(index, at, answer.start, answer.stop, answer.reward, answer.stop_reason))
        samples = []
        for at, row in enumerate(rows):
            # A prompt that never got its answer is not part of what is trained.
            last = max(answer.stop for _, answer in answers if answer.row is row)
            samples.append(Sample(f"{trajectory_id}s{at}", row.build().slice(0, last), temperature))
        return samples, described


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning."""
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(different[0]) if len(different) else n
