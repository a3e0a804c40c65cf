"""A tiny run that writes real checkpoints and resumes from one, with all ranks in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from r3async.checkpoint import (
    Checkpoint,
    CheckpointDirectory,
    RunState,
    check_resume_settings,
    open_checkpoint,
    restore_admission,
    rewind_records,
)
from r3async.checkpoint.rank_files import TensorSlice, write_rank_file
from r3async.config import Config, config_from_dict, config_to_dict
from r3async.learner.backend import LearnerBackend
from r3async.learner.optimizer import MasterAdamW
from r3async.learner.rank_group import RankGroup
from r3async.learner.replay import RoutingReplay
from r3async.learner.shard_slice import ShardSlice
from r3async.learner.tensor_layout import StackedTensors
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.run_ahead import AdmissionController

RECORD_FILE = "metrics.jsonl"


class TinyLearner(LearnerBackend):
    """A learner without a model: parameters, and their places in the tensors of all ranks."""

    name = "torch"

    def __init__(
        self,
        config: Config,
        source: Path,
        ranks: RankGroup,
        parameters: list[Parameter],
        slices: list[ShardSlice],
    ):
        replay = RoutingReplay.for_full_model(None, enabled=False, device=ranks.device)
        optimizer = MasterAdamW(parameters, config.learner)
        super().__init__(
            config,
            source,
            ranks,
            vocab_size=4,
            replay=replay,
            optimizer=optimizer,
            parameters=parameters,
        )
        self._trained_slices = slices

    def trained_slices(self) -> list[ShardSlice]:
        """Implement `LearnerBackend.trained_slices`."""
        return self._trained_slices


class TinyRun:
    """A run with weights on `world` ranks, and a window in which a group overtook another.

    Each rank has a parameter divided by rows, a parameter of stacked experts, and a whole one.
    """

    def __init__(self, directory: Path, world: int):
        self._config = config_from_dict(
            {
                "schedule": {"window": 3, "prompts_per_step": 2, "group_size": 2},
                "algorithm": {"rollout_kl": {"coef": 0.1, "target": 0.05}},
            }
        )
        self._directory = directory
        self._model = directory / "model"
        self._model.mkdir(parents=True)
        (self._model / "config.json").write_text('{"hidden_size": 3}')
        self.checkpoints = CheckpointDirectory(
            directory / "checkpoints", report_event=self._add_event
        )
        self.reported_events: list[dict[str, Any]] = []
        """Events that were reported about checkpoints."""
        self._ranks = [self._make_rank(rank, world) for rank in range(world)]

    def _add_event(self, event: str, /, **facts: object) -> None:
        self.reported_events.append({"event": event, **facts})

    def _make_rank(self, rank: int, world: int) -> TinyLearner:
        torch.manual_seed(rank)
        share = 4 // world
        parameters = [Parameter(torch.randn(size)) for size in ((share, 3), (share, 2, 2), (3,))]
        experts = tuple(
            TensorSlice.full_tensor(f"expert.{share * rank + i}.weight", (2, 2))
            for i in range(share)
        )
        slices = [
            ShardSlice((TensorSlice("embed.weight", (4, 3), (share * rank, 0), (share, 3)),)),
            ShardSlice(experts, StackedTensors()),
            ShardSlice((TensorSlice.full_tensor("norm.weight", (3,)),), is_writer=rank == 0),
        ]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        ranks = RankGroup(rank, world, torch.device("cpu"))
        learner = TinyLearner(self._config, self._model, ranks, parameters, slices)
        learner.optimizer.step()
        return learner

    def write_checkpoint(self, step: int) -> Path:
        """Write the checkpoint of a step that changed the trust region's coefficient, and
        return its path."""
        partial = self.checkpoints.begin_checkpoint(step)
        for learner in self._ranks:
            learner.trust_region.update_coefficient(0.1)
        records = [write_rank_file(partial, learner.capture_state()) for learner in self._ranks]
        return self.checkpoints.commit_checkpoint(self._run_state(step), records)

    def _run_state(self, step: int) -> RunState:
        admission = self._make_admission()
        while lease := admission.lease_group("g0", free_episodes=1):
            last = lease.group_index
        admission.step_trained(1, [0, 2])
        admission.version_published(1)
        return RunState(
            run_id="tiny",
            config=config_to_dict(self._config),
            model_path="model",
            model_fingerprint="f" * 64,
            steps=step,
            version=1,
            consumed=1,
            consumed_beyond=[2],
            admission=admission.state_dict(),
            record_bytes={RECORD_FILE: 40},
            elapsed=1.5,
            generated_tokens=last,
        )

    def _make_admission(self) -> AdmissionController:
        return AdmissionController(self._config.schedule, choose_task=lambda group: group)

    def resume_run(self, opened: Checkpoint) -> tuple[Any, ...]:
        """Resume from a checkpoint as driver, ranks, learner and conductor do. Returns their
        resulting state."""
        state = opened.state
        check_resume_settings(state.config, self._config)
        record = self._directory / RECORD_FILE
        record.write_bytes(b"x" * 60)
        rewind_records(self._directory, state.record_bytes)
        parts = open_checkpoint(opened.path, check_tensors=False).open_learner_state()
        ranks = []
        for learner in self._ranks:
            learner.restore_state(parts)
            now = learner.capture_state()
            ranks.append(
                (now.metadata, [(p.tensor_slice, p.values.numpy().tobytes()) for p in now.slices])
            )
        schedule = self._config.schedule
        buffer = GroupBuffer(
            schedule.group_size, schedule.window, head=state.consumed, beyond=state.consumed_beyond
        )
        admission = self._make_admission()
        restore_admission(admission, state)
        admission.requeue_after_resume(-1, buffer.missing_in_group)
        return state, ranks, len(buffer.consumed), admission.state_dict(), record.stat().st_size
