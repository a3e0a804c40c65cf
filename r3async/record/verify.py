"""Verifies that the routes used in training are the engine's own, from two records that were made apart.

Nothing here asks the code that carried the routes. From the engine's record alone it is worked out again which call owns
which position, and what that call returned is compared with what the learner's routers used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from r3async.data.records import UNSAMPLED_VERSION
from r3async.record.routes import EngineCall, RouteFileError, RouteIndex, TrainedRoutes, load_route_record


class RouteDifference(msgspec.Struct, frozen=True):
    """A token that a router sent elsewhere. `expected`: the engine's experts; if the engine returned none for that
    position (`recorded` is False), the learner's own, which it then has to use."""

    step: int
    sample_id: str
    position: int
    layer: int
    recorded: bool
    expected: list[int]
    used: list[int]

    def to_text(self) -> str:
        whose = "the engine chose" if self.recorded else "the engine recorded nothing; the router itself chose"
        return (
            f"step {self.step}, sample {self.sample_id}, position {self.position}, MoE layer {self.layer}: "
            f"{whose} {self.expected}, training used {self.used}"
        )


class RouteComparison(msgspec.Struct):
    """Counts are of rows: one position in one MoE layer. `unrecorded`: positions of which the engine returned no row in the
    call that first fed them (the last token, an aborted call); there the router's own choice is right."""

    samples: int = 0
    equal: int = 0
    different: int = 0
    unrecorded: int = 0
    unmatched: list[str] = []
    """Samples that no attempt in the engine's record sampled."""
    first: RouteDifference | None = None

    @property
    def is_verified(self) -> bool:
        return self.equal > 0 and not self.different and not self.unmatched

    def add(self, other: RouteComparison) -> None:
        self.samples += other.samples
        self.equal += other.equal
        self.different += other.different
        self.unrecorded += other.unrecorded
        self.unmatched = [*self.unmatched, *other.unmatched]
        self.first = self.first or other.first


def find_engine_routes(trained: TrainedRoutes, calls: Sequence[EngineCall]) -> tuple[np.ndarray, np.ndarray] | None:
    """`[T, L, K]` experts of the engine and bool `[T]`, where there are any; None if no attempt sampled these tokens.

    `calls`: of the sample's trajectory, in order of time. An episode that failed was tried again under the same ids; the
    attempt that was trained is the last one that sampled exactly these tokens with exactly these log-probs. A position belongs
    to the first call *of this sample* that fed it; what other calls returned for it does not count. Only what the sample's first
    call was not asked for comes from an earlier call: one that fed the same tokens under the same weights.
    """
    for attempt in reversed(list(_split_attempts(calls))):
        if _is_source_attempt(attempt, trained):
            return _assign_rows(attempt, trained)
    return None


def _split_attempts(calls: Sequence[EngineCall]) -> Iterator[list[EngineCall]]:
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


def _common_prefix_length(call: EngineCall, tokens: np.ndarray) -> int:
    """How many tokens the call has in common with the beginning of `tokens`."""
    mine = np.concatenate([call.prompt_ids, call.token_ids])
    n = min(len(mine), len(tokens))
    unlike = mine[:n] != tokens[:n]
    return int(unlike.argmax()) if unlike.any() else n


def _is_source_call(call: EngineCall, trained: TrainedRoutes) -> bool:
    """Whether this call sampled tokens of the sample; an algorithm may have left them out of its loss."""
    rows = slice(len(call.prompt_ids), len(call.prompt_ids) + len(call.token_ids))
    if not len(call.token_ids) or _common_prefix_length(call, trained.token_ids) != rows.stop:
        return False
    # By their bits: a NaN is itself.
    same = call.logprobs.view(np.int32) == trained.rollout_logprobs[rows].view(np.int32)
    return bool((same & _make_sampled_mask(trained)[rows]).all())


def _is_source_attempt(attempt: Sequence[EngineCall], trained: TrainedRoutes) -> bool:
    found, wanted = np.zeros(len(trained.token_ids), bool), _make_sampled_mask(trained)
    for call in attempt:
        if _is_source_call(call, trained):
            found[len(call.prompt_ids) : len(call.prompt_ids) + len(call.token_ids)] = True
    return bool(wanted.any() and found[wanted].all())


