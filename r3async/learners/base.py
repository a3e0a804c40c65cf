"""What the learner actor asks of a training backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from r3async.batching.packing import MicroBatch

if TYPE_CHECKING:
    import torch

    from r3async.checkpoint.tensors import LearnerParts, LearnerState


class LearnerError(RuntimeError):
    """The backend can not train this model or this batch; the message says why, and which setting to change."""


class RouteTrace(msgspec.Struct, frozen=True):
    """What one rank's routers did with its tokens of one micro-batch, as they did it.

    The micro-batch is `sample_ids` laid end to end, sample `s` in rows `cu_seqlens[s]:cu_seqlens[s + 1]` (int32 `[S + 1]`).
    Of its rows this rank has `first .. first + n` and of its MoE layers `columns` (0-based). `own` uint16 `[n, R, K]`: the
    experts that each router would have chosen, in the order of their scores; `used`: those that it sent the token to.
    `logprobs` float32 `[N]`, of all `N = cu_seqlens[-1]` rows, from a rank that computed the loss: the learner's of each
    trained token, before the step, at its sample's temperature; NaN for the others.
    """

    sample_ids: tuple[str, ...]
    cu_seqlens: np.ndarray
    first: int
    columns: list[int]
    own: np.ndarray
    used: np.ndarray
    logprobs: np.ndarray | None = None


class StepResult(msgspec.Struct, frozen=True):
    """What one optimizer step did, over all ranks.

    `metrics`: see `LearnerBackend.train_step`. By MoE layer of the whole model: `layer_agreement` float32 `[L]`, the share of
    recorded tokens whose own top-k set is the recorded one (0 if none is recorded); `expert_load` int64 `[L, experts]`,
    tokens sent to each expert, padding not counted. `traces`: of this rank, if they were asked for.
    """

    metrics: dict[str, float]
    layer_agreement: np.ndarray
    expert_load: np.ndarray
    traces: list[RouteTrace] = []


class LearnerBackend(Protocol):
    """A model and its optimizer, or this process's part of them.

    Where there are several ranks (`learner.parallel`), every call is collective: all ranks have to make it, in the same
    order. Ranks that share a data-parallel index are given the same micro-batches; data-parallel ranks are given the same
    *number* of them (`batching.packing.padding_like` makes up for what is missing).

    Every call must come from the thread that built the backend. It need not be the main thread, but it has to be one:
    grad mode and the number of OpenMP threads are per thread in torch.
    """

    @property
    def version(self) -> int:
        """Optimizer steps taken. A step that was skipped does not count."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are `0..vocab_size - 1`."""
        ...

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
    ) -> StepResult:
        """One optimizer step over all micro-batches, which need the column `advantages`.

        `version`: of the weights, from which tokens' ages count; by default, the steps taken. A token is trained if its
        `loss_mask` is set and its rollout log-prob is finite (others are counted and left out). If no trained token has an
        advantage, with a gradient that is not finite, or with drift beyond `algorithm.rollout_kl.max`, weights, moments and
        `version` stay as they are and `optimizer/skipped` is 1. Without an advantage the trust region stays, too. Raises
        `LearnerError`, before any forward pass, if less than `routing.min_recorded_fraction` of the routes needed are there. With
        `trace` the result tells what every router did.

        Metrics (means are over trained tokens, log-probs in nats):

        * `loss/policy`, `loss/rollout_kl`, `loss/reference_kl`, `loss/entropy`, `loss/router_aux`: the terms,
          which add up to the loss.
        * `rollout_kl/k1`, `/k2`, `/k3`: KL(rollout || learner), unweighted (see `algorithms.kl`).
        * `ratio/max`, `ratio/ess`: pi / mu uncapped: its maximum, and the effective share of the sample, 0-1.
        * `entropy/mean`: of the learner's distribution at the sample's temperature.
        * `routing/recorded_fraction`: share of trained tokens whose input position has recorded routes;
          `routing/recorded_fraction_fed`: share of all tokens fed forward that have.
        * `routing/agreement`: share of (recorded position, MoE layer) whose own top-k set is the recorded one, also with
          replay off; 0 if nothing is recorded. `routing/agreement_min`: of the layer where it is lowest.
        * `routing/load_imbalance`: tokens of the busiest expert over the layer's mean, in the worst layer.
        * `grad_norm` before clipping, `lr` used, `optimizer/updates` 1 or 0, `optimizer/skipped` 0 or 1;
          `optimizer/no_contrast` 1 if it was skipped because no trained token has an advantage, `optimizer/broken` because
          the drift was beyond `algorithm.rollout_kl.max`. `rollout_kl/coef`: of the trust region in this step.
        * `tokens/dropped_non_finite`, `batch/tokens`, `batch/trained_tokens`, `batch/micro_batches`: counts.
        * `batch/split_episodes`: with a loss that takes whole episodes, how many are in several micro-batches. If any, the
          minibatch is fed forward once more, first.
        * `batch/fill`: tokens as a share of the micro-batches' token budget.
        """
        ...

    def logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        replay: bool = True,
        reference: bool = False,
        trained: bool = False,
    ) -> list[np.ndarray]:
        """A forward-only pass: for each micro-batch float32 `[N]`, the log-prob of every token at its sample's temperature.

        0 for the first token of a sample, and for padding. With `replay` recorded routes are used as `routing.replay` says;
        without, the learner routes by itself. With `reference` the weights are those that the learner began with
        (`algorithm.reference_kl.coef` must not be 0). With `trained` only tokens in `loss_mask` have theirs, and the others 0:
        logits of the others are not made. Every rank returns those of its own micro-batches.
        """
        ...

    def record_routes(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with the routes that the learner itself chooses now, in a forward-only pass (R2 of arXiv
        2510.11370's comparison, `routing.replay = learner`)."""
        ...

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """float32 `[T - 1]`: log-prob of each token after the first of int `[T]`, with own routing."""
        ...

    def state(self) -> LearnerState:
        """A copy, in host memory, of everything of this rank that later steps depend on: float32 weights, Adam's moments and
        step counts, the trust region's controller, random number generators. For `checkpoint.tensors.write_part`.

        Not collective, but all ranks have to take theirs between the same two steps. What several ranks hold, one hands in.
        The reference model is not in it: it is the start path's.
        """
        ...

    def restore(self, saved: LearnerParts, *, optimizer: bool = True) -> None:
        """Go on from a state that any number of ranks wrote, bit by bit. Not collective; every rank has to make the call.

        The learner must have been built from the path that the run began with. With another number of ranks than wrote it,
        random number generators stay as they are. Without `optimizer` only the weights are read, for `save`. Raises
        `CheckpointError` if it is of another model or backend, or if something lacks; then the learner is not to be used.
        """
        ...

    def export(self) -> dict[str, torch.Tensor]:
        """A snapshot of all weights under their Hugging Face checkpoint names, contiguous, in the compute dtype.

        Later steps do not change it.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write `export()` as a Hugging Face model directory with the source model's configuration and tokenizer.

        It is written aside and renamed: `directory` is complete or not there. One that exists is replaced.
        """
        ...

    def close(self) -> None:
        """Release the process group, if this backend made it."""
        ...
