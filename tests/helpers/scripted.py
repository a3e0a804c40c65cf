"""Expected answers of the scripted engine for one token."""

import numpy as np

from r3async.data.model_shape import RoutingShape
from r3async.rollout.scripted import scripted_hash, scripted_route_rows


def scripted_logprob(position: int, version: int, token: int) -> float:
    """Return the log-prob of `token` sampled at `position` (in prompt and answer together) by `version`."""
    return -0.01 - 3.98 * scripted_hash(position, version, token) / 2**32


def scripted_routes(position: int, version: int, token: int, shape: RoutingShape) -> list[list[int]]:
    """Return the distinct experts, `[layers][top_k]`, of `token` fed at `position` under `version`."""
    at, by, fed = (np.asarray([number]) for number in (position, version, token))
    return scripted_route_rows(at, by, fed, shape)[0].tolist()
