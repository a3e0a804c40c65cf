"""Whole runs in one process: a run's actors on a simulated machine, in virtual time, with their records on the real
disk."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from pathlib import Path
from typing import Any

from dev.simulation.processes import HostProcess
from dev.simulation.world import SimulatedHost, Simulation
from r3async.actors.driver import RunLauncher, supervise_run
from r3async.actors.generator import GeneratorActor
from r3async.actors.run_directory import open_run_directory
from r3async.config import load_config
from r3async.envs import Action, Message, StepResult
from r3async.record.reading import read_json_objects
from r3async.record.trained_trajectories import TRAINED_FILE
from r3async.rollout.renderer import ChatRenderer
from r3async.world import Files
from r3async.world.files import make_directory

SCRIPTED = ["generator.engine=scripted", "learner.backend=scripted", "weights.directory=/memory"]
SMALL = [
    *SCRIPTED,
    "env.name=tests.sim.whole:Game",
    "env.args={}",
    "episode.max_turns=1",
    "algorithm.credit=trajectory",
    "generator.engine_args={ token_seconds = 0.02 }",
    "schedule.prompts_per_step=2",
    "schedule.group_size=4",
    "supervise.restart_backoff=0.1",
    "observe.timeline=false",
]
CALLBACKS = 300_000
MOST_SECONDS = 3600.0
"""Maximum seconds of virtual time of one simulation, more than any run needs that ends."""
LOOK_SECONDS = 0.05

Meddle = Callable[["Machine"], Awaitable[object]]


class Game:
    """An environment of one turn, which takes a moment. Rewards are 0 and 1."""

    async def reset(self, task_seed: int) -> list[Message]:
        return [Message("user", f"go {task_seed % 7}")]

    async def step(self, action: Action) -> StepResult:
        return StepResult(float(len(action.text) % 2), done=True)


_RENDERERS: dict[str, ChatRenderer] = {}


def renderer(path: str, args: Any) -> ChatRenderer:
    """Return the renderer of a path, read once: the tokenizer is on the real disk, and the same for all simulations."""
    if path not in _RENDERERS:
        _RENDERERS[path] = ChatRenderer.from_model(path, args)
    return _RENDERERS[path]


class Player(GeneratorActor):
    """A generator whose tokenizer is read once for all."""

    def make_renderer(self, model_path: str) -> ChatRenderer:
        return renderer(model_path, self.config.episode.template_args)


class Simulated(RunLauncher):
    """A launcher of the run's unchanged actors."""

    generator_class = Player


class Person:
    """The user who gave the command: remembers the messages, and stops the run on request."""

    def __init__(self) -> None:
        self.stop_requested = False
        self.shown_step = 0
        self.said: list[str] = []
        self.print_line = self.said.append

    def show_phase(self, text: str) -> None:
        pass

    def report_event(self, event: str, /, **facts: object) -> None:
        self.said.append(f"{event.replace('_', ' ')}: {' '.join(f'{k}={v}' for k, v in facts.items())}")

    def begin_loading(self) -> None:
        pass

    def confirm_started(self) -> None:
        pass

    def show_status(self, status: dict[str, Any]) -> None:
        for row in status["rows"]:
            self.shown_step = row["step"]

    def rewind_to_step(self, step: int) -> None:
        self.shown_step = step

    @property
    def screen(self) -> str:
        return "\n".join(self.said)


