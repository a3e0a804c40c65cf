"""Verification that training used the engine's routes, from two independent records.

Nothing here depends on the code that carried the routes. The engine's record alone determines which
call owns which position; the rows that this call returned are compared with the experts that the
learner's routers used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from r3async.data.tokens import UNSAMPLED_VERSION
from r3async.record.routes import (
    EngineCall,
    RouteFileError,
    RouteIndex,
    TrainedRoutes,
    load_route_record,
)


class RouteDifference(msgspec.Struct, frozen=True):
    """A token that a router of the learner sent to other experts than expected.

    Attributes:
        recorded: False if the engine returned no row for the position.
        expected: The engine's experts; if `recorded` is False, the router's own choice, which
            training has to use then.
        used: Experts that training used.
    """

    step: int
    sample_id: str
    position: int
    layer: int
    recorded: bool
    expected: list[int]
    used: list[int]

    def to_text(self) -> str:
        whose = (
            "the engine chose"
            if self.recorded
            else "the engine recorded nothing; the router itself chose"
        )
        return (
            f"step {self.step}, sample {self.sample_id}, position {self.position}, MoE layer "
            f"{self.layer}: {whose} {self.expected}, training used {self.used}"
        )


class RouteComparison(msgspec.Struct):
    """The result of comparing the learner's routes with the engine's. Counts are rows: one position
    in one MoE layer.

    Attributes:
        unrecorded: Rows of positions for which the engine returned no row in the call that first
            fed them (the last token, an aborted call); there the router's own choice is correct.
    """

    samples: int = 0
    equal: int = 0
    different: int = 0
    unrecorded: int = 0
    unmatched: list[str] = []
    """Ids of samples that no attempt in the engine's record sampled."""
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


