"""A run's driver: what it does if a conductor ends, is lost, does not answer, or is to stop. Its actors are stand-ins."""

import asyncio
from types import SimpleNamespace

import pytest

from r3async.actors import driver
from r3async.actors.driver import RunHandle, RunLauncher, supervise_run
from r3async.actors.fleet_scaler import FleetScaler
from r3async.actors.process import ProcessLost, RunFailed
from r3async.checkpoint.run_starts import mark_run_directory
from r3async.config import config_to_toml, load_config
from r3async.record.reading import read_json_objects
from r3async.world import ActorLostError
from tests.helpers.world import Clock, Outside, StandIn

LIMIT = 60.0
ENDED = {"steps": 3, "stopped": False, "updates": 3, "without_update": {}, "model": "model"}
STALL = 100.0
RESERVED = ()


class Conductor(StandIn):
    """Answers with a status; `run` ends with `result` when `ends` is set. `deaf`: it answers nothing."""

    def __init__(self, result=ENDED):
        self.result, self.ends, self.deaf, self.stopped = result, asyncio.Event(), False, 0
        self.rows, self.since = [], []

    async def run(self):
        await self.ends.wait()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def get_status(self, since):
        if self.deaf:
            await asyncio.Event().wait()
        self.since.append(since)
        return {"rows": [r for r in self.rows if r > since], "processes": {"conductor": (7, "here")}}

    async def request_stop(self):
        self.stopped += 1
        self.result = ENDED | {"stopped": True}
        self.ends.set()


class Person:
    """Looks at each status with `look`."""

    def __init__(self, look=lambda status: None):
        self.stop_requested, self.shown_step, self.said, self.look = False, 0, [], look
        self.print_line = self.said.append
        self.report_event = self.show_phase = lambda *args, **kwargs: None
        self.loads = 0

    def begin_loading(self):
        self.loads += 1

    def confirm_started(self):
        self.look(None)

    def show_status(self, status):
        self.shown_step = max([self.shown_step, *status["rows"]])
        self.look(status)

    def rewind_to_step(self, step):
        self.shown_step = step


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def world(clock):
    return Outside(clock)


@pytest.fixture
def follow(world, tmp_path, monkeypatch):
    """`await follow(person, *conductors)`: one for each start."""
    monkeypatch.setattr(driver, "RUN_POLL_SECONDS", 0.005)
    monkeypatch.setattr(driver, "STACK_DUMP_SECONDS", 0.005)
    monkeypatch.setattr(driver, "STATUS_TIMEOUT_SECONDS", 0.005)
    monkeypatch.setattr(driver, "LAST_STATUS_SECONDS", 0.005)

    async def again(config, run, say, report, *, world):
        return run

    monkeypatch.setattr(driver, "restart_run", again)

    async def call(person, *conductors, **settings):
        waiting = list(conductors)

        class Alone(RunLauncher):
            def start(self):
                crew = FleetScaler(
                    self.world, self.config, self.run_dir, self.events, lambda name, place: StandIn(), [], []
                )
                return RunHandle(self, waiting.pop(0), StandIn(), crew, RESERVED)

        overrides = [f"supervise.{name}={value}" for name, value in settings.items()]
        config = load_config("quickstart", [f"supervise.stall_seconds={STALL}", "supervise.patience=0.5", *overrides])
        (tmp_path / "config.toml").write_text(config_to_toml(config))
        mark_run_directory(tmp_path)
        run = SimpleNamespace(path=tmp_path, resume_from=None)
        await asyncio.wait_for(supervise_run(world, config, tmp_path, run, person, Alone), LIMIT)

    return call


async def test_a_run_that_ends_is_shown_to_its_last_row_and_its_actors_are_ended(follow, world):
    conductor = Conductor()

    def look(status):
        if status is not None and conductor.since[-1] == 2:
            conductor.rows = [1, 2, 3]
            conductor.ends.set()
        elif not conductor.ends.is_set():
            conductor.rows = [1, 2]

    person = Person(look)
    await follow(person, conductor)
    assert person.shown_step == 3
    assert any(line.startswith("trained model: ") for line in person.said)
    assert [actor for actor, restart in world.killed if actor is conductor and not restart]
    assert (7, "here") in world.killed
    assert (world.released, world.disconnected) == ([RESERVED], 1)


@pytest.mark.parametrize("lingers", [3, 10_000])
async def test_processes_are_killed_once_they_have_had_time_to_end(follow, world, lingers, monkeypatch):
    """Of one that is killed before, Ray says on the console that a worker died."""
    monkeypatch.setattr(driver, "EXIT_SECONDS", 0.5)
    conductor, world.lingers = Conductor(), lingers
    conductor.ends.set()
    await follow(Person(), conductor)
    ends = [("ended", 7)] if lingers == 3 else []
    assert [what for what in world.killed if 7 in what] == [*ends, (7, "here")]
    assert (lingers - world.lingers > 3) == (lingers != 3)


@pytest.mark.parametrize("loss", [ActorLostError("it was killed"), ProcessLost("the learner's process was lost")])
async def test_a_loss_restarts_the_run_and_a_failure_does_not(follow, world, loss):
    first, second = Conductor(loss), Conductor()
    first.ends.set()
    second.ends.set()
    person = Person()
    await follow(person, first, second, max_run_restarts=1)
    assert person.loads == 1
    assert world.disconnected == 2
    assert any("(1 of 1, supervise.max_run_restarts)" in line for line in person.said)
    failed = Conductor(RunFailed("the model has no MoE layer"))
    failed.ends.set()
    with pytest.raises(RunFailed, match="no MoE layer") as caught:
        await follow(Person(), failed, max_run_restarts=1)
    assert not isinstance(caught.value, ProcessLost)


def deafened(conductor, then):
    """Return what a person looks with who sees no more than one status, and begins `then` with it."""

    def look(status):
        if status is not None and not conductor.deaf:
            conductor.deaf = True
            asyncio.get_running_loop().create_task(then())

    return look


@pytest.mark.parametrize(("action", "error"), [("restart", ProcessLost), ("abort", RunFailed)])
async def test_a_conductor_that_does_not_answer_is_named_and_its_process_is_ended(
    follow, world, clock, tmp_path, action, error
):
    conductor = Conductor()

    async def pass_time():
        for _ in range(60):
            clock.now += 2.0
            await asyncio.sleep(0.01)

    person = Person(deafened(conductor, pass_time))
    with pytest.raises(error, match=r"the conductor has not answered for 1\d\d s \(limit 100 s") as caught:
        await follow(person, conductor, on_stall=action, max_run_restarts=0)
    assert isinstance(caught.value, ProcessLost) == (action == "restart")
    assert world.asked == [(7, "here")]
    assert (7, "here") in world.killed
    (stalled,) = [e for e in read_json_objects(tmp_path / "events.jsonl") if e["event"] == "stalled"]
    assert (stalled["stage"], stalled["action"]) == ("answering/conductor", action)


async def test_a_driver_that_was_stopped_itself_blames_nobody(follow, clock):
    conductor = Conductor()

    async def wake_up():
        clock.now += 10 * STALL
        await asyncio.sleep(0.1)
        conductor.ends.set()

    person = Person(deafened(conductor, wake_up))
    await follow(person, conductor)
    assert not any("has not answered" in line for line in person.said)
