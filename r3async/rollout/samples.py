"""The samples of one episode: every engine call lands in a sample whose tokens are exactly what the engine saw."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from r3async.config import RowsMode
from r3async.data.model_shape import RoutingShape
from r3async.data.records import SCHEMA, GrowingTokens, Sample, TokenTable, Turn
from r3async.data.routes import RoutingTrace
from r3async.data.supports import Supports
from r3async.data.versions import expand
from r3async.rollout.engines import Generation


class PrefixBroken(ValueError):
    """A prompt that does not extend the episode's sample, where only one sample is allowed."""


class SampleBuilder:
    """Grows one sample, token by token as the engine saw them.

    Observation tokens and injected end-of-sequence tokens are in the sequence with `loss_mask` False; sampled tokens
    carry log-prob, version and turn. Routes are kept by position (`RoutingTrace`): within a sample, the first call that fed a
    position owns its route. A sample that branched off borrows the routes of its context until its first call has answered, and
    keeps them only if that call entered under the very weights that made them.
    """

    def __init__(self, routing: RoutingShape | None, masks: bool = False):
        """`masks`: whether each sampled token has its support with it."""
        self._tokens = GrowingTokens()
        self.trace = (
            RoutingTrace(layers=routing.layers, top_k=routing.top_k, num_experts=routing.num_experts)
            if routing
            else None
        )
        self.version = -1
        """Weights that the first call entered under; of a sample without an answer, those that made the borrowed routes."""
        self.uniform = 0
        """Positions from the first on whose routes are recorded and were made by that version, onto keys and values of it:
        what a new call under that version would find in the engine's prefix cache."""
        self._masks = masks
        self._answers: list[tuple[int, int, Generation]] = []
        self._rewards: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 `[T]`, not to be written to."""
        return self._tokens.array

    @property
    def routes_from(self) -> int:
        """First position that the engine is to be asked for; see `GenerationRequest`."""
        return self.trace.fed if self.trace is not None else 0

    @property
    def routes_version(self) -> int | None:
        """Under which version alone that holds; None if under any."""
        return None if self.trained or not self.routes_from else self.version

    @property
    def trained(self) -> bool:
        """Whether any token of it was sampled."""
        return bool(self._answers)

    def observe(self, token_ids: Sequence[int] | np.ndarray) -> None:
        self._tokens.extend(token_ids)

    def answer(self, turn: int, generation: Generation) -> tuple[int, int]:
        """Append what the policy sampled when it was fed all tokens so far. Returns its positions `start, stop`.

        A call that sampled nothing (an abort) owns nothing: its prompt is fed again by the call that is answered.
        """
        start = len(self)
        if not len(generation.token_ids):
            return start, start
        self._tokens.extend(generation.token_ids)
        stop = len(self)
        if self.trace is not None:
            self._record(self.trace, generation, start, stop)
        self._answers.append((turn, start, generation))
        return start, stop

    def _record(self, trace: RoutingTrace, generation: Generation, start: int, stop: int) -> None:
        rows, first, span = generation.routed_experts, generation.routes_from, generation.version_spans[0]
        if not self.trained:
            # Of what is borrowed, nothing that other weights made, and nothing that this call returned itself.
            self.trace = trace = trace.branch(first if span.version == self.version else 0)
            self.version, self.uniform = span.version, trace.fed
        # The last sampled token has not been fed: its route belongs to the next call that feeds it.
        known = trace.fed
        trace.record(first, rows, fed=stop - 1)
        if rows is not None and first <= known == self.uniform and span.version == self.version:
            # The step that sampled the first token of newer weights fed the one before it, under these weights.
            self.uniform = max(known, min(first + len(rows), start + span.stop - 1))

    def branch(self, length: int) -> SampleBuilder:
        """A new sample whose context is the first `length` tokens of this one. It borrows those of their routes that one version
        made (`uniform`).

        For a context that is rewritten from there on, and for step-wise samples. None of the shared tokens is trained in
        the new sample: the one that has them sampled does that. Raises `ValueError` if there are not so many tokens.
        """
        if not 0 <= length <= len(self):
            raise ValueError(f"a branch cannot share {length} of {len(self)} tokens")
        other = SampleBuilder(None, self._masks)
        other._tokens = GrowingTokens(self.token_ids[:length])
        if self.trace is not None:
            other.trace = self.trace.branch(min(length, self.uniform))
            other.version, other.uniform = self.version, other.trace.fed
        return other

    def reward(self, at: int, reward: float) -> None:
        self._rewards.append((at, reward))

    def build(self, length: int | None = None) -> TokenTable:
        """The first `length` tokens (default: all). The last one has no route: no trained token depends on it."""
        n = len(self)
        length = n if length is None else length
        columns = {name: column.filled(n) for name, column in SCHEMA.columns.items() if not column.optional}
        columns["token_ids"] = self.token_ids.copy()
        for turn, start, generation in self._answers:
            sampled = slice(start, start + len(generation.token_ids))
            columns["loss_mask"][sampled] = True
            columns["turn"][sampled] = turn
            columns["rollout_logprobs"][sampled] = generation.logprobs
            columns["policy_version"][sampled] = expand(generation.version_spans, len(generation.token_ids))
        for at, reward in self._rewards:
            columns["rewards"][at] += reward
        if self._masks:
            sets = [(start, g.supports) for _, start, g in self._answers if g.supports is not None]
            columns["support"] = Supports.placed(n, sets)
        if self.trace is not None:
            fed = self.trace.branch(max(0, length - 1))
            columns["routed_experts"], columns["routing_recorded"] = fed.materialise(n)
        return TokenTable(columns).slice(0, length)


class EngineCall(msgspec.Struct, frozen=True, eq=False):
    """A prompt `[P]` that waits for its answer, and the sample in which both will be: until then, nothing of them is there.
    `alike`: how many tokens of the prompt each sample of the episode begins with."""

    prompt_ids: np.ndarray
    sample: SampleBuilder
    alike: list[int]

    @property
    def routes_from(self) -> int:
        """First position that the engine is to be asked for; see `GenerationRequest`."""
        return self.sample.routes_from

    @property
    def routes_version(self) -> int | None:
        """Under which version alone that holds; None if under any."""
        return self.sample.routes_version


class _Answer(msgspec.Struct):
    sample: SampleBuilder
    start: int
    stop: int
    stop_reason: str
    reward: float = 0.0


class EpisodeSamples:
    """Decides for every prompt which sample it continues.

    A prompt that extends a sample exactly continues it (in `merged` and `auto`), so the tokens of training are those of the
    episode, once. Any other prompt **branches**: a new sample that trains only what is sampled in it. Its own call computes the
    whole prompt again, so it has that call's routes. Those of a common prefix that an earlier call recorded under the same
    weights and the same cache salt are shared; all others are asked for. With `stepwise` every prompt branches: one sample a
    turn. With `merged` a prompt that does not extend the one sample raises `PrefixBroken`.

    Calls may overlap (an agent that asks twice at once): a sample that waits for its answer is branched from, not continued.
    One that gets no answer leaves nothing. Pure; owns nothing but memory.
    """

    def __init__(self, routing: RoutingShape | None, mode: RowsMode = "auto", masks: bool = False):
        """`masks`: see `SampleBuilder`."""
        self._routing, self._mode, self._masks = routing, mode, masks
        self._samples: list[SampleBuilder] = []
        self._places: dict[SampleBuilder, int] = {}
        """In that list."""
        self._compared: list[list[int]] = []
        """Of sample i and each sample j < i: how many of their first tokens were compared, and are equal."""
        self._waiting: list[EngineCall] = []
        self._answers: dict[int, _Answer] = {}

    @property
    def turns(self) -> int:
        """Answers so far."""
        return len(self._answers)

    def begin(self, prompt_ids: Sequence[int] | np.ndarray, turn: int = -1, shared: int = 0) -> EngineCall:
        """A call with the prompt `prompt_ids` `[P]`, to be given to `end` or `cancel`. Raises `PrefixBroken`.

        The first `shared` tokens are known to be those of the sample that `turn` is in, and are not compared again.
        """
        prompt = np.asarray(prompt_ids, np.int32)
        alike = self._alike(prompt, turn, shared)
        sample = self._continued(alike)
        if sample is None:
            sample = self._branched(alike)
        call = EngineCall(prompt, sample, alike)
        self._waiting.append(call)
        return call

    def _alike(self, prompt: np.ndarray, turn: int, shared: int) -> list[int]:
        """How many tokens of the prompt each sample begins with. No token is compared that is known: a sample that differs within
        `shared` tokens from that of `turn` differs from the prompt there."""
        answer = self._answers.get(turn)
        if answer is None:
            return [common_prefix(s.token_ids, prompt) for s in self._samples]
        here, shared = self._places[answer.sample], min(shared, answer.stop)
        alike = []
        for i, sample in enumerate(self._samples):
            start = shared if i == here else min(shared, self._alike_samples(max(i, here), min(i, here)))
            alike.append(common_prefix(sample.token_ids, prompt, start) if start == shared else start)
        return alike

    def _alike_samples(self, i: int, j: int) -> int:
        """How many tokens two samples begin with in common. Both may have grown since they were compared."""
        known, (a, b) = self._compared[i][j], (self._samples[i], self._samples[j])
        if known < min(len(a), len(b)):
            self._compared[i][j] = known = common_prefix(a.token_ids, b.token_ids, known)
        return known

    def _continued(self, alike: Sequence[int]) -> SampleBuilder | None:
        """The longest sample that the prompt extends; None if there is none, or samples are not merged."""
        if self._mode == "stepwise":
            return None
        fits = [s for s, n in zip(self._samples, alike, strict=True) if n == len(s) and self._free(s)]
        # Of equal ones the newest: that is the conversation that continues.
        return max(reversed(fits), key=len, default=None)

    def _free(self, sample: SampleBuilder) -> bool:
        return all(sample is not call.sample for call in self._waiting)

    def _branched(self, alike: Sequence[int]) -> SampleBuilder:
        if self._mode == "merged" and (self._samples or self._waiting):
            raise PrefixBroken(
                f"the prompt of turn {self.turns} differs from what the model has seen at position {max(alike, default=0)}: "
                'the chat template, or the environment, rewrites history. episode.rows = "merged" allows one sample an episode; '
                'with "auto" such an episode becomes several'
            )
        if not alike:
            return SampleBuilder(self._routing, self._masks)
        # The newest version of all samples is the only one that the engine can still have.
        lenders = [
            (s.version, min(length, s.uniform), i)
            for i, (s, length) in enumerate(zip(self._samples, alike, strict=True))
        ]
        lender = max(lenders)[-1]
        return self._samples[lender].branch(alike[lender])

    def end(self, call: EngineCall, generation: Generation) -> int:
        """Take the answer of `call`; its turn is returned. An empty one (an abort) is no turn: -1."""
        self.cancel(call)
        if not len(generation.token_ids):
            return -1
        turn, sample = len(self._answers), call.sample
        if sample not in self._places:
            self._places[sample] = len(self._samples)
            self._compared.append([*call.alike, *[0] * (len(self._samples) - len(call.alike))])
            self._samples.append(sample)
        sample.observe(call.prompt_ids[len(sample) :])
        start, stop = sample.answer(turn, generation)
        self._answers[turn] = _Answer(sample, start, stop, generation.stop_reason)
        return turn

    def cancel(self, call: EngineCall) -> None:
        """It failed, or nobody could be given its answer. Its prompt may be asked again."""
        self._waiting = [other for other in self._waiting if other is not call]

    def reward(self, turn: int, reward: float) -> None:
        """Credit `reward`, in addition, at the last token of that turn. Raises `KeyError` for a turn that there is not."""
        answer = self._answers[turn]
        answer.reward += reward
        answer.sample.reward(answer.stop - 1, reward)

    def build(
        self, trajectory_id: str, temperature: float, turns: int | None = None
    ) -> tuple[list[Sample], list[Turn]]:
        """The samples that sampled anything, in the order of their first answers, and their turns: all, or the first `turns`."""
        answers = list(self._answers.items())[:turns]
        places: dict[SampleBuilder, int] = {}
        stops: dict[SampleBuilder, int] = {}  # a prompt that never got its answer is not part of what is trained
        described = []
        for index, answer in answers:
            at = places.setdefault(answer.sample, len(places))
            stops[answer.sample] = max(answer.stop, stops.get(answer.sample, 0))
            described.append(Turn(index, at, answer.start, answer.stop, answer.reward, answer.stop_reason))
        samples = [
            Sample(f"{trajectory_id}s{at}", sample.build(stops[sample]), temperature) for sample, at in places.items()
        ]
        return samples, described


BLOCK = 256
"""Tokens that are compared at once: where two sequences differ soon, no more are read."""


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray, known: int = 0) -> int:
    """How many tokens two sequences share at their beginning, of which the first `known` are known to be equal."""
    n = min(len(a), len(b))
    while known < n:
        stop = min(n, known + BLOCK)
        different = np.asarray(a[known:stop]) != np.asarray(b[known:stop])
        if different.any():
            return known + int(different.argmax())
        known = stop
    return known
