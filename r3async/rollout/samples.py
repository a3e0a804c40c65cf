"""The samples of one episode. Their tokens are exactly those that the engine saw, call by call."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from r3async.config import RowsMode
from r3async.data.model_shape import RoutingShape
from r3async.data.routes import RoutingTrace
from r3async.data.supports import SupportSets
from r3async.data.tokens import SCHEMA, GrowingTokens, Sample, TokenTable, Turn
from r3async.data.versions import expand_version_spans
from r3async.rollout.engine import Generation


class PrefixMismatchError(ValueError):
    """A prompt that does not extend the episode's sample, where only one sample is allowed."""


class SampleBuilder:
    """A builder of one sample, which grows by the tokens in the order in which the engine saw them.

    Observation tokens and injected end-of-sequence tokens are in the sequence with `loss_mask`
    False; sampled tokens carry log-prob, version and turn. Routes are kept by position
    (`RoutingTrace`): within a sample, the first call that fed a position owns its route. A branched
    sample borrows the routes of its context until its first call has answered, and keeps them only
    if that call entered under the same weights that produced them.
    """

    def __init__(self, routing: RoutingShape | None, with_supports: bool = False):
        """Begin an empty sample. `with_supports` is True if each sampled token comes
        with its support."""
        self._tokens = GrowingTokens()
        self.routing_trace = RoutingTrace(**msgspec.structs.asdict(routing)) if routing else None
        self.entry_version = -1
        """Version of the weights under which the first call entered; in a sample without an answer,
        the version that produced the borrowed routes."""
        self.shareable_length = 0
        """Number of leading positions whose routes are recorded and were computed by that
        version, onto its keys and values: what a new call under that version would find in the
        engine's prefix cache."""
        self._with_supports = with_supports
        self._answers: list[tuple[int, int, Generation]] = []
        self._rewards: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens so far, int32 `[T]`; read-only."""
        return self._tokens.array

    @property
    def routes_from(self) -> int:
        """The first position whose routes the next call should return; see `GenerationRequest`."""
        return self.routing_trace.positions_fed if self.routing_trace is not None else 0

    @property
    def routes_version(self) -> int | None:
        """The only version under which `routes_from` holds; None if it holds under any."""
        return None if self.has_sampled_tokens or not self.routes_from else self.entry_version

    @property
    def has_sampled_tokens(self) -> bool:
        """True if any token of the sample was sampled."""
        return bool(self._answers)

    def append_context(self, token_ids: Sequence[int] | np.ndarray) -> None:
        self._tokens.extend(token_ids)

    def append_answer(self, turn: int, generation: Generation) -> tuple[int, int]:
        """Append what the policy sampled after all tokens so far, and return its
        positions `start, stop`.

        A call that sampled nothing (an abort) owns nothing: the call that is answered feeds
        its prompt again.
        """
        start = len(self)
        if not len(generation.token_ids):
            return start, start
        self._tokens.extend(generation.token_ids)
        stop = len(self)
        if self.routing_trace is not None:
            self._record_routes(self.routing_trace, generation, start, stop)
        self._answers.append((turn, start, generation))
        return start, stop

    def _record_routes(
        self, trace: RoutingTrace, generation: Generation, start: int, stop: int
    ) -> None:
        rows = generation.routed_experts
        first = generation.routes_from
        span = generation.version_spans[0]
        if not self.has_sampled_tokens:
            # Drop borrowed routes that other weights produced, and those that this call
            # returned itself.
            self.routing_trace = trace = trace.branch_at(
                first if span.version == self.entry_version else 0
            )
            self.entry_version = span.version
            self.shareable_length = trace.positions_fed
        # The last sampled token has not been fed: its route belongs to the next call that feeds it.
        known = trace.positions_fed
        trace.record_rows(first, rows, stop - 1, generation.routed_weights)
        if (
            rows is not None
            and first <= known == self.shareable_length
            and span.version == self.entry_version
        ):
            # The step that sampled the first token of newer weights fed the one before it,
            # under these weights.
            self.shareable_length = max(known, min(first + len(rows), start + span.stop - 1))

    def branch_at(self, length: int) -> SampleBuilder:
        """Return a new sample whose context is the first `length` tokens of this one.

        It borrows those of their routes that one version produced (`shareable_length`). Branches
        serve contexts that are rewritten from there on, and step-wise samples. None of the shared
        tokens is trained in the new sample; the sample in which they were sampled trains them.
        Raises `ValueError` if there are fewer than `length` tokens.
        """
        if not 0 <= length <= len(self):
            raise ValueError(f"a branch cannot share {length} of {len(self)} tokens")
        other = SampleBuilder(None, self._with_supports)
        other._tokens = GrowingTokens(self.token_ids[:length])
        if self.routing_trace is not None:
            other.routing_trace = self.routing_trace.branch_at(min(length, self.shareable_length))
            other.entry_version = self.entry_version
            other.shareable_length = other.routing_trace.positions_fed
        return other

    def add_reward(self, at: int, reward: float) -> None:
        self._rewards.append((at, reward))

    def build_table(self, length: int | None = None) -> TokenTable:
        """Return the table of the first `length` tokens (default: all).

        The last one has no route: no trained token depends on it.
        """
        n = len(self)
        length = n if length is None else length
        columns = {
            name: column.filled_rows(n)
            for name, column in SCHEMA.columns.items()
            if not column.optional
        }
        columns["token_ids"] = self.token_ids.copy()
        for turn, start, generation in self._answers:
            sampled = slice(start, start + len(generation.token_ids))
            columns["loss_mask"][sampled] = True
            columns["turn"][sampled] = turn
            columns["rollout_logprobs"][sampled] = generation.logprobs
            columns["policy_version"][sampled] = expand_version_spans(
                generation.version_spans, len(generation.token_ids)
            )
        for at, reward in self._rewards:
            columns["rewards"][at] += reward
        if self._with_supports:
            sets = [(start, g.supports) for _, start, g in self._answers if g.supports is not None]
            columns["support"] = SupportSets.from_parts(n, sets)
        if self.routing_trace is not None:
            fed = self.routing_trace.branch_at(max(0, length - 1))
            columns["routed_experts"], columns["routing_recorded"] = fed.to_arrays(n)
            if fed.has_gates:
                columns["routed_weights"] = fed.gates_array(n)
        return TokenTable(columns).slice_rows(0, length)


class PendingCall(msgspec.Struct, frozen=True, eq=False):
    """A prompt that waits for its answer.

    Attributes:
        prompt_ids: The prompt, `[P]`.
        sample: The sample to which prompt and answer will be added. Until the answer arrives it
            holds nothing of either.
        common_prefix_lengths: For each sample of the episode, the number of leading tokens that it
            shares with the prompt.
    """

    prompt_ids: np.ndarray
    sample: SampleBuilder
    common_prefix_lengths: list[int]

    @property
    def routes_from(self) -> int:
        """The first position whose routes this call should return; see `GenerationRequest`."""
        return self.sample.routes_from

    @property
    def routes_version(self) -> int | None:
        """The only version under which `routes_from` holds; None if it holds under any."""
        return self.sample.routes_version


class _RecordedAnswer(msgspec.Struct):
    sample: SampleBuilder
    start: int
    stop: int
    stop_reason: str
    reward: float = 0.0


class EpisodeSamples:
    """The samples of one episode, which decide for every prompt which sample it continues.

    A prompt that extends a sample exactly continues it (in `merged` and `auto`), so each token of
    the episode is trained once. Any other prompt **branches**: it begins a new sample that trains
    only what is sampled in it. Its own call computes the whole prompt again, so the sample has that
    call's routes. Routes of a common prefix that an earlier call recorded under the same weights
    and the same cache salt are shared; all others are requested. With `stepwise` every prompt
    branches: one sample per turn. With `merged` a prompt that does not extend the one sample raises
    `PrefixMismatchError`.

    Calls may overlap (an agent with two requests in flight): a sample that waits for its
    answer is branched from, not continued. A call without an answer leaves nothing. Pure; owns
    nothing but memory.
    """

    def __init__(
        self,
        routing: RoutingShape | None,
        rows_mode: RowsMode = "auto",
        with_supports: bool = False,
    ):
        """Begin an episode without samples. `with_supports` is as in `SampleBuilder`."""
        self._routing = routing
        self._rows_mode = rows_mode
        self._with_supports = with_supports
        self._samples: list[SampleBuilder] = []
        self._index_by_sample: dict[SampleBuilder, int] = {}
        """Index of each sample in `_samples`."""
        self._compared_lengths: list[list[int]] = []
        """Number of leading tokens of sample i and each sample j < i that were compared and are
        equal, by i and j."""
        self._pending_calls: list[PendingCall] = []
        self._answers: dict[int, _RecordedAnswer] = {}

    @property
    def turn_count(self) -> int:
        """The number of answers so far."""
        return len(self._answers)

    def start_call(
        self, prompt_ids: Sequence[int] | np.ndarray, shared_turn: int = -1, shared_tokens: int = 0
    ) -> PendingCall:
        """Begin a call with the prompt `prompt_ids` `[P]`, to be passed to `finish_call`
        or `cancel_call`.

        The first `shared_tokens` tokens are known to equal those of the sample that contains
        `shared_turn`, and are not compared again. Raises `PrefixMismatchError`.
        """
        prompt = np.asarray(prompt_ids, np.int32)
        alike = self._compare_prompt(prompt, shared_turn, shared_tokens)
        sample = self._find_continued_sample(alike)
        if sample is None:
            sample = self._branch_sample(alike)
        call = PendingCall(prompt, sample, alike)
        self._pending_calls.append(call)
        return call

    def _compare_prompt(
        self, prompt: np.ndarray, shared_turn: int, shared_tokens: int
    ) -> list[int]:
        """Return, for each sample, the number of leading tokens that it shares with the prompt.

        Known tokens are not compared: a sample that differs from the sample of `shared_turn` within
        the first `shared_tokens` tokens differs from the prompt at the same position.
        """
        answer = self._answers.get(shared_turn)
        if answer is None:
            return [common_prefix_length(s.token_ids, prompt) for s in self._samples]
        here = self._index_by_sample[answer.sample]
        shared_tokens = min(shared_tokens, answer.stop)
        alike = []
        for i, sample in enumerate(self._samples):
            start = (
                shared_tokens
                if i == here
                else min(shared_tokens, self._compare_samples(max(i, here), min(i, here)))
            )
            alike.append(
                common_prefix_length(sample.token_ids, prompt, start)
                if start == shared_tokens
                else start
            )
        return alike

    def _compare_samples(self, i: int, j: int) -> int:
        """Return the length of two samples' common prefix. Both may have grown since they
        were last compared."""
        known = self._compared_lengths[i][j]
        a = self._samples[i]
        b = self._samples[j]
        if known < min(len(a), len(b)):
            self._compared_lengths[i][j] = known = common_prefix_length(
                a.token_ids, b.token_ids, known
            )
        return known

    def _find_continued_sample(self, common_prefix_lengths: Sequence[int]) -> SampleBuilder | None:
        """Return the longest sample that the prompt extends; None if there is none, or with
        `stepwise` samples."""
        if self._rows_mode == "stepwise":
            return None
        fits = [
            s
            for s, n in zip(self._samples, common_prefix_lengths, strict=True)
            if n == len(s) and self._is_free(s)
        ]
        # Among equally long ones take the newest: that is the conversation that continues.
        return max(reversed(fits), key=len, default=None)

    def _is_free(self, sample: SampleBuilder) -> bool:
        return all(sample is not call.sample for call in self._pending_calls)

    def _branch_sample(self, common_prefix_lengths: Sequence[int]) -> SampleBuilder:
        if self._rows_mode == "merged" and (self._samples or self._pending_calls):
            raise PrefixMismatchError(
                f"the prompt of turn {self.turn_count} differs from what the model has seen at "
                f"position {max(common_prefix_lengths, default=0)}: "
                'the chat template, or the environment, rewrites history. episode.rows = "merged" '
                'allows one sample an episode; with "auto" such an episode becomes several'
            )
        if not common_prefix_lengths:
            return SampleBuilder(self._routing, self._with_supports)
        # The newest version of all samples is the only one that the engine can still have.
        lenders = [
            (s.entry_version, min(length, s.shareable_length), i)
            for i, (s, length) in enumerate(zip(self._samples, common_prefix_lengths, strict=True))
        ]
        lender = max(lenders)[-1]
        return self._samples[lender].branch_at(common_prefix_lengths[lender])

    def finish_call(self, call: PendingCall, generation: Generation) -> int:
        """Add the answer of `call` and return its turn. An empty answer (an
        abort) is no turn: -1."""
        self.cancel_call(call)
        if not len(generation.token_ids):
            return -1
        turn = len(self._answers)
        sample = call.sample
        if sample not in self._index_by_sample:
            self._index_by_sample[sample] = len(self._samples)
            self._compared_lengths.append(
                [
                    *call.common_prefix_lengths,
                    *[0] * (len(self._samples) - len(call.common_prefix_lengths)),
                ]
            )
            self._samples.append(sample)
        sample.append_context(call.prompt_ids[len(sample) :])
        start, stop = sample.append_answer(turn, generation)
        self._answers[turn] = _RecordedAnswer(sample, start, stop, generation.stop_reason)
        return turn

    def cancel_call(self, call: PendingCall) -> None:
        """Drop a call that failed, or whose answer could not be delivered. Its prompt
        may be sent again."""
        self._pending_calls = [other for other in self._pending_calls if other is not call]

    def add_reward(self, turn: int, reward: float) -> None:
        """Add `reward` to the reward at the last token of that turn. Raises `KeyError` for
        an unknown turn."""
        answer = self._answers[turn]
        answer.reward += reward
        answer.sample.add_reward(answer.stop - 1, reward)

    def build_samples(
        self, trajectory_id: str, temperature: float, turns: int | None = None
    ) -> tuple[list[Sample], list[Turn]]:
        """Return the samples that contain answers, in the order of their first
        answers, and the turns.

        `turns` limits both to the first so many turns; default: all.
        """
        answers = list(self._answers.items())[:turns]
        places: dict[SampleBuilder, int] = {}
        # A prompt that never got its answer is not part of what is trained.
        stops: dict[SampleBuilder, int] = {}
        described = []
        for index, answer in answers:
            at = places.setdefault(answer.sample, len(places))
            stops[answer.sample] = max(answer.stop, stops.get(answer.sample, 0))
            described.append(
                Turn(index, at, answer.start, answer.stop, answer.reward, answer.stop_reason)
            )
        samples = [
            Sample(f"{trajectory_id}s{at}", sample.build_table(stops[sample]), temperature)
            for sample, at in places.items()
        ]
        return samples, described


COMPARE_BLOCK_TOKENS = 256
"""Number of tokens compared at once: if two sequences differ early, no more are read."""


def common_prefix_length(
    a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray, equal_tokens: int = 0
) -> int:
    """Return the length of two sequences' common prefix, of which the first `equal_tokens` are
    known to be equal."""
    n = min(len(a), len(b))
    while equal_tokens < n:
        stop = min(n, equal_tokens + COMPARE_BLOCK_TOKENS)
        different = np.asarray(a[equal_tokens:stop]) != np.asarray(b[equal_tokens:stop])
        if different.any():
            return equal_tokens + int(different.argmax())
        equal_tokens = stop
    return equal_tokens
