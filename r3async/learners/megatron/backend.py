"""`MegatronLearner`: Qwen3-MoE on megatron-core with rollout routing replay, on one CPU or one CUDA device."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from r3async.algorithms.objective import EMPTY_METRICS, ObjectiveSums, objective
from r3async.batching.packing import MicroBatch
from r3async.config import Config
from r3async.learners.base import LearnerError
from r3async.learners.megatron import cpu
from r3async.learners.megatron.hf import (
    Checkpoint,
    export_weights,
    load_weights,
    read_shape,
    transformer_config,
)
from r3async.learners.megatron.logprobs import token_logprobs
from r3async.learners.megatron.modules import build_model, make_plan
from r3async.learners.megatron.replay import RoutingReplay
from r3async.learners.optimizer import MasterAdamW


@dataclass(frozen=True)
class TrainedTokens:
    """Which rows of one micro-batch are trained. `rows` int64 `[M]`: trained tokens; the logits of row `t` - 1 predict row
    `t`. `dropped`: tokens to be trained whose rollout log-prob is not finite. `recorded`: trained tokens whose input, row
    `t` - 1, has recorded routes."""

    rows: np.ndarray
    dropped: int
    recorded: int


def trained_tokens(micro_batch: MicroBatch) -> TrainedTokens:
    """Raises `LearnerError` if the first token of a sample, which nothing predicts, is to be trained."""
    table = micro_batch.table
    wanted = table["loss_mask"]
    starts = micro_batch.cu_seqlens[:-1]
    if wanted[starts].any():
        sample = micro_batch.sample_ids[int(np.flatnonzero(wanted[starts])[0])]
        raise LearnerError(f"sample {sample}: its first token is to be trained, but nothing predicts a first token")
    finite = np.isfinite(table["rollout_logprobs"])
    rows = np.flatnonzero(wanted & finite)
    recorded = int(np.count_nonzero(table["routing_recorded"][rows - 1])) if "routing_recorded" in table else 0
    return TrainedTokens(rows, int(np.count_nonzero(wanted & ~finite)), recorded)


class MegatronLearner:
    """A `LearnerBackend`. See there for what the methods promise.

    One process and one device now. The layers are Megatron's, found by global layer number; where more ranks would have
    to exchange something, that is `transformer_config` and `links` in `hf.py`, and the step below.
    """

    def __init__(self, config: Config, model_path: Path):
        cpu.prepare()
        self._config, self._source = config, Path(model_path)
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        if self._device.type == "cpu":
            torch.set_num_threads(config.learner.threads)
        self._dtype = getattr(torch, config.learner.dtype)
        self._shape = read_shape(self._source)
        self._owns_process_group = _start_process_group(self._device)
        self.model = build_model(
            transformer_config(self._shape, self._dtype),
            moe_pattern=self._shape.moe_pattern,
            vocab_size=self._shape.vocab_size,
            max_positions=self._shape.max_positions,
            tied=self._shape.tied,
        ).to(self._device)
        load_weights(self.model, self._shape, Checkpoint(self._source))
        self.replay = RoutingReplay(
            self.model,
            moe_layers=self._shape.moe_layers,
            top_k=self._shape.top_k,
            num_experts=self._shape.experts,
            replay=config.routing.replay == "rollout",
        )
        self._optimizer = MasterAdamW(self.model.parameters(), config.learner)

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.steps

    @property
    def vocab_size(self) -> int:
        """Token ids are `0..vocab_size - 1`."""
        return self._shape.vocab_size

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """One optimizer step; see `LearnerBackend.train_step`."""
        chosen = [trained_tokens(m) for m in micro_batches]
        trained = sum(len(c.rows) for c in chosen)
        recorded_fraction = sum(c.recorded for c in chosen) / max(trained, 1)
        self._refuse_unusable(micro_batches, trained, recorded_fraction)
        tokens = sum(m.tokens for m in micro_batches)
        budget = max(len(micro_batches), 1) * self._config.learner.max_tokens_per_micro_batch
        metrics = {
            "routing/recorded_fraction": recorded_fraction,
            "routing/agreement": 0.0,
            "grad_norm": 0.0,
            "lr": self._optimizer.lr,
            "optimizer/skipped": 1.0,
            "tokens/dropped_non_finite": float(sum(c.dropped for c in chosen)),
            "batch/tokens": float(tokens),
            "batch/trained_tokens": float(trained),
            "batch/micro_batches": float(len(micro_batches)),
            "batch/fill": tokens / budget,
        }
        if not trained:
            return EMPTY_METRICS | metrics

        sums: ObjectiveSums | None = None
        agreed = compared = 0
        try:
            for micro_batch, tokens_of in zip(micro_batches, chosen, strict=True):
                if not len(tokens_of.rows):
                    continue
                with self.replay.bound(micro_batch) as agreement:
                    loss, part = self._loss(micro_batch, tokens_of.rows, denominator=trained)
                    loss.backward()
                self._optimizer.accumulate()
                sums = part if sums is None else sums + part
                agreed, compared = agreed + agreement.agreed, compared + agreement.compared
        except BaseException:
            self._optimizer.clear()
            raise
        report = self._optimizer.step()
        assert sums is not None
        return (
            metrics
            | sums.metrics()
            | {
                "routing/agreement": agreed / compared if compared else 0.0,
                "grad_norm": report.grad_norm,
                "lr": report.lr,
                "optimizer/skipped": float(report.skipped),
            }
        )

    def _refuse_unusable(self, micro_batches: Sequence[MicroBatch], trained: int, recorded_fraction: float) -> None:
        for micro_batch in micro_batches:
            if "advantages" not in micro_batch.table:
                raise LearnerError(f"sample {micro_batch.sample_ids[0]}: column 'advantages' is missing")
        floor = self._config.routing.min_recorded_fraction
        if trained and self.replay.replay and self.replay.moe_layers and recorded_fraction < floor:
            raise LearnerError(
                f"only {recorded_fraction:.3f} of the trained tokens have recorded routes, and routing.min_recorded_fraction "
                f"is {floor}: find out why the engine did not record them, lower that setting, or set routing.replay=off"
            )

    def _loss(self, micro_batch: MicroBatch, rows: np.ndarray, denominator: int) -> tuple[Tensor, ObjectiveSums]:
        table = micro_batch.table
        logprobs, entropies = self._logprobs(
            table["token_ids"], micro_batch.cu_seqlens, rows, micro_batch.token_temperatures[rows]
        )
        return objective(
            logprobs,
            entropies,
            self._tensor(table["rollout_logprobs"][rows]),
            self._tensor(table["advantages"][rows]),
            torch.ones(len(rows), dtype=torch.bool, device=self._device),
            denominator,
            self._config.algorithm,
        )

    def _logprobs(
        self, token_ids: np.ndarray, cu_seqlens: np.ndarray, rows: np.ndarray, temperatures: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """float32 `[M]` log-probs of the tokens at `rows`, and entropies. Logits are made for these rows only."""
        plan = make_plan(
            cu_seqlens,
            head_dim=self._shape.head_dim,
            rope_theta=self._shape.rope_theta,
            dtype=self._dtype,
            device=self._device,
        )
        ids = self._tensor(token_ids.astype(np.int64))
        hidden = self.model(ids[None], None, None, packed_seq_params=plan)[:, 0]
        at = self._tensor(rows)
        return token_logprobs(
            self.model.logits,
            hidden.index_select(0, at - 1),
            ids.index_select(0, at),
            self._tensor(temperatures),
            self._shape.vocab_size,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        """On the device. `array` must be ours, not a table's column: those may be read-only."""
        return torch.from_numpy(array).to(self._device)

    @torch.no_grad()
    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[T - 1]`; see `LearnerBackend.score`."""
        token_ids = np.asarray(token_ids)
        if token_ids.ndim != 1 or len(token_ids) < 2:
            raise ValueError(f"score needs at least two tokens in one dimension, got shape {token_ids.shape}")
        rows = np.arange(1, len(token_ids))
        ends = np.asarray([0, len(token_ids)])
        return self._logprobs(token_ids, ends, rows, np.ones(len(rows), np.float32))[0].cpu().numpy()

    def export(self) -> dict[str, Tensor]:
        """Snapshot of all weights; see `LearnerBackend.export`."""
        return export_weights(self.model, self._shape)

    def save(self, directory: Path) -> None:
        """Write a Hugging Face model directory; see `LearnerBackend.save`."""
        directory = Path(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            save_torch_state_dict({k: v.cpu() for k, v in self.export().items()}, aside, metadata={"format": "pt"})
            for path in self._source.iterdir():
                if path.is_file() and not path.name.endswith((".safetensors", ".bin", ".index.json", ".pt", ".gguf")):
                    shutil.copy2(path, aside / path.name)
            described = json.loads((self._source / "config.json").read_text())
            described.pop("torch_dtype", None)
            described["dtype"] = self._config.learner.dtype
            (aside / "config.json").write_text(json.dumps(described, indent=2) + "\n")
            aside.chmod(0o755)
            _replace(aside, directory)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def close(self) -> None:
        """Release the process group; see `LearnerBackend.close`."""
        if self._owns_process_group and dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            self._owns_process_group = False


def _replace(new: Path, directory: Path) -> None:
    """Rename `new` to `directory`. What is there is moved aside first, since a directory can not be renamed over."""
    if not directory.exists():
        new.rename(directory)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
    os.replace(directory, old)  # over the empty directory just made
    new.rename(directory)
    shutil.rmtree(old)


def _start_process_group(device: torch.device) -> bool:
    """Megatron wants process groups even alone: a world of one, over a store in memory, without any port."""
    started = not dist.is_initialized()
    if started:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        # Nothing draws random numbers: there is no dropout, and weights are loaded.
        tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
    return started
