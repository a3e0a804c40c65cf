"""The spool on a disk that writes short, fills up, fails, kills its process within any operation, and loses power."""

import asyncio
import errno
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dev.simulation.disk import SimulatedDisk
from r3async.config import BufferConfig
from r3async.data.wire import encode_trajectory
from r3async.transport.spool import Spool
from r3async.world.real import RealWorld
from tests.helpers.disk import Ended, Process
from tests.helpers.transport import make_trajectory

DIRECTORY = Path("/run/spool")
KINDS = ["put"] * 6 + ["power"] * 3 + ["commit", "refuse", "restart", "kill later", "short writes", "fails"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11)), max_size=40)


class WorkerThread:
    """Runs at once."""

    async def run(self, function, *args):
        return function(*args)

    async def close(self) -> None:
        pass


class Threads:
    def new_worker(self, name: str) -> WorkerThread:
        return WorkerThread()


class Machine:
    """A spool, in one process after the other. `held`: what was acknowledged, with its group; `unsure`: what was under way when a
    process ended, or was committed or refused, so that it may be there or not."""

    def __init__(self, seed: int, fsync: bool):
        self.disk = SimulatedDisk(Random(seed))
        self.settings = BufferConfig(durability="disk", fsync=fsync)
        self.held: dict[str, int] = {}
        self.unsure: dict[str, int] = {}
        self.made = 0
        self._calls_left: int | None = None
        self.disk.on_operation = self._count
        self.start()

    def _count(self, process: Process, operation: str, path: Path) -> None:
        if self._calls_left is not None:
            self._calls_left -= 1
            if self._calls_left < 0:
                self._calls_left = None
                process.end()

    def start(self) -> None:
        self.process, self._calls_left = Process(), None
        self.disk.short_write_rate = 0.0
        self.disk.allow_operations(DIRECTORY)
        world = RealWorld()
        world.files, world.threads = self.disk.files_for(self.process), Threads()  # type: ignore[assignment]
        if world.files.stat(Path("/run")) is None:
            world.files.create_directory(Path("/run"))
            world.files.fsync_directory(Path("/"))
        self.told: list[str] = []
        report = lambda event, **facts: self.told.append(event)  # noqa: E731
        self.spool = Spool(DIRECTORY, self.settings, world=world, report_event=report, retry_seconds=0)

    async def recover(self) -> None:
        """In a new process, whatever became of the last one."""
        self.process.end()
        self.start()
        found = {
            kept.trajectory.trajectory_id: kept.trajectory.group_index
            for kept in await self.spool.recover_trajectories()
        }
        assert self.held.items() <= found.items()
        assert found.items() <= (self.held | self.unsure).items()
        self.held, self.unsure = found, {}
        assert self.spool.nbytes == self.disk.used_bytes

    async def do(self, step: str, number: int) -> None:
        group = number % 4
        match step:
            case "put":
                name = f"t{self.made}"
                self.made += 1
                trajectory = make_trajectory(self.made - 1, 20, group=group)
                self.unsure[name] = group
                await self.spool.put_trajectory(trajectory, encode_trajectory(trajectory), spill=number % 2 == 0)
                self.held[name] = self.unsure.pop(name)
            case "commit":
                self._forget([name for name, of in self.held.items() if of == group])
                await self.spool.delete_trained([group])
            case "refuse":
                names = [name for at, name in enumerate(self.held) if at % 6 == number % 6]
                refused = {(self.held[name], name): "why" for name in names}
                self._forget(names)
                await self.spool.remove_trajectories(refused)
            case "restart":
                await self.recover()
            case "power":
                if self.settings.fsync:
                    self.process.end()
                    self.disk.lose_power()
                else:
                    self.disk.write_back()
                await self.recover()
            case "kill later":
                self._calls_left = number
            case "short writes":
                self.disk.short_write_rate = 0.5
            case "fails":
                self.disk.refuse_operations(
                    DIRECTORY, errno.EIO, {"remove"} if number % 2 else {"append", "sync", "truncate"}
                )
                for _ in range(number):
                    await asyncio.sleep(0)
                asyncio.get_running_loop().call_later(0.001, self.disk.allow_operations, DIRECTORY)

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self.unsure[name] = self.held.pop(name)


@pytest.mark.long
@example(steps=[("put", 0), ("kill later", 3), ("put", 0), ("power", 0)], seed=0, fsync=True)
@example(steps=[("kill later", 3), ("put", 0), ("put", 0), ("power", 0)], seed=1, fsync=True)
@settings(max_examples=100)
@given(steps=STEPS, seed=st.integers(0, 2**32), fsync=st.booleans())
def test_what_is_acknowledged_is_there_until_it_is_committed_or_refused(steps, seed, fsync) -> None:
    async def main() -> None:
        machine = Machine(seed, fsync)
        await machine.spool.recover_trajectories()
        for step in [*steps, ("restart", 0)]:
            try:
                async with asyncio.timeout(20):
                    await machine.do(*step)
            except Ended:
                await machine.recover()
        # Nothing is left behind, and nothing counted that is not there.
        await machine.spool.delete_trained(range(4))
        assert (machine.spool.nbytes, machine.disk.used_bytes) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("operation", ["open", "map"])
def test_a_file_that_the_disk_does_not_give_at_the_start_is_no_damage(operation) -> None:
    async def main() -> None:
        machine = Machine(0, fsync=True)
        for number in range(8):
            await machine.do("put", number)
        path, asked = DIRECTORY / "000000001-0000.spool", []
        machine.process.end()
        machine.start()
        machine.disk.refuse_operations(path, errno.EIO, {operation})

        def recovers(_: Process, what: str, where: Path) -> None:
            if (what, where) == (operation, path):
                asked.append(what)
                if len(asked) == 3:
                    machine.disk.allow_operations(path)

        machine.disk.on_operation = recovers
        async with asyncio.timeout(20):
            found = await machine.spool.recover_trajectories()
        assert {kept.trajectory.trajectory_id for kept in found} == set(machine.held)
        assert (machine.spool.damages, machine.told) == ([], ["spool_stalled", "spool_goes_on"])
        await machine.spool.close()

    asyncio.run(main())
