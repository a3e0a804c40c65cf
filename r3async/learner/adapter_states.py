"""The adapters of several clients on one model: those of one client are in it at a time.

A client has values, moments and gradients of its own, 16 bytes for each value of an adapter of
`learner.lora.rank`; the base weights are there once. Another client's turn copies its adapters into
the model.
"""

from __future__ import annotations

from collections.abc import Collection

from r3async.learner.lora import LoraAdapters
from r3async.learner.optimizer import MasterAdamW, OptimizerState


class AdapterStates:
    """The clients' adapters, by name, on this rank. All ranks have to make each call."""

    def __init__(self, adapters: LoraAdapters, optimizer: MasterAdamW):
        self._adapters = adapters
        self._optimizer = optimizer
        self._ranks: dict[str, int] = {}
        self._waiting: dict[str, OptimizerState] = {}
        self._current: str | None = None

    def create(self, name: str, rank: int, seed: int, untrained: Collection[str] = ()) -> None:
        """Begin with a client's adapters, and put them into the model; see
        `LoraAdapters.begin_anew`."""
        self._put_aside()
        self._adapters.begin_anew(rank, seed, untrained)
        self._ranks[name] = rank
        self._optimizer.put_state(self._optimizer.take_state())
        self._current = name

    def use(self, name: str) -> None:
        """Put a client's adapters into the model, with its moments and gradients. Raises `KeyError`
        for a name that is not known."""
        if name == self._current:
            return
        rank = self._ranks[name]
        self._put_aside()
        self._adapters.use_rank(rank)
        self._optimizer.put_state(self._waiting.pop(name))
        self._current = name

    def drop(self, name: str) -> None:
        """Forget a client, if it is known."""
        self._ranks.pop(name, None)
        self._waiting.pop(name, None)
        if name == self._current:
            self._optimizer.zero_grad()
            self._current = None

    def _put_aside(self) -> None:
        state = self._optimizer.take_state()
        if self._current is not None:
            self._waiting[self._current] = state
        self._current = None
