"""The learner at work: one step after the other on what was received, and the checkpoints of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.publishing import Publishing
from r3async.actors.ranks import LocalLearner, RankedLearner
from r3async.actors.reception import Reception
from r3async.checkpoint import CheckpointWriter
from r3async.checkpoint.state import LEARNER_RECORDS, ConductorState, TrainingState
from r3async.config import Config
from r3async.data.records import Trajectory
from r3async.data.versions import Lineage
from r3async.learner.batch.cost import Cost
from r3async.record.steps import TRAINED, episode_metrics, previews, trained_step
from r3async.record.timeline import LagMeter, Timeline
from r3async.record.tracing import StepTracer
from r3async.rollout.episode import EpisodeTask, failed_trajectory
from r3async.schedule.age import age_metrics, check_ages
from r3async.schedule.groups import GroupBuffer
from r3async.world import Lane, World
from r3async.world.appending import AppendFile


@dataclass
class Counts:
    """How far the run is.

    `version`: versions published. A step without an update (nothing to train, a gradient that is not finite) counts too: slots
    are freed by it, and generators see time pass. `since`: steps made, and groups consumed, since the last version was published.
    """

    steps: int = 0
    version: int = 0
    since: tuple[int, int] = (0, 0)


@dataclass
class Model:
    """What is loaded. `torch`: the thread that made `backend`, and makes its calls. `buffer`: of the groups that the run has not
    trained."""

    backend: LocalLearner | RankedLearner
    torch: Lane
    cost: Cost
    counts: Counts
    buffer: GroupBuffer


@dataclass
class Learning:
    """Makes steps. All methods belong to the event loop. `events`: a structlog logger."""

    world: World
    config: Config
    run_dir: Path
    lineage: Lineage
    events: Any
    timeline: Timeline
    lag: LagMeter
    checkpoints: CheckpointWriter
    model: Model
    reception: Reception
    publishing: Publishing
    doing: str = field(default="between steps", init=False)

    def __post_init__(self) -> None:
        from r3async.learner.trainer import Trainer  # loads torch, which this process has by now

        tracer = StepTracer(self.run_dir, self.config, self.events.warning, world=self.world)
        model = self.model
        self.trainer = Trainer(self.config, model.cost, model.backend, tracer, self.events, self._stand_in)
        self._trained_file = AppendFile(self.run_dir / TRAINED, world=self.world)

    async def train_step(self, last: bool, interrupted: asyncio.Event) -> dict[str, Any] | None:
        """See `LearnerActor.train_step`."""
        self.doing = "waiting"
        try:
            return await self._train_step(last, interrupted)
        finally:
            self.doing = "between steps"

    async def _train_step(self, last: bool, interrupted: asyncio.Event) -> dict[str, Any] | None:
        clock, counts, reception = self.world.clock.monotonic, self.model.counts, self.reception
        waited_from = clock()
        with self.timeline.span("wait", step=counts.steps + 1):
            indices = await reception.wait_for_groups(counts.since, interrupted)
        if not indices:
            return None
        step_from = clock()
        self.doing, version = "training", counts.version
        groups, metrics = await self._train(indices)
        trained = clock()
        counts.steps += 1
        steps, consumed = counts.since
        counts.since = steps + 1, consumed + len(indices)
        if metrics["optimizer/skipped"] and not metrics["optimizer/no_contrast"]:
            self.events.warning("step_skipped", step=counts.steps, grad_norm=metrics["grad_norm"])
        reception.trained(indices)
        line = trained_step(counts.steps, version, groups, self.lineage.number)
        self._trained_file.append(msgspec.json.encode(line))
        due = last or counts.since[0] == self.config.schedule.steps_per_publication
        if due:
            counts.version, counts.since = version + 1, (0, 0)
            with self.timeline.span("snapshot", step=counts.steps, version=counts.version):
                await self.publishing.copy(counts.version)
        trajectories = [t for group in groups for t in group]
        metrics |= episode_metrics(trajectories) | reception.figures()
        metrics |= {f"lag/learner_{name}": value for name, value in self.lag.figures().items()}
        metrics |= {
            "learner/wait_seconds": step_from - waited_from,
            "learner/step_seconds": trained - step_from,
            "weights/snapshot_seconds": clock() - trained,
            "weights/write_seconds": 0.0,
            "batch/groups": len(indices),
            "lineage": self.lineage.number,
        }
        return {
            "metrics": metrics,
            "new_weights": due,
            "version": version + 1,
            "groups": indices,
            "previews": previews(trajectories),
        }

    async def _train(self, indices: list[int]) -> tuple[list[list[Trajectory]], dict[str, float]]:
        """Take these groups and train them. Returns them as they were trained, and metrics."""
        counts, reception, model = self.model.counts, self.reception, self.model
        taken, _ = reception.buffer.take(indices)
        check_ages(taken, counts.version, reception.age_bound)
        now, oldest = self.world.clock.time(), self.config.schedule.max_token_age
        ages = age_metrics(taken, counts.version, reception.age_bound, now, oldest)
        number = counts.steps + 1
        with self.timeline.span("train", step=number):
            done = await model.torch.run(self.trainer.step, number, counts.version, taken)
        await reception.set_aside(done.unsound, done.groups)
        return done.groups, done.metrics | ages

    def _stand_in(self, trajectory: Trajectory) -> Trajectory:
        """For one that cannot be trained: of its episode, and nothing of it is trained or compared."""
        t = trajectory
        task = EpisodeTask(t.group_index, t.episode_index, t.task_seed)
        made = failed_trajectory(task, self.reception.routing, 0, generator_id=t.generator_id, at=t.finished_at)
        return msgspec.structs.replace(made, lineage=t.lineage)

    async def checkpoint(self, conductor: ConductorState) -> float:
        """See `LearnerActor.checkpoint`."""
        clock, counts, model = self.world.clock.monotonic, self.model.counts, self.model
        began, taken = clock(), self.reception.buffer.taken
        state = TrainingState(
            **msgspec.structs.asdict(conductor),
            steps=counts.steps,
            version=counts.version,
            lineage=self.lineage,
            consumed=taken.head,
            consumed_beyond=sorted(taken.beyond),
            since_publication=counts.since,
        )
        backend, commit = model.backend, self.reception.commit()
        state = await state.with_records(self.run_dir, LEARNER_RECORDS, keeper=self.world.keeper)
        await self.checkpoints.save(state, lambda: model.torch.run(backend.hold), backend.write_state, commit)
        return clock() - began

    async def finish_checkpoint(self) -> None:
        """See `LearnerActor.finish_checkpoint`."""
        await self.checkpoints.finish()
