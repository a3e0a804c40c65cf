"""Facts that a trajectory states about itself, and the check that they can be true. With the
scripted engine, every log-prob and route follows from the weights that sampled the token."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dev.simulation.history import RolloutFacts
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import Sample, Trajectory
from r3async.rollout.scripted import scripted_gates, scripted_logprobs, scripted_route_rows

WeightsKeys = Mapping[tuple[int, int], int]
"""Keys that identify weights (the checksum of their digest), by lineage and version."""


def facts_of(
    trajectory: Trajectory, keys: WeightsKeys, routing: RoutingShape | None, nbytes: int = 0
) -> RolloutFacts:
    """Return the facts about a trajectory. `keys` are those of all published weights."""
    t = trajectory
    version_set: set[int] = set()
    wrong = ""
    content = 0
    for sample in t.samples:
        mask = sample.table["loss_mask"]
        version_set.update(sample.table["policy_version"][mask].tolist())
        wrong = wrong or _find_mismatch(sample, mask, t.lineage, keys, routing)
        for name in sorted(sample.table):
            content = zlib.crc32(np.ascontiguousarray(sample.table[name]).data, content)
    versions = tuple(sorted(version_set))
    reward = t.reward if t.turns else None
    return RolloutFacts(
        t.trajectory_id,
        t.group_index,
        t.episode_index,
        t.lineage,
        versions,
        content,
        nbytes,
        wrong,
        t.task_seed,
        reward,
    )


def _find_mismatch(
    sample: Sample, mask: np.ndarray, lineage: int, keys: WeightsKeys, routing: RoutingShape | None
) -> str:
    """Return why the tokens cannot come from the weights that they name; "" if they can."""
    table = sample.table
    at = np.flatnonzero(mask)
    if not len(at):
        return ""
    versions = table["policy_version"][at]
    tokens = table["token_ids"]
    token_keys = [keys.get((lineage, version)) for version in versions.tolist()]
    if None in token_keys:
        lacking = {
            version
            for version, key in zip(versions.tolist(), token_keys, strict=True)
            if key is None
        }
        return (
            f"{sample.sample_id} is of versions {sorted(lacking)} of lineage {lineage}, which "
            "were not published"
        )
    expected = scripted_logprobs(at, np.asarray(token_keys, np.uint64), tokens[at])
    odd = np.flatnonzero(table["rollout_logprobs"][at] != expected)
    if len(odd):
        place = int(at[odd[0]])
        version = int(versions[odd[0]])
        return (
            f"token {place} of {sample.sample_id} has not the log-prob of version {version} of "
            f"lineage {lineage}"
        )
    return _find_route_mismatch(sample, at, versions, routing) if routing is not None else ""


def _find_route_mismatch(
    sample: Sample, at: np.ndarray, versions: np.ndarray, routing: RoutingShape
) -> str:
    """Return why the routes are wrong; "" if they are right. The weights that sampled a token also
    processed, and routed, the token before it."""
    table: Any = sample.table
    fed = at - 1
    recorded = table["routing_recorded"][fed]
    rows = scripted_route_rows(fed, versions, table["token_ids"][fed], routing)
    if not (table["routed_experts"][fed] == rows)[recorded].all():
        return f"{sample.sample_id} has routes of another token, or of other weights"
    if "routed_weights" in table:
        gates = table["routed_weights"][fed]
        if not (gates == scripted_gates(rows))[recorded].all():
            return f"{sample.sample_id} has gates of another token, or of other weights"
    return ""