def _make_sampled_mask(trained: TrainedRoutes) -> np.ndarray:
    """bool `[T]`. The loss mask says less: an algorithm takes out groups without contrast, and episodes that were cut."""
    return trained.policy_version > UNSAMPLED_VERSION


def _assign_rows(attempt: Sequence[EngineCall], trained: TrainedRoutes) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros_like(trained.used)
    recorded = np.zeros(len(rows), bool)
    own = [index for index, call in enumerate(attempt) if _is_source_call(call, trained)]
    first = attempt[own[0]]
    for call in attempt[: own[0]]:
        if _find_first_version(call) == _find_first_version(first):
            part, returned = _select_returned_rows(
                call, trained, 0, min(first.routes_from, _count_first_version_tokens(call))
            )
            # Two calls of the same weights may have fed the same tokens, in other batches: a row of either will do.
            new = ~recorded[part] | same_experts(returned, trained.used[part]).all(axis=-1)
            rows[part][new] = returned[new]
            recorded[part] = True
    done = 0
    for index in own:
        call = attempt[index]
        fed = len(call.prompt_ids) + len(call.token_ids) - 1  # the last sampled token was not fed
        part, returned = _select_returned_rows(call, trained, done, fed)
        rows[part] = returned
        recorded[part] = True
        done = fed
    return rows, recorded


def _find_first_version(call: EngineCall) -> int | None:
    """The version whose weights, and whose prefix cache, the call began with."""
    versions = call.policy_version
    return int(versions[0]) if len(versions) else None


def _count_first_version_tokens(call: EngineCall) -> int:
    """Positions that the call fed before newer weights came, if they did."""
    versions, fed = call.policy_version, len(call.prompt_ids) + len(call.token_ids) - 1
    if (versions == versions[:1]).all():
        return fed
    return len(call.prompt_ids) + int((versions != versions[0]).argmax()) - 1


def _select_returned_rows(call: EngineCall, trained: TrainedRoutes, start: int, stop: int) -> tuple[slice, np.ndarray]:
    """Those of the sample's positions `start..stop` that the call has rows for, and these. Raises `RouteFileError`."""
    first = max(start, call.routes_from)
    stop = min(stop, call.routes_from + len(call.rows), _common_prefix_length(call, trained.token_ids))
    if stop <= first:
        return slice(0, 0), trained.used[:0]
    if call.rows.shape[1:] != trained.used.shape[1:]:
        raise RouteFileError(
            f"the engine's rows for {trained.sample_id} have shape {call.rows.shape[1:]}, the learner's "
            f"{trained.used.shape[1:]} (layers, experts a token): they are of different models"
        )
    return slice(first, stop), call.rows[first - call.routes_from : stop - call.routes_from]


def same_experts(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """bool `[...]` for two `[..., K]`: the same experts, in any order."""
    return (np.sort(one, axis=-1) == np.sort(other, axis=-1)).all(axis=-1)


def compare_routes(trained: TrainedRoutes, calls: Sequence[EngineCall]) -> RouteComparison:
    """Compare what was used in training with what the engine chose, for every position and every MoE layer."""
    found = find_engine_routes(trained, calls)
    if found is None:
        return RouteComparison(samples=1, unmatched=[trained.sample_id])
    rows, recorded = found
    expected = np.where(recorded[:, None, None], rows, trained.own)
    same = same_experts(expected, trained.used)
    result = RouteComparison(
        samples=1,
        equal=int(same[recorded].sum()),
        different=int((~same).sum()),
        unrecorded=int(same[~recorded].sum()),
    )
    if result.different:
        at, layer = (int(i) for i in np.argwhere(~same)[0])
        chosen, used = expected[at, layer].tolist(), trained.used[at, layer].tolist()
        result.first = RouteDifference(trained.step, trained.sample_id, at, layer, bool(recorded[at]), chosen, used)
    return result


def verify_routes(index: RouteIndex) -> RouteComparison:
    """Compare all samples that the run kept, one at a time. Raises `RouteFileError` for a damaged record."""
    total = RouteComparison()
    for entry in index.trained_entries:
        trained = load_route_record(entry, TrainedRoutes)
        total.add(compare_routes(trained, index.load_calls(trained.trajectory_id)))
    return total