class Machine:
    """A simulated machine on which commands run one after the other; its disk keeps what they leave.

    Args:
        root: directory of the runs, with the same name on the simulated disk and on the real one.
        model: a model directory.
    """

    def __init__(self, root: Path, model: Path, seed: int | str = 0, **options: Any):
        self.root, self.model = root, model
        self.simulation = Simulation(seed, max_callbacks=CALLBACKS, max_seconds=MOST_SECONDS, **options)
        self.host = next(iter(self.simulation.hosts.values()))
        self.person = Person()
        self.run_dir = root / "run"
        self._records: dict[Path, tuple[bytes, list[dict[str, Any]]]] = {}
        self.files: Files = self.host.disk.files_for(self._outside())
        """Files of the machine, for code outside of its processes."""
        make_directory(root, files=self.files)
        copy_to(model, model, self.files)
        self.host.disk.write_back()

    def _outside(self) -> HostProcess:
        """Begin a process that survives a power loss of the machine."""
        return self.simulation.begin_process("outside", SimulatedHost("outside", self.host.disk, 0.0))

    # -- commands ----------------------------------------------------------------------------------------------------

    def train(
        self,
        *overrides: str,
        preset: str = "quickstart",
        settings: Sequence[str] = SMALL,
        pipeline: type[RunLauncher] = Simulated,
        meddle: Meddle | None = None,
        change: Callable[[Any], Any] = lambda config: config,
        killed: bool = False,
    ) -> Path:
        """Run `r3async train PRESET`, with `meddle(machine)` beside it, which must end before the run does.

        Returns the run's directory, copied to the real disk, which also happens if the command raises. `killed`: expect
        its process to end before the run.
        """
        config = change(load_config(preset, [*settings, f"model.path={self.model}", "name=run", *overrides]))
        loop, self.person = self.simulation.loop, Person()
        process = self.simulation.begin_process("driver", self.host)
        driving = loop.create_task(
            self._drive(process, config, pipeline), name="driver", context=process.context.copy()
        )
        beside = loop.create_task(self._beside(meddle), name="meddler", context=Context())
        try:
            ended = loop.create_future()
            process.add_end_callback(lambda: ended.done() or ended.set_result("its process ended"))
            loop.run_until_complete(asyncio.wait([driving, ended], return_when=asyncio.FIRST_COMPLETED))
            assert ended.done() == killed
            if not killed:
                driving.result()
        finally:
            self.simulation.end_process(process, "the command has ended")
            unfinished = not beside.done()
            beside.cancel()
            self.copy_back()
        assert not unfinished, "the run ended before what was to happen to it did"
        beside.result()
        return self.run_dir

    async def _drive(self, process: HostProcess, config: Any, pipeline: type[RunLauncher]) -> None:
        world, person = process.world, self.person
        run = await open_run_directory(config, self.run_dir, person.print_line, person.report_event, world=world)
        try:
            await supervise_run(world, config, self.model, run, person, pipeline)
        finally:
            run.lock.close()

    async def _beside(self, meddle: Meddle | None) -> None:
        if meddle is not None:
            await meddle(self)

    # -- for `meddle` ------------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition()` is true, and return its value."""
        while not (found := condition()):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        return found

    async def step(self, number: int) -> None:
        """Wait until `number` steps are in the record."""
        await self.until(lambda: len(self.rows()) >= number)

    async def event(self, name: str) -> dict[str, Any]:
        """Wait for an event of that name, and return the first."""
        return (await self.until(lambda: self.events(name)))[0]

    async def process(self, name: str) -> HostProcess:
        """Wait for a living process of that name, and return it."""
        return await self.until(lambda: self.simulation.find_process(name))

    async def kill(self, name: str) -> None:
        self.simulation.end_process(await self.process(name), "killed")

    async def kill_run(self) -> None:
        """Kill the run's command and those of its processes that could restart it."""
        for name in ("conductor", "learner", "driver"):
            await self.kill(name)

    async def freeze(self, name: str) -> HostProcess:
        self.simulation.freeze_process(process := await self.process(name))
        return process

    def thaw(self, process: HostProcess) -> None:
        self.simulation.thaw_process(process)

    # -- records -----------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        return self._objects("metrics.jsonl")

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Return all events, or those of a name."""
        return [event for event in self._objects("events.jsonl") if name in ("", event["event"])]

    def trained(self) -> list[dict[str, Any]]:
        return self._objects(TRAINED_FILE)

    def _objects(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of a record of the run. They are decoded again only if the file has changed, since `until`
        asks at every look."""
        path = self.run_dir / name
        if not self.files.stat(path):
            return []
        with self.files.open(path) as file:
            content = file.read()
        known, objects = self._records.get(path, (b"", []))
        if known != content:
            objects = read_json_objects(path, files=self.files)
            self._records[path] = content, objects
        return [*objects]

    @property
    def seconds(self) -> float:
        """The seconds of virtual time since the machine began."""
        return self.simulation.loop.now

    def copy_back(self) -> None:
        """Copy the run's directory from the simulated disk to the real one."""
        shutil.rmtree(self.run_dir, ignore_errors=True)
        copy_from(self.run_dir, self.files)

    def close(self) -> None:
        self.simulation.close()


def copy_to(source: Path, to: Path, files: Files) -> None:
    """Copy a real directory's files to the simulated disk."""
    make_directory(to, files=files)
    for path in sorted(source.iterdir()):
        if path.is_file():
            with files.open(to / path.name, exclusive=True) as file:
                file.append([path.read_bytes()])


def copy_from(path: Path, files: Files) -> None:
    """Copy a simulated file or directory to the same name on the real disk."""
    there = files.stat(path)
    if there is None:
        return
    if not there.is_directory:
        with files.open(path) as file:
            path.write_bytes(file.read())
        return
    path.mkdir(parents=True)
    for name in files.list_names(path):
        copy_from(path / name, files)
