"""`MegatronLearner`: a model on megatron-core with rollout routing replay, on CPU or CUDA, on one rank or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from r3async.config import Config
from r3async.data.model_shape import ShapeError
from r3async.learner import LearnerError
from r3async.learner.backend import LearnerBackend, Scores
from r3async.learner.batch.packing import MicroBatch
from r3async.learner.expert_biases import ExpertBias
from r3async.learner.logprobs import supports_of, token_logprobs
from r3async.learner.lora import Adapters
from r3async.learner.megatron import cpu, parallel
from r3async.learner.megatron.adapters import adapt, adapter_links, trained_links
from r3async.learner.megatron.attention import make_plan
from r3async.learner.megatron.hf import transformer_config
from r3async.learner.megatron.links import (
    Link,
    choice_biases,
    gather_weights,
    held,
    links,
    load_weights,
    own_weights,
)
from r3async.learner.megatron.modules import HiddenStatesModel, attach, build_model, hold_padding
from r3async.learner.optimizer import MasterAdamW, total_updates
from r3async.learner.replay import Binder, MicroBatchRoutes
from r3async.learner.state import Held
from r3async.learner.taken import Taken
from r3async.learner.trained import TrainedShape, checkpoint_files, read_model


class MegatronLearner(LearnerBackend):
    """See `LearnerBackend`.

    One process is one rank with one device. With `learner.parallel` beyond one rank, the default process group must be
    there, and every rank loads a learner and makes the same calls.
    """

    name = "megatron"
    ranks: parallel.Layout

    def __init__(
        self,
        config: Config,
        source: Path,
        layout: parallel.Layout,
        shape: TrainedShape,
        model: HiddenStatesModel,
        linked: list[Link],
        device: torch.device,
        adapters: Adapters | None = None,
    ):
        self.model, self.shape, self.links, self._device = model, shape, linked, device
        self._bias_links = choice_biases(model, shape)
        assert {id(p) for p in model.parameters()} == {id(link.parameter) for link in self.links}, "unlinked"
        p = config.learner.parallel
        hold_padding(model, shape.padding, (layout.tp_rank, p.tp))
        replay = attach(
            model,
            moe_layers=[i + 1 for i in shape.moe_layers],
            shard=(layout.cp_rank * p.tp + layout.tp_rank, p.cp * p.tp),
            context=p.cp,
            top_k=shape.top_k or 1,
            num_experts=shape.experts or 1,
            enabled=config.routing.replay != "off",
            device=device,
        )
        trained = adapter_links(adapters, linked) if adapters else trained_links(linked)
        summed = parallel.GradientSum(trained, layout, sharded=config.learner.shard_optimizer)
        optimizer = MasterAdamW(
            [link.parameter for link in trained],
            config.learner,
            total=total_updates(config),
            reduce_gradients=summed.reduce if config.learner.parallel.world > 1 else None,
            squared_norm=summed.squared_norm,
            shares=summed.shares,
            gather=summed.gather,
            changed=adapters.merge if adapters else lambda: None,
        )
        self._first_logit, self._logits_here, self._vocabulary_group = vocabulary_of(shape.vocab, layout)
        super().__init__(
            config,
            source,
            layout,
            vocab_size=shape.vocab,
            replay=replay,
            optimizer=optimizer,
            parameters=model.parameters(),
            adapters=adapters,
            biases=[
                ExpertBias(link.names[0], column, link.parameter, held(link).writes)
                for link, column in zip(self._bias_links, replay.columns if self._bias_links else (), strict=True)
            ],
        )

    @classmethod
    def load(cls, config: Config, model_path: Path, *, frozen: bool = False) -> MegatronLearner:
        """Build this rank's part of the model, and load its weights; nothing of a `frozen` one is trained. Collective. Raises
        `LearnerError` for a model or a layout that this backend does not have."""
        cpu.prepare()
        source, cuda = Path(model_path), torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        if not cuda:
            torch.set_num_threads(config.learner.threads)
        shape = read_model(source)
        try:
            shape.check_divides(config.learner.parallel)
        except ShapeError as error:
            raise LearnerError(str(error)) from error
        layout = parallel.start(config.learner.parallel, device)
        model = build_model(transformer_config(shape, config.learner), shape).to(device)
        linked = list(links(model, shape))
        load_weights([*linked, *choice_biases(model, shape)], shape, checkpoint_files(source))
        adapters = adapt(model, linked, config)
        if frozen:
            model.requires_grad_(False)
        return cls(config, source, layout, shape, model, linked, device, adapters)

    # -- passes ----------------------------------------------------------------------------------------------------

    def forward(self, micro_batch: MicroBatch, rows: np.ndarray, routes: MicroBatchRoutes | None) -> Tensor:
        """`[N / (cp tp), 1, hidden]`: what this pipeline stage makes of the micro-batch."""
        plan = make_plan(
            micro_batch,
            rotary=self.shape.rotary,
            dtype=getattr(torch, self.config.learner.dtype),
            device=self._device,
            context=self.ranks.context,
        )
        ids = self._tensor(micro_batch.table["token_ids"][self._here(micro_batch)].astype(np.int64))
        hidden = self.model(ids[None], None, None, packed_seq_params=plan)
        return hidden if routes is None else routes.follow(hidden)

    def scores(self, output: Tensor, micro_batch: MicroBatch, rows: np.ndarray) -> Scores:
        hidden, context = output, self.ranks.context
        if self.config.learner.parallel.tp > 1:
            # Each rank's logits are of its own part of the vocabulary, so their gradients add up in the backward pass.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        before, here = micro_batch.before(rows), self._here(micro_batch)
        # A token's log-prob is of the rank that has the token before it.
        (mine,) = np.nonzero((before >= here.start) & (before < here.stop))
        if context is not None:
            total, rows, before = len(rows), rows[mine], before[mine] - here.start
        ids = micro_batch.table["token_ids"][rows].astype(np.int64)
        weight = self.model.output_weight()
        if len(weight) > self._logits_here:  # not always: the gradient of a slice is a copy
            weight = weight[: self._logits_here]
        entropy_gradient = self.config.algorithm.entropy_coef != 0
        scores = token_logprobs(
            weight,
            Taken.of(before, here.stop - here.start, self._device)(hidden[:, 0]),
            self._tensor(ids),
            self._tensor(micro_batch.token_temperatures[rows]),
            first=self._first_logit,
            group=self._vocabulary_group,
            entropy_gradient=entropy_gradient,
            supports=supports_of(micro_batch.support, rows),
        )
        return scores if context is None else context.joined(scores, mine, total, entropy_gradient=entropy_gradient)

    def _here(self, micro_batch: MicroBatch) -> slice:
        """The tokens of this rank and of those that it is tensor parallel with."""
        context = self.ranks.context
        return slice(0, micro_batch.tokens) if context is None else context.part(micro_batch.tokens)

    def _tensor(self, array: np.ndarray) -> Tensor:
        """On the device. `array` must be ours, not a table's column: those may be read-only."""
        return torch.from_numpy(array).to(self._device)

    def schedule(
        self,
        forward: Callable[[int, Binder], Any],
        finish: Callable[[int, Any], Tensor | None],
        count: int,
        *,
        backward: bool,
    ) -> None:
        """One after the other; through several pipeline stages by 1F1B, which begins forward passes before earlier micro-batches
        have had their backward."""
        if self.config.learner.parallel.pp == 1:
            super().schedule(forward, finish, count, backward=backward)
            return

        def last(index: int, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            loss = finish(index, hidden)
            return hidden.new_zeros(()) if loss is None else loss, torch.zeros([], dtype=torch.int), {}

        with self.replay.pipelined() as bind, cpu.cuda_means_cpu():

            def step(iterator: Iterator[int], _: HiddenStatesModel) -> tuple[Tensor, Callable[[Tensor], Any]]:
                index = next(iterator)
                return forward(index, bind), partial(last, index)

            forward_backward_pipelining_without_interleaving(
                forward_step_func=step,
                data_iterator=iter(range(count)),
                model=self.model,
                num_microbatches=count,
                # Stages send each other the length of every micro-batch; these are only first guesses.
                seq_length=1,
                micro_batch_size=1,
                forward_only=not backward,
            )

    def share_logprobs(self, values: Sequence[np.ndarray]) -> None:
        if self.config.learner.parallel.pp > 1:
            group, source = ps.get_pipeline_model_parallel_group(), ps.get_pipeline_model_parallel_last_rank()
            for each in values:
                dist.broadcast(torch.from_numpy(each), source, group)

    def join_routes(self, routes: Tensor) -> None:
        """Every token and layer is on one rank of a model."""
        if self.config.learner.parallel.world > 1:
            dist.all_reduce(routes, group=ps.get_model_parallel_group())
        if self.ranks.context is not None:
            dist.all_reduce(routes, group=self.ranks.context.group)

    # -- what is saved ---------------------------------------------------------------------------------------------

    def weight_places(self) -> list[Held]:
        sharded = self.config.learner.shard_optimizer
        return [held(link, sharded=sharded) for link in trained_links(self.links)]

    def export(self, *, copy: bool = True) -> dict[str, Tensor]:
        """With one rank on the model's device, with several on the host."""
        return gather_weights([*self.links, *self._bias_links], copy=copy)

    def share(self) -> Iterator[tuple[str, Tensor]]:
        return own_weights([*self.links, *self._bias_links])

    def close(self) -> None:
        """Release the process groups, if they were made here."""
        self.ranks.close()


def vocabulary_of(size: int, layout: parallel.Layout) -> tuple[int, int, dist.ProcessGroup | None]:
    """First token id and columns of this rank's logits, and the ranks that have the others."""
    ranks = layout.parallel.tp
    if ranks == 1:
        return 0, size, None
    rows = -(-size // ranks)
    first = rows * layout.tp_rank
    return first, max(0, min(rows, size - first)), ps.get_tensor_model_parallel_group()
