"""What a trajectory must satisfy before it may be trained on: checked on arrival, with the reason."""

from __future__ import annotations

import math

import numpy as np

from r3async.engines.base import RoutingShape
from r3async.records import Trajectory
from r3async.routing import RoutingError, validate_rows


class InvalidTrajectory(ValueError):
    """Well-formed on the wire, but not trainable."""


def validate_trajectory(
    trajectory: Trajectory, *, vocab_size: int, learner_version: int, max_tokens: int, routing: RoutingShape | None
) -> None:
    """Raise `InvalidTrajectory` naming the sample and what is wrong.

    Non-finite log-probs pass: the loss drops these tokens and counts them.
    """
    if not trajectory.samples:
        raise InvalidTrajectory(f"{trajectory.trajectory_id} holds no sample")
    if not all(math.isfinite(t.reward) for t in trajectory.turns):
        raise InvalidTrajectory(f"{trajectory.trajectory_id} has a reward that is not finite")
    for sample in trajectory.samples:
        table, name = sample.table, sample.sample_id
        if not len(table):
            raise InvalidTrajectory(f"sample {name} is empty")
        if len(table) > max_tokens:
            raise InvalidTrajectory(
                f"sample {name} has {len(table)} tokens, more than learner.max_tokens_per_micro_batch = {max_tokens}"
            )
        if not (math.isfinite(sample.temperature) and sample.temperature > 0):
            raise InvalidTrajectory(f"sample {name} has temperature {sample.temperature}")
        ids, mask, versions = table["token_ids"], table["loss_mask"], table["policy_version"]
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise InvalidTrajectory(f"sample {name} has a token id outside 0..{vocab_size - 1}")
        if not np.isfinite(table["rewards"]).all():
            raise InvalidTrajectory(f"sample {name} has a reward that is not finite")
        if mask[0]:
            raise InvalidTrajectory(f"sample {name} trains its first token, which nothing predicts")
        sampled = versions[mask]
        if len(sampled) and (int(sampled.min()) < 0 or int(sampled.max()) > learner_version):
            raise InvalidTrajectory(
                f"sample {name} has versions {int(sampled.min())}..{int(sampled.max())}, the learner is at {learner_version}"
            )
        if routing is not None:
            if "routed_experts" not in table or "routing_recorded" not in table:
                raise InvalidTrajectory(f"sample {name} has no routes, but the model is a mixture of experts")
            recorded = table["routed_experts"][table["routing_recorded"]]
            try:
                validate_rows(recorded, layers=routing.layers, top_k=routing.top_k, num_experts=routing.num_experts)
            except RoutingError as error:
                raise InvalidTrajectory(f"sample {name}: {error}") from error
