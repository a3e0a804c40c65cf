"""The scenario `kills`: processes of every role, one after the other, by `kill -9`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from r3async.tools.chaos.sabotage import Role, Saboteur

SHARES: dict[Role, int] = {"generator": 4, "environment": 4, "learner": 1, "conductor": 1}
"""Of the kills. Losing a learner or a conductor restarts the whole run, which takes ten times as long as the others."""
STEPS_PER_KILL = 2


def draw_roles(kills: int, rng: random.Random) -> list[Role]:
    """Who is killed, in order. Not drawn one by one: every role has its share, however few kills there are."""
    shares: list[Role] = [role for role, share in SHARES.items() for _ in range(share)]
    rng.shuffle(shares)
    roles = [shares[i % len(shares)] for i in range(kills)]
    rng.shuffle(roles)
    return roles


class Kills(Saboteur):
    """Each when `STEPS_PER_KILL` more steps were trained than at the one before, and up to a second later."""

    def sabotage(self) -> None:
        self.roles = self._drawn()
        for number, role in enumerate(self.roles):
            if not self.wait_for_step(1 + STEPS_PER_KILL * number) or not self.wait(self.rng.uniform(0, 1)):
                return
            if not self.kill(role):
                return

    def _drawn(self) -> Sequence[Role]:
        return self.roles or draw_roles(self.faults, self.rng)

    def problems(self) -> list[str]:
        spared = len(self.roles or range(self.faults)) - self.done.total()
        if not spared:
            return []
        return [f"{spared} processes were not killed: the run ended before; steps is too few"]
