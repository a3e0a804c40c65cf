"""Generators that send trajectories to a learner, whole, through whatever may happen to either end and to the way between them.

`TrajectorySender` and `TrajectoryReceiver` are the production classes; the store and the trainer are as small as they may be.
What must hold is checked at every message (`Delivery.violations`), and `finish` adds what must hold in the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dev.simulation.loop import DeadlockError, LimitReachedError
from dev.simulation.network import MessagePath, SimulatedFrames, draw_seconds
from dev.simulation.processes import HostProcess
from dev.simulation.world import Simulation
from r3async.config import TransportConfig
from r3async.data import control_messages, wire
from r3async.data.consumed_groups import ConsumedGroups
from r3async.data.tokens import Trajectory
from r3async.transport import (
    ReceivedTrajectory,
    TrajectoryLedger,
    TrajectoryReceiver,
    TrajectorySender,
    decode_trajectory,
)
from r3async.world import World
from tests.helpers.transport import CLIENT_KEYS, SERVER_KEYS, make_trajectory

GROUPS, SAMPLES = 20, 2
GENERATORS = ("g0", "g1", "g2")
WINDOW = 2
LARGE = 20_000
"""Tokens: encoded in a thread, sent in pieces."""
LIVELY_SECONDS = 300.0
"""So long after the last fault everything is trained."""


@dataclass
class Kept:
    trajectory: Trajectory
    nbytes: int


class Shelf:
    """A store whose content, `disk`, outlives the process."""

    memory_bytes = 10**9

    def __init__(self, world: World, disk: dict[str, tuple[int, list[bytes]]], size: int):
        self._world, self._disk, self._size = world, disk, size

    @property
    def free_bytes(self) -> int:
        return self._size - sum(sum(map(len, frames)) for _, frames in self._disk.values())

    def set_waiting(self, waiting: bool) -> None:
        pass

    async def recover_trajectories(self) -> list[Kept]:
        kept = [decode_trajectory(frames) for _, frames in self._disk.values()]
        return [Kept(trajectory, 100) for trajectory in kept]

    async def put_trajectory(self, trajectory: Trajectory, frames: Sequence[Any], *, spill: bool) -> None:
        copied = [bytes(frame) for frame in frames]
        await self._world.threads.run(
            self._disk.__setitem__, trajectory.trajectory_id, (trajectory.group_index, copied)
        )
        await asyncio.sleep(0.01)

    async def delete_trained(self, groups: Iterable[int]) -> int:
        over = set(groups)
        gone = [name for name, (group, _) in self._disk.items() if group in over]
        for name in gone:
            del self._disk[name]
        return len(gone)

    async def remove_trajectories(self, rejected: Mapping[tuple[int, str], str]) -> int:
        for _, name in rejected:
            self._disk.pop(name, None)
        return len(rejected)


class Learner:
    """Of one process: receives, and trains the next group when it is complete."""

    def __init__(self, delivery: Delivery, process: HostProcess):
        self.delivery, self.process = delivery, process
        self.arrived: dict[int, dict[str, Trajectory]] = {}
        self.store = Shelf(process.world, delivery.disk, delivery.disk_bytes)
        self.receiver = delivery.receiver_kind(
            "run",
            delivery.settings,
            keys=SERVER_KEYS,
            max_trajectory_bytes=delivery.largest,
            store=self.store,
            window=WINDOW,
            port=5555,
            ledger=delivery.ledger_kind(ConsumedGroups(head=len(delivery.trained))),
            report_event=self.report_rejection,
            world=process.world,
        )

    async def run(self) -> None:
        async for recovered in self.receiver.recover():
            await self.take_in(recovered)
        await self.receiver.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.receive())
            tasks.create_task(self.train())

    async def receive(self) -> None:
        async for batch in self.receiver:
            for received in batch:
                await self.take_in(received)

    async def take_in(self, received: ReceivedTrajectory) -> None:
        await self.receiver.store(received)
        trajectory = received.trajectory
        name, group = trajectory.trajectory_id, trajectory.group_index
        if self.receiver.ledger.is_group_consumed(group):
            self.receiver.acknowledge_duplicate(received)
            return
        there = self.arrived.setdefault(group, {})
        if name in there or group < len(self.delivery.trained):
            self.delivery.violate(f"{name} was taken twice")
        if trajectory != self.delivery.work[name]:
            self.delivery.violate(f"{name} is not what was sent")
        there[name] = trajectory
        self.receiver.accept(received)

    async def train(self) -> None:
        delivery = self.delivery
        while True:
            await asyncio.sleep(0.2 * delivery.rng.random())
            group = len(delivery.trained)
            if len(self.arrived.get(group, ())) == SAMPLES:
                delivery.trained.append(sorted(self.arrived.pop(group)))
                self.receiver.forget_group(group)
                await self.store.delete_trained([group])

    def report_rejection(self, event: str, /, *, trajectory_id: str, reason: str) -> None:
        if trajectory_id:
            self.delivery.violate(f"{trajectory_id} was rejected: {reason}")


class Generator:
    """Of one process: sends what is its own, and was not acknowledged to it or to the one before."""

    def __init__(self, delivery: Delivery, process: HostProcess):
        self.delivery, self.process = delivery, process
        self.sender = TrajectorySender(
            "tcp://learner:5555",
            process.name,
            "run",
            delivery.settings,
            keys=CLIENT_KEYS,
            on_reject=lambda trajectory, reason: delivery.violate(f"{trajectory.trajectory_id}: {reason}"),
            world=process.world,
        )

    async def run(self) -> None:
        await self.sender.start()
        await asyncio.gather(*(self._play(name) for name in self.delivery.left[self.process.name]))

    async def _play(self, name: str) -> None:
        trajectory = self.delivery.work[name]
        await asyncio.sleep(2 * self.delivery.rng.random() * (1 + trajectory.group_index / 2))
        await self.sender.send(trajectory, more_follow=self.delivery.rng.random() < 0.5)
        while name in self.sender:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self.delivery.left[self.process.name].remove(name)


class Delivery:
    """One seed: the work, its ends, and `run` with a schedule of faults."""

    def __init__(
        self,
        seed: int,
        *,
        receiver: type[TrajectoryReceiver] = TrajectoryReceiver,
        ledger: type[TrajectoryLedger] = TrajectoryLedger,
    ):
        self.simulation = sim = Simulation(
            seed, hosts=("learner", *GENERATORS), max_callbacks=2_000_000, max_seconds=10_000.0
        )
        sim.network.on_message = self._observe
        self.rng = rng = sim.rng_for("delivery")
        self.receiver_kind, self.ledger_kind = receiver, ledger
        self.violations: list[str] = []
        self.faults: list[str] = []
        self.messages: Counter[str] = Counter()
        self.delivered = 0
        self.work: dict[str, Trajectory] = {}
        self.left: dict[str, list[str]] = {name: [] for name in GENERATORS}
        """What each generator has not had acknowledged."""
        for i in range(GROUPS * SAMPLES):
            length = LARGE if rng.random() < 0.05 else rng.randrange(1, 200)
            trajectory = make_trajectory(i, length, group=i // SAMPLES)
            self.work[trajectory.trajectory_id] = trajectory
            self.left[rng.choice(GENERATORS)].append(trajectory.trajectory_id)
        self.largest = max(wire.decoded_bytes(wire.encode_trajectory(t), t) for t in self.work.values())
        self.settings = TransportConfig(ack_timeout=1.0, credit_bytes=rng.choice([3_000, 20_000, 10**7]), host="*")
        self.disk: dict[str, tuple[int, list[bytes]]] = {}
        self.disk_bytes = rng.choice([10_000, 10**9])
        self.trained: list[list[str]] = []
        self.ends: dict[str, Learner | Generator] = {name: self._begin(name) for name in sim.hosts}

    @property
    def learner(self) -> Learner:
        found = self.ends["learner"]
        assert isinstance(found, Learner)
        return found

    def violate(self, what: str) -> None:
        self.violations.append(f"{self.simulation.loop.now:.3f} {what}")

    def run(self, faults: int = 15) -> Delivery:
        """So many faults, and then until all is trained and answered, or it takes too long."""
        sim = self.simulation
        try:
            sim.loop.run_until_complete(self._story(faults))
            self.violations += sim.loop.failures
        except (DeadlockError, LimitReachedError) as error:
            self.violate(f"it does not end: {error}")
        finally:
            sim.close()
        return self

    async def _story(self, faults: int) -> None:
        for _ in range(faults):
            await asyncio.sleep(2 * self.rng.random())
            await self._fault()
        network = self.simulation.network
        network.damage_rate, network.draw_delay = 0.0, lambda rng: draw_seconds((0.001, 0.01), rng)
        try:
            async with asyncio.timeout(LIVELY_SECONDS):
                while self._unfinished():  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
        except TimeoutError:
            held, left = self.learner.receiver.unreleased_bytes, sum(map(len, self.left.values()))
            self.violate(f"{len(self.trained)} groups trained, {left} unanswered, {held} held")

    def _unfinished(self) -> bool:
        return len(self.trained) < GROUPS or any(self.left.values()) or self.learner.receiver.unreleased_bytes > 0

    async def _fault(self) -> None:
        sim, network, rng = self.simulation, self.simulation.network, self.rng
        generator, seconds = rng.choice(GENERATORS), 4 * rng.random()
        name = rng.choice(["learner", generator])
        fault = rng.choice(["cut", "stall", "half_open", "damage", "delay", "kill", "kill", "freeze", "power"])
        self.faults.append(f"{sim.loop.now:.3f} {fault} {name} {seconds:.3f}")
        if fault in ("cut", "stall"):
            getattr(network, f"{fault}_connections")(generator, "learner", seconds)
        elif fault == "half_open":
            network.half_open_connections(name, "learner" if name == generator else generator, seconds)
        elif fault == "damage":
            network.damage_rate = rng.choice([0.0, 0.02, 0.1])
        elif fault == "delay":
            most = rng.choice([0.01, 0.1, 1.0])
            network.draw_delay = lambda rng: draw_seconds((0.0, most), rng)
        elif fault == "freeze":
            process = self.ends[name].process
            sim.freeze_process(process)
            await asyncio.sleep(seconds)
            sim.thaw_process(process)
        else:
            if fault == "power":
                network.silence_connections(name)
            sim.end_process(self.ends[name].process, fault)
            await asyncio.sleep(seconds)
            self.ends[name] = self._begin(name)

    def _begin(self, name: str) -> Learner | Generator:
        sim = self.simulation
        process = sim.begin_process(name, sim.hosts[name])
        end = process.context.copy().run(Learner if name == "learner" else Generator, self, process)
        sim.loop.create_task(end.run(), name=name, context=process.context.copy())
        return end

    def _observe(self, event: str, route: MessagePath, frames: SimulatedFrames) -> None:
        if event == "sent":
            message = control_messages.decode_control(frames[0])
            self.messages[type(message).__name__] += 1
            if isinstance(message, control_messages.Deliver):
                self.delivered += len(message.items)
            if isinstance(message, control_messages.Ack):
                for name in message.ids:
                    if name not in self.disk and self.work[name].group_index >= len(self.trained):
                        self.violate(f"{name} is acknowledged, and not on the disk")
        self._check_memory()

    def _check_memory(self) -> None:
        capacity = self.learner.receiver._memory
        bound = max(capacity.total_bytes, self.largest) + WINDOW * SAMPLES * self.largest
        if capacity.reserved_bytes > bound:
            self.violate(f"{capacity.reserved_bytes} bytes are held, more than {bound}")
        here = {name for group in self.learner.arrived.values() for name in group}
        if stray := sorted(capacity._reserved.keys() - here - self.learner.receiver._intake._unanswered.keys()):
            self.violate(f"{stray[0]} holds memory, and is not here")