def find_engine_routes(
    trained: TrainedRoutes, calls: Sequence[EngineCall]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Find the engine's routes for a trained sample.

    A failed episode is retried under the same ids; the trained attempt is the last one that sampled
    exactly these tokens with exactly these log-probs. A position belongs to the first call *of this
    sample* that fed it; rows that other calls returned for it do not count. Only rows that the
    sample's first call did not request come from an earlier call, one that fed the same tokens
    under the same weights.

    Args:
        trained: The sample.
        calls: Engine calls of the sample's trajectory, in order of time.

    Returns:
        The engine's experts `[T, L, K]` and a bool mask `[T]` of the positions that have them; None
        if no attempt sampled these tokens.
    """
    for attempt in reversed(list(_split_attempts(calls))):
        if _is_source_attempt(attempt, trained):
            return _assign_rows(attempt, trained)
    return None


def _split_attempts(calls: Sequence[EngineCall]) -> Iterator[list[EngineCall]]:
    # Calls are numbered in the order of their requests and written in the order of their
    # answers. Concurrent calls of an agent may overtake each other, but a number is reused only
    # by another attempt.
    attempt: list[EngineCall] = []
    for call in calls:
        if any(call.turn == earlier.turn for earlier in attempt):
            yield attempt
            attempt = []
        attempt.append(call)
    if attempt:
        yield attempt


def _common_prefix_length(call: EngineCall, tokens: np.ndarray) -> int:
    """Return the number of tokens that the call has in common with the beginning of `tokens`."""
    mine = np.concatenate([call.prompt_ids, call.token_ids])
    n = min(len(mine), len(tokens))
    unlike = mine[:n] != tokens[:n]
    return int(unlike.argmax()) if unlike.any() else n


def _is_source_call(call: EngineCall, trained: TrainedRoutes) -> bool:
    """Return True if this call sampled tokens of the sample, even if the algorithm left them
    out of its loss."""
    rows = slice(len(call.prompt_ids), len(call.prompt_ids) + len(call.token_ids))
    if not len(call.token_ids) or _common_prefix_length(call, trained.token_ids) != rows.stop:
        return False
    # Compare bits, so that NaN equals NaN.
    same = call.logprobs.view(np.int32) == trained.rollout_logprobs[rows].view(np.int32)
    return bool((same & _make_sampled_mask(trained)[rows]).all())


def _is_source_attempt(attempt: Sequence[EngineCall], trained: TrainedRoutes) -> bool:
    found = np.zeros(len(trained.token_ids), bool)
    wanted = _make_sampled_mask(trained)
    for call in attempt:
        if _is_source_call(call, trained):
            found[len(call.prompt_ids) : len(call.prompt_ids) + len(call.token_ids)] = True
    return bool(wanted.any() and found[wanted].all())


def _make_sampled_mask(trained: TrainedRoutes) -> np.ndarray:
    """Return the mask of sampled tokens, bool `[T]`.

    The loss mask may have fewer tokens: an algorithm removes groups with zero variance and
    truncated episodes from it.
    """
    return trained.policy_version > UNSAMPLED_VERSION


def _assign_rows(
    attempt: Sequence[EngineCall], trained: TrainedRoutes
) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros_like(trained.used)
    recorded = np.zeros(len(rows), bool)
    own = [index for index, call in enumerate(attempt) if _is_source_call(call, trained)]
    first = attempt[own[0]]
    for call in attempt[: own[0]]:
        if _find_first_version(call) == _find_first_version(first):
            part, returned = _select_returned_rows(
                call, trained, 0, min(first.routes_from, _count_first_version_tokens(call))
            )
            # Two calls of the same weights may have fed the same tokens in different batches:
            # either row is correct.
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
    """Return the version of the weights and prefix cache that the call started with; None if it
    sampled nothing."""
    versions = call.policy_version
    return int(versions[0]) if len(versions) else None


def _count_first_version_tokens(call: EngineCall) -> int:
    """Return the number of positions that the call fed before newer weights arrived, or all
    if none arrived."""
    versions = call.policy_version
    fed = len(call.prompt_ids) + len(call.token_ids) - 1
    if (versions == versions[:1]).all():
        return fed
    return len(call.prompt_ids) + int((versions != versions[0]).argmax()) - 1


def _select_returned_rows(
    call: EngineCall, trained: TrainedRoutes, start: int, stop: int
) -> tuple[slice, np.ndarray]:
    """Return the slice of the sample's positions in `start..stop` that the call has rows
    for, and those rows.

    Raises `RouteFileError` if the shape of the call's rows differs from the learner's.
    """
    first = max(start, call.routes_from)
    stop = min(
        stop, call.routes_from + len(call.rows), _common_prefix_length(call, trained.token_ids)
    )
    if stop <= first:
        return slice(0, 0), trained.used[:0]
    if call.rows.shape[1:] != trained.used.shape[1:]:
        raise RouteFileError(
            f"the engine's rows for {trained.sample_id} have shape {call.rows.shape[1:]}, the "
            f"learner's {trained.used.shape[1:]} (layers, experts a token): they are of "
            "different models"
        )
    return slice(first, stop), call.rows[first - call.routes_from : stop - call.routes_from]


def same_experts(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return, for two arrays `[..., K]`, where they have the same experts in any
    order; bool `[...]`."""
    return (np.sort(one, axis=-1) == np.sort(other, axis=-1)).all(axis=-1)


def compare_routes(trained: TrainedRoutes, calls: Sequence[EngineCall]) -> RouteComparison:
    """Compare the experts used in training with those the engine chose, for every
    position and MoE layer."""
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
        chosen = expected[at, layer].tolist()
        used = trained.used[at, layer].tolist()
        result.first = RouteDifference(
            trained.step, trained.sample_id, at, layer, bool(recorded[at]), chosen, used
        )
    return result


def verify_routes(index: RouteIndex) -> RouteComparison:
    """Compare all samples whose routes the run kept, one at a time. Raises `RouteFileError` for
    a damaged record."""
    total = RouteComparison()
    for entry in index.trained_entries:
        trained = load_route_record(entry, TrainedRoutes, files=index.files)
        total.add(compare_routes(trained, index.load_calls(trained.trajectory_id)))
    return total
