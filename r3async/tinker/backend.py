"""What the server asks of training and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from r3async.tinker.kept_sequences import RoutedDatum
from r3async.tinker.protocol import (
    AdamParams,
    LoraConfig,
    SampledSequence,
    SamplingParams,
    TopLogprobs,
    TrainResult,
)
from r3async.tinker.sessions import Snapshot


@dataclass(frozen=True)
class ServedModel:
    """The base model.

    Attributes:
        name: The name by which clients ask for it.
        tokenizer: The absolute path, or the hub's name, of its tokenizer.
        max_tokens: Longest sequence, the last target included.
    """

    name: str
    tokenizer: str
    vocab_size: int
    max_tokens: int


class LossBatch(NamedTuple):
    """The data of a training request, which `losses.py` has checked.

    `loss_settings` are those of `losses.check_loss`, and `version` that of the model.
    """

    loss_fn: str
    loss_settings: dict[str, float]
    data: list[RoutedDatum]
    version: int


class StateLostError(RuntimeError):
    """The backend does not have this model, or this snapshot: a process that had it has ended, or
    nothing has begun it since the start. The caller restores it, and calls again."""


class TinkerBackend(Protocol):
    """Training and sampling of models on one base.

    Calls for one model come one at a time, those for several models at once. Each may raise:

    * `ApiError`, which is the answer; the model is as before.
    * `StateLostError`, also of a running call, when a learner or an engine has ended. The backend
      starts that again by itself, and calls wait for it. A model is then restored by
      `create_model`, `load_state` and the calls since; a snapshot by `open_snapshot`.
    * Any other error, which is taken for the server's. The model is restored before its next call,
      so what a failed call leaves of it does not matter.
    """

    served: ServedModel

    async def create_model(self, model_id: str, lora: LoraConfig | None) -> None:
        """Begin to train a new adapter on the base model, or with None all of its weights. A model
        that has this id already is forgotten."""
        ...

    async def close_model(self, model_id: str) -> None:
        """Forget a model. Its snapshots stay."""
        ...

    async def forward(self, model_id: str, batch: LossBatch) -> TrainResult:
        """Return log-probs and the loss, with replayed routes, without a gradient."""
        ...

    async def forward_backward(self, model_id: str, batch: LossBatch) -> TrainResult:
        """Return log-probs and the loss, and add its gradient to the model's."""
        ...

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Make the update of the gradients so far, and return its metrics."""
        ...

    async def save_state(self, model_id: str, directory: Path) -> None:
        """Write weights and optimizer into a new directory."""
        ...

    async def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Continue from what `save_state` wrote."""
        ...

    async def publish(self, snapshot: Snapshot, directory: Path) -> None:
        """Write the current weights of `snapshot.model_id`, for `open_snapshot`."""
        ...

    async def open_snapshot(self, snapshot: Snapshot, directory: Path) -> None:
        """Make the weights that `publish` wrote ones to sample from, also if they are already."""
        ...

    async def close_snapshot(self, snapshot: Snapshot) -> None: ...

    async def sample(
        self,
        snapshot: Snapshot,
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        num_samples: int,
        top_k: int,
    ) -> list[SampledSequence]:
        """Sample sequences after a prompt, int32 `[P]`, of the snapshot's weights, with `top_k`
        most likely tokens at each place."""
        ...

    async def compute_logprobs(
        self, snapshot: Snapshot, tokens: np.ndarray, *, top_k: int
    ) -> tuple[np.ndarray, TopLogprobs | None]:
        """Return the log-probs of tokens, float32 `[P]` with NaN for the first, and the `top_k`
        most likely ones at each place."""
        ...
