"""The proof that the routes used in training are the engine's own, from two records that were made apart.

Nothing here asks the code that carried the routes. From the engine's record alone it is worked out again which call owns
which position, and what that call returned is compared with what the learner's routers used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from r3async.observe.routes import EngineCall, RouteFileError, RouteIndex, TrainedRoutes, load


class Difference(msgspec.Struct, frozen=True):
    """A token that a router sent elsewhere. `expected`: the engine's experts; if the engine returned none for that
    position (`recorded` is False), the learner's own, which it then has to use."""

    step: int
    sample_id: str
    position: int
    layer: int
    recorded: bool
    expected: list[int]
    used: list[int]

    def describe(self) -> str:
        whose = "the engine chose" if self.recorded else "the engine recorded nothing; the router itself chose"
        return (
            f"step {self.step}, sample {self.sample_id}, position {self.position}, MoE layer {self.layer}: "
            f"{whose} {self.expected}, training used {self.used}"
        )


class Comparison(msgspec.Struct):
    """Counts are of rows: one position in one MoE layer. `unrecorded`: positions of which the engine returned no row in the
    call that first fed them (the last token, an aborted call); there the router's own choice is right."""

    samples: int = 0
    equal: int = 0
    different: int = 0
    unrecorded: int = 0
    unmatched: list[str] = []
    """Samples that no attempt in the engine's record sampled."""
    first: Difference | None = None

    @property
    def proven(self) -> bool:
        return self.equal > 0 and not self.different and not self.unmatched

    def add(self, other: Comparison) -> None:
        self.samples += other.samples
        self.equal += other.equal
        self.different += other.different
        self.unrecorded += other.unrecorded
        self.unmatched = [*self.unmatched, *other.unmatched]
        self.first = self.first or other.first


def engine_rows(trained: TrainedRoutes, calls: Sequence[EngineCall]) -> tuple[np.ndarray, np.ndarray] | None:
    """`[T, L, K]` experts of the engine and bool `[T]`, where there are any; None if no attempt sampled these tokens.

    `calls`: of the sample's trajectory, in order of time. An episode that failed was tried again under the same ids; the
    attempt that was trained is the last one that sampled exactly these tokens with exactly these log-probs. Within it a
    position belongs to the first call that fed it; what later calls returned for it does not count.
    """
    for attempt in reversed(list(_attempts(calls))):
        if _sampled(attempt, trained):
            return _owned_rows(attempt, trained)
    return None


def _attempts(calls: Sequence[EngineCall]) -> Iterator[list[EngineCall]]:
    # Calls are numbered as they are asked, and written as they are answered: those of an agent may overtake each other, but
    # only another attempt uses a number again.
    attempt: list[EngineCall] = []
    for call in calls:
        if any(call.turn == earlier.turn for earlier in attempt):
            yield attempt
            attempt = []
        attempt.append(call)
    if attempt:
        yield attempt


def _shared(call: EngineCall, tokens: np.ndarray) -> int:
    """How many tokens the call has in common with the beginning of `tokens`."""
    mine = np.concatenate([call.prompt_ids, call.token_ids])
    n = min(len(mine), len(tokens))
    unlike = mine[:n] != tokens[:n]
    return int(unlike.argmax()) if unlike.any() else n


def _sampled(attempt: Sequence[EngineCall], trained: TrainedRoutes) -> bool:
    found = np.zeros(len(trained.token_ids), bool)
    for call in attempt:
        start, stop = len(call.prompt_ids), len(call.prompt_ids) + len(call.token_ids)
        if _shared(call, trained.token_ids) == stop:
            # By their bits: a NaN is itself.
            found[start:stop] = call.logprobs.view(np.int32) == trained.rollout_logprobs[start:stop].view(np.int32)
    return bool(found[trained.loss_mask].all())


def _owned_rows(attempt: Sequence[EngineCall], trained: TrainedRoutes) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros_like(trained.used)
    recorded = np.zeros(len(rows), bool)
    done = 0
    for call in attempt:
        returned = call.routes_from + len(call.rows)
        # The last sampled token was not fed; a call that sampled nothing fed what it returned rows for.
        fed = len(call.prompt_ids) + len(call.token_ids) - 1 if len(call.token_ids) else returned
        fed = min(fed, _shared(call, trained.token_ids))
        first, stop = max(done, call.routes_from), min(fed, returned)
        if stop > first:
            if call.rows.shape[1:] != rows.shape[1:]:
                raise RouteFileError(
                    f"the engine's rows for {trained.sample_id} have shape {call.rows.shape[1:]}, the learner's "
                    f"{rows.shape[1:]} (layers, experts a token): they are of different models"
                )
            rows[first:stop] = call.rows[first - call.routes_from : stop - call.routes_from]
            recorded[first:stop] = True
        done = max(done, fed)
    return rows, recorded


def same_experts(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """bool `[...]` for two `[..., K]`: the same experts, in any order."""
    return (np.sort(one, axis=-1) == np.sort(other, axis=-1)).all(axis=-1)


def compare_routes(trained: TrainedRoutes, calls: Sequence[EngineCall]) -> Comparison:
    """Compare what was used in training with what the engine chose, for every position and every MoE layer."""
    found = engine_rows(trained, calls)
    if found is None:
        return Comparison(samples=1, unmatched=[trained.sample_id])
    rows, recorded = found
    expected = np.where(recorded[:, None, None], rows, trained.own)
    same = same_experts(expected, trained.used)
    result = Comparison(
        samples=1,
        equal=int(same[recorded].sum()),
        different=int((~same).sum()),
        unrecorded=int(same[~recorded].sum()),
    )
    if result.different:
        at, layer = (int(i) for i in np.argwhere(~same)[0])
        chosen, used = expected[at, layer].tolist(), trained.used[at, layer].tolist()
        result.first = Difference(trained.step, trained.sample_id, at, layer, bool(recorded[at]), chosen, used)
    return result


def verify_routes(index: RouteIndex) -> Comparison:
    """Compare all samples that the run kept, one at a time. Raises `RouteFileError` for a damaged record."""
    total = Comparison()
    for entry in index.trained:
        trained = load(entry, TrainedRoutes)
        total.add(compare_routes(trained, index.calls_of(trained.trajectory_id)))
    return total
