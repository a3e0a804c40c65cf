"""A tiny run that makes real checkpoints, and resumes from one, all ranks in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from r3async.checkpoint import Checkpoints, Opened, RunState, check_settings, open_checkpoint, restore_admission, rewind
from r3async.checkpoint.tensors import Place, write_part
from r3async.config import Config, config_from_dict, to_dict
from r3async.learner.backend import LearnerBackend, Ranks
from r3async.learner.optimizer import MasterAdamW
from r3async.learner.replay import RoutingReplay
from r3async.learner.state import Held
from r3async.schedule.admission import Admission
from r3async.schedule.groups import GroupBuffer

RECORD = "metrics.jsonl"


class TinyLearner(LearnerBackend):
    """Parameters, and where they lie in those of all ranks; no model."""

    name = "torch"

    def __init__(self, config: Config, source: Path, ranks: Ranks, parameters: list[Parameter], held: list[Held]):
        replay = RoutingReplay.whole(None, enabled=False, device=ranks.device)
        optimizer = MasterAdamW(parameters, config.learner)
        super().__init__(config, source, ranks, vocab_size=4, replay=replay, optimizer=optimizer, parameters=parameters)
        self._held = held

    def places(self) -> list[Held]:
        """See `LearnerBackend.places`."""
        return self._held


class TinyRun:
    """Weights divided among `world` ranks by rows, stacked ones and a whole one; a window in which a group overtook another."""

    def __init__(self, directory: Path, world: int):
        self._config = config_from_dict(
            {
                "schedule": {"window": 3, "groups_per_step": 2, "samples_per_group": 2},
                "algorithm": {"rollout_kl": {"coef": 0.1, "target": 0.05}},
            }
        )
        self._directory, self._model = directory, directory / "model"
        self._model.mkdir(parents=True)
        (self._model / "config.json").write_text('{"hidden_size": 3}')
        self.checkpoints = Checkpoints(directory / "checkpoints", report=self._report)
        self.reported: list[dict[str, Any]] = []
        """What was reported of checkpoints."""
        self._ranks = [self._rank(rank, world) for rank in range(world)]

    def _report(self, event: str, /, **facts: object) -> None:
        self.reported.append({"event": event, **facts})

    def _rank(self, rank: int, world: int) -> TinyLearner:
        torch.manual_seed(rank)
        share = 4 // world
        parameters = [Parameter(torch.randn(size)) for size in ((share, 3), (share, 2, 2), (3,))]
        experts = tuple(Place.whole(f"expert.{share * rank + i}.weight", (2, 2)) for i in range(share))
        held = [
            Held((Place("embed.weight", (4, 3), (share * rank, 0), (share, 3)),)),
            Held(experts, split=torch.unbind, join=torch.stack),
            Held((Place.whole("norm.weight", (3,)),), writes=rank == 0),
        ]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        ranks = Ranks(rank, world, torch.device("cpu"))
        learner = TinyLearner(self._config, self._model, ranks, parameters, held)
        learner.optimizer.step()
        return learner

    def write(self, step: int) -> Path:
        """The checkpoint of a step after which the trust region's coefficient is another one."""
        partial = self.checkpoints.begin(step)
        for learner in self._ranks:
            learner.trust_region.update(0.1)
        records = [write_part(partial, learner.state()) for learner in self._ranks]
        return self.checkpoints.commit(self._state(step), records)

    def _state(self, step: int) -> RunState:
        admission = self._admission()
        while lease := admission.lease("g0", free=1):
            last = lease.group_index
        admission.trained(1, [0, 2])
        admission.published(1)
        return RunState(
            run_id="tiny",
            config=to_dict(self._config),
            model_path="model",
            model_fingerprint="f" * 64,
            steps=step,
            version=1,
            consumed=1,
            consumed_beyond=[2],
            admission=admission.snapshot(),
            record_bytes={RECORD: 40},
            pending_rows=[{"step": step, "version": 1, "loss": 0.25}],
            elapsed=1.5,
            generated_tokens=last,
        )

    def _admission(self) -> Admission:
        return Admission(self._config.schedule, task_seed=lambda group: group)

    def resume(self, opened: Opened) -> tuple[Any, ...]:
        """What the driver, the ranks, the learner and the conductor make of it, and what they then hold."""
        state = opened.state
        check_settings(state.config, self._config)
        record = self._directory / RECORD
        record.write_bytes(b"x" * 60)
        rewind(self._directory, state.record_bytes)
        parts = open_checkpoint(opened.path, check_tensors=False).learner()
        ranks = []
        for learner in self._ranks:
            learner.restore(parts)
            now = learner.state()
            ranks.append((now.facts, [(p.place, p.tensor.numpy().tobytes()) for p in now.pieces]))
        schedule = self._config.schedule
        buffer = GroupBuffer(
            schedule.samples_per_group, schedule.window, head=state.consumed, beyond=state.consumed_beyond
        )
        admission = self._admission()
        restore_admission(admission, state)
        admission.adopt(-1, buffer.missing)
        return state, ranks, len(buffer.taken), admission.snapshot(), record.stat().st_size
