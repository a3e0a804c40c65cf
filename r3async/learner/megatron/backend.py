"""The backend on megatron-core: `MegatronLearner`, with rollout routing replay, on CPU or CUDA, on
one rank or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from r3async.config import Config
from r3async.data.model_shape import ModelShapeError
from r3async.learner.backend import (
    LearnerBackend,
    MicroBatchLoss,
    MicroBatchScores,
    TokenScores,
)
from r3async.learner.deterministic_gather import DeterministicGather
from r3async.learner.device_upload import upload_array
from r3async.learner.expert_biases import ExpertBias
from r3async.learner.lora import LoraAdapters
from r3async.learner.megatron import cpu, parallel
from r3async.learner.megatron.attention import build_attention_params
from r3async.learner.megatron.model import HiddenStatesModel, build_model, freeze_padding_embedding
from r3async.learner.megatron.routers import attach_replay
from r3async.learner.megatron.trained_part import (
    build_adapter_mappings,
    build_adapters,
    select_trained_mappings,
)
from r3async.learner.megatron.transformer_config import build_transformer_config
from r3async.learner.megatron.weights import (
    ParameterMapping,
    gather_weights,
    iter_owned_weights,
    load_weights,
    locate_shard,
    map_expert_biases,
    map_parameters,
)
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.model import (
    MegatronModelShape,
    list_extra_tensors,
    open_model_files,
    read_model_shape,
)
from r3async.learner.model_directory import log_checkpoint_form
from r3async.learner.optimizer import MasterAdamW, count_updates
from r3async.learner.replay import MicroBatchRoutes
from r3async.learner.results import LearnerError
from r3async.learner.shard_slice import ShardSlice
from r3async.learner.token_logprobs import select_supports, token_logprobs


class MegatronLearner(LearnerBackend):
    """A learner backend whose model is built by megatron-core.

    One process is one rank with one device. With `learner.parallel` beyond one rank, the default
    process group must be initialized, and every rank loads a learner and makes the same calls.
    """

    name = "megatron"
    ranks: parallel.MegatronRankGroup

    def __init__(
        self,
        config: Config,
        model_path: Path,
        layout: parallel.MegatronRankGroup,
        shape: MegatronModelShape,
        model: HiddenStatesModel,
        mappings: list[ParameterMapping],
        device: torch.device,
        adapters: LoraAdapters | None = None,
    ):
        self.model = model
        self.shape = shape
        self.mappings = mappings
        self._device = device
        self._bias_mappings = map_expert_biases(model, shape)
        assert {id(p) for p in model.parameters()} == {
            id(link.parameter) for link in self.mappings
        }, "unlinked"
        p = config.learner.parallel
        freeze_padding_embedding(model, shape.padding_token, (layout.tp_rank, p.tp))
        replay = attach_replay(
            model,
            moe_layers=[i + 1 for i in shape.moe_layers],
            shard=(layout.cp_rank * p.tp + layout.tp_rank, p.cp * p.tp),
            cp_size=p.cp,
            top_k=shape.top_k or 1,
            num_experts=shape.num_experts or 1,
            is_enabled=config.routing.replay != "off",
            device=device,
            is_recomputed=config.learner.recompute != "none",
        )
        trained = (
            build_adapter_mappings(adapters, mappings)
            if adapters
            else select_trained_mappings(mappings)
        )
        learner = config.learner
        reducer = parallel.MegatronGradientReducer(
            trained, layout, sharded=learner.shard_optimizer, keeps_shares=learner.shard_gradients
        )
        optimizer = MasterAdamW(
            [link.parameter for link in trained],
            config.learner,
            updates_total=count_updates(config),
            reducer=reducer,
            on_change=adapters.merge_weights if adapters else lambda: None,
        )
        self._first_token_id, self._num_local_logits, self._vocabulary_group = (
            find_vocabulary_shard(shape.vocab_size, layout)
        )
        super().__init__(
            config,
            model_path,
            layout,
            vocab_size=shape.vocab_size,
            replay=replay,
            optimizer=optimizer,
            parameters=model.parameters(),
            adapters=adapters,
            expert_biases=[
                ExpertBias(
                    link.tensor_names[0], column, link.parameter, locate_shard(link).is_writer
                )
                for link, column in zip(
                    self._bias_mappings,
                    replay.moe_layer_indices if self._bias_mappings else (),
                    strict=True,
                )
            ],
        )

    @classmethod
    def from_pretrained(
        cls, config: Config, model_path: Path, *, frozen: bool = False
    ) -> MegatronLearner:
        """Build this rank's part of the model, and load its weights; nothing of a
        `frozen` one is trained.

        Collective. Raises `LearnerError` for a model or a layout that this backend
        does not support.
        """
        cpu.patch_megatron()
        source = Path(model_path)
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        if not cuda:
            torch.set_num_threads(config.learner.threads)
        shape = read_model_shape(source)
        try:
            shape.check_parallelism(config.learner.parallel)
        except ModelShapeError as error:
            raise LearnerError(str(error)) from error
        layout = parallel.init_model_parallel(config.learner.parallel, device)
        model = build_model(build_transformer_config(shape, config.learner), shape).to(device)
        linked = list(map_parameters(model, shape))
        files = open_model_files(source)
        load_weights([*linked, *map_expert_biases(model, shape)], shape, files)
        adapters = build_adapters(model, linked, config)
        if frozen:
            model.requires_grad_(False)
        learner = cls(config, source, layout, shape, model, linked, device, adapters)
        learner.carried = list_extra_tensors(shape, files)
        if layout.rank == 0 and not frozen:
            log_checkpoint_form(source, learner.carried)
        return learner

    # -- passes ------------------------------------------------------------------------------------

    def forward(
        self, micro_batch: MicroBatch, rows: np.ndarray, routes: MicroBatchRoutes | None
    ) -> Tensor:
        """Return this pipeline stage's output for the micro-batch, `[N / (cp tp), 1, hidden]`."""
        plan = build_attention_params(
            micro_batch,
            rotary=self.shape.rotary,
            dtype=getattr(torch, self.config.learner.dtype),
            device=self._device,
            context=self.ranks.context_parallel,
        )
        ids = self._to_device(
            micro_batch.table["token_ids"][self._local_rows(micro_batch)].astype(np.int64)
        )
        hidden = self.model(ids[None], None, None, packed_seq_params=plan)
        return hidden if routes is None else routes.track_backward(hidden)

    def score_tokens(
        self, output: Tensor, micro_batch: MicroBatch, rows: np.ndarray
    ) -> TokenScores:
        hidden = output
        context = self.ranks.context_parallel
        if self.config.learner.parallel.tp > 1:
            # Each rank's logits are of its own part of the vocabulary, so their gradients add up in
            # the backward pass.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        before = micro_batch.previous_rows(rows)
        here = self._local_rows(micro_batch)
        # The rank that has the token before it computes a token's log-prob.
        (mine,) = np.nonzero((before >= here.start) & (before < here.stop))
        if context is not None:
            total = len(rows)
            rows = rows[mine]
            before = before[mine] - here.start
        ids = micro_batch.scored_ids(rows)
        weight = self.model.get_output_weight()
        if len(weight) > self._num_local_logits:  # not always: the gradient of a slice is a copy
            weight = weight[: self._num_local_logits]
        entropy_gradient = self.config.algorithm.entropy_coef != 0
        scores = token_logprobs(
            weight,
            DeterministicGather.from_index(before, here.stop - here.start, self._device)(
                hidden[:, 0]
            ),
            self._to_device(ids),
            self._to_device(micro_batch.scored_temperatures(rows)),
            first_token_id=self._first_token_id,
            group=self._vocabulary_group,
            entropy_gradient=entropy_gradient,
            supports=select_supports(micro_batch.support, rows),
            float32_head=self.config.model.head_dtype == "float32",
        )
        return (
            scores
            if context is None
            else context.all_reduce_scores(scores, mine, total, entropy_gradient=entropy_gradient)
        )

    def _local_rows(self, micro_batch: MicroBatch) -> slice:
        """Return the rows of this rank and of those that it is tensor parallel with."""
        context = self.ranks.context_parallel
        return (
            slice(0, micro_batch.num_tokens)
            if context is None
            else context.local_rows(micro_batch.num_tokens)
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device. It must be our own, not a table's column: columns
        may be read-only."""
        return upload_array(array, self._device)

    def iter_scores(
        self,
        micro_batches: Sequence[MicroBatch],
        rows: Sequence[np.ndarray],
        *,
        replay: bool = True,
        keep_choices: bool = False,
        pipeline_loss: MicroBatchLoss | None = None,
    ) -> Iterator[MicroBatchScores]:
        """Run micro-batches one after the other, or through several pipeline stages by 1F1B."""
        if self.config.learner.parallel.pp == 1:
            yield from super().iter_scores(
                micro_batches, rows, replay=replay, keep_choices=keep_choices
            )
            return
        done: list[MicroBatchScores] = []

        def finish(index: int, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            logprobs, entropies = self.score_tokens(hidden, micro_batches[index], rows[index])
            if pipeline_loss is None:
                done[index] = done[index]._replace(logprobs=logprobs, entropies=entropies)
                loss = hidden.new_zeros(())
            else:
                loss = pipeline_loss(index, logprobs, entropies)
            return loss, torch.zeros([], dtype=torch.int), {}

        with self.replay.bind_pipelined() as bind, cpu.map_cuda_to_cpu():

            def begin(
                iterator: Iterator[int], _: HiddenStatesModel
            ) -> tuple[Tensor, Callable[[Tensor], Any]]:
                index = next(iterator)
                micro_batch = micro_batches[index]
                routes = bind(micro_batch, keep_choices) if replay else None
                done.append(MicroBatchScores(index, routes if keep_choices else None, None, None))
                return self.forward(micro_batch, rows[index], routes), partial(finish, index)

            forward_backward_pipelining_without_interleaving(
                forward_step_func=begin,
                data_iterator=iter(range(len(micro_batches))),
                model=self.model,
                num_microbatches=len(micro_batches),
                # Stages send each other the length of every micro-batch; these are
                # only first guesses.
                seq_length=1,
                micro_batch_size=1,
                forward_only=pipeline_loss is None,
            )
        yield from done

    def broadcast_logprobs(self, values: Sequence[np.ndarray]) -> None:
        if self.config.learner.parallel.pp > 1:
            group = ps.get_pipeline_model_parallel_group()
            source = ps.get_pipeline_model_parallel_last_rank()
            for each in values:
                dist.broadcast(torch.from_numpy(each), source, group)

    def all_reduce_routes(self, routes: Tensor) -> None:
        """Sum the parts of the routes; every token and layer is on one rank of a model."""
        if self.config.learner.parallel.world_size > 1:
            dist.all_reduce(routes, group=ps.get_model_parallel_group())
        if self.ranks.context_parallel is not None:
            dist.all_reduce(routes, group=self.ranks.context_parallel.group)

    # -- saved state -------------------------------------------------------------------------------

    def parameter_slices(self) -> list[ShardSlice]:
        sharded = self.config.learner.shard_optimizer
        return [
            locate_shard(link, sharded=sharded) for link in select_trained_mappings(self.mappings)
        ]

    def export_weights(self, *, copy: bool = True) -> dict[str, Tensor]:
        """Return the snapshot on the model's device with one rank, and on the host with several."""
        return gather_weights([*self.mappings, *self._bias_mappings], copy=copy)

    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter_owned_weights([*self.mappings, *self._bias_mappings])

    def close(self) -> None:
        """Release the process groups, if they were made here."""
        self.ranks.close()


def find_vocabulary_shard(
    size: int, layout: parallel.MegatronRankGroup
) -> tuple[int, int, dist.ProcessGroup | None]:
    """Return the first token id and the columns of this rank's logits, and the ranks that
    have the others."""
    ranks = layout.parallel.tp
    if ranks == 1:
        return 0, size, None
    rows = -(-size // ranks)
    first = rows * layout.tp_rank
    return first, max(0, min(rows, size - first)), ps.get_tensor_model_parallel_group()
