"""The conductor's watch: which stage is blamed, and what is done about it. Generators and learner are stand-ins."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from r3async.actors.fleet import Fleet
from r3async.actors.learner import LearnerStatus
from r3async.actors.lease_dispatcher import LeaseDispatcher
from r3async.actors.process import ProcessLost, RunFailed
from r3async.actors.stalls import StallMonitor
from r3async.config import ScheduleConfig, load_config
from r3async.schedule.run_ahead import AdmissionController
from r3async.schedule.watchdog import Watchdog
from r3async.world.real import REAL_WORLD
from r3async.world.stack_dumps import dump_stacks
from tests.helpers.transport import until
from tests.helpers.world import Clock, Outside, Reports, StandIn

STALL = 100.0
LIMITS = {"training": 3600.0, "publishing": 230.0, "installing": 165.0}


class Actor(StandIn):
    """Answers `dump_stacks`, `get_status` with `says`, and `missing_episodes` with `lacks`; nothing at all while it is
    `deaf`."""

    def __init__(self):
        self.deaf, self.reasons = False, []
        self.says = LearnerStatus(pid=11, host="far", doing="between steps", lacking={4: [1]})
        self.lacks = {}
        self.asked = []

    async def answer(self, name, *args):
        self.asked.append(name)
        await until(lambda: not self.deaf)
        if name == "missing_episodes":
            return self.lacks
        self.reasons += args
        return self.says


class Run:
    """A run at rest: two healthy generators that play, and a learner between two steps."""

    def __init__(self, tmp_path, *overrides):
        settings = [f"supervise.stall_seconds={STALL}"]
        self.config = load_config("quickstart", [*settings, *overrides])
        self.clock, self.learner, self.handles, self.events = Clock(), Actor(), [Actor(), Actor()], Reports()
        logger = SimpleNamespace(error=self.events, warning=self.events)
        named = {f"generator-{i}": handle for i, handle in enumerate(self.handles)}
        self.fleet = Fleet(self.config, logger, named, clock=self.clock)
        for generator in self.fleet:
            generator.health.mark_loaded()
            generator.health.mark_installed(0, 0)
            generator.process = 21, "far"
        self.admission = AdmissionController(
            ScheduleConfig(max_staleness=0, prompts_per_step=1, group_size=4), choose_task=lambda group: 0
        )
        self.stop_requested, self.evaluator = asyncio.Event(), SimpleNamespace(is_running=False)
        self.dispatcher = LeaseDispatcher(self.admission, self.fleet, self.learner, self.stop_requested)
        self.loads = self.dispatcher.load_reports
        self.loads.update({name: self.load() for name in named})
        self.world = Outside(self.clock)
        self.watch = StallMonitor(
            self.world,
            tmp_path,
            dispatcher=self.dispatcher,
            installer=SimpleNamespace(
                newest_published=SimpleNamespace(version=0), fleet=self.fleet, learner=self.learner
            ),
            evaluator=self.evaluator,
            write_seconds=200.0,
            stop_requested=self.stop_requested,
        )
        self.first = self.fleet["generator-0"]

    @staticmethod
    def load(**values):
        return {"playing": 0, "generated_tokens": 5, "ended": 0, "unacknowledged": 0, "acknowledged": 0, **values}

    def lease_all(self):
        while self.admission.lease_group("generator-1", free_episodes=4):
            pass

    @contextlib.asynccontextmanager
    async def watching(self):
        """Let the watch look at everything again and again."""
        task = asyncio.create_task(self.watch.run())
        yield task
        task.cancel()
        await asyncio.wait([task])

    async def let_look(self):
        """Wait until the watch has the learner's next answer, or, while that is deaf, until it waits for one. Then the watch
        sleeps."""

        def answering():
            return self.watch.watchdog.describe_stages().get("answering/learner", {"done": 0, "waiting": 0})

        before = answering()["done"]
        async with asyncio.timeout(10):
            while not (answering()["waiting"] if self.learner.deaf else answering()["done"] > before):  # noqa: ASYNC110
                await asyncio.sleep(0)

    def all_answer(self):
        for generator in self.fleet:
            self.fleet.note_answer(generator)

    async def stand_still(self, seconds):
        """Let the watch see that nothing has moved for so many seconds although all generators answer, and do what follows.
        Raises what that raises."""
        async with self.watching() as task:
            self.all_answer()
            await self.let_look()
            self.clock.now += seconds
            self.all_answer()
            await until(lambda: task.done() or self.events)
            looking = asyncio.create_task(self.let_look())
            await asyncio.wait([looking, task], return_when=asyncio.FIRST_COMPLETED)
            looking.cancel()
            if task.done():
                await task

    def after(self, seconds, each=lambda second: None):
        """Stages that have stalled when it was looked for so long."""
        end = self.clock.now + seconds
        while self.clock.now <= end:
            each(self.clock.now)
            self.watch.observe_stages()
            self.clock.now += 5
        return [stall.stage for stall in self.watch.watchdog.find_stalls()]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr("r3async.actors.stalls.STALL_CHECK_SECONDS", 0.005)


async def begun(tmp_path, *overrides):
    """Return a run whose watch has the learner's first answer."""
    run = Run(tmp_path, *overrides)
    async with run.watching():
        await run.let_look()
    return run


@pytest.fixture
async def run(tmp_path):
    run = await begun(tmp_path)
    run.lease_all()
    return run


def test_a_run_in_which_nobody_has_work_and_the_learner_is_busy_otherwise_has_not_stalled(run):
    assert run.after(10 * STALL) == []


def test_a_generator_with_episodes_that_makes_neither_tokens_nor_ends_is_named(run):
    run.loads["generator-0"] = run.load(playing=3)
    assert run.after(STALL - 10) == []
    assert run.after(20) == ["playing/generator-0"]


def test_episodes_that_wait_for_weights_are_no_stall(run):
    run.loads["generator-0"] = run.load(playing=3, held=3)
    assert run.after(5 * STALL) == []
    run.loads["generator-0"] = run.load(playing=3, held=2)
    assert run.after(STALL + 10) == ["playing/generator-0"]


@pytest.mark.parametrize("counter", ["generated_tokens", "ended"])
def test_slow_episodes_are_no_stall(run, counter):
    def play(second):
        run.loads["generator-0"] = run.load(playing=3, **{counter: second // 50})

    assert run.after(5 * STALL, play) == []


async def test_a_generator_that_does_not_take_what_there_is_to_play_is_named_unless_the_run_rests(tmp_path):
    run = await begun(tmp_path)
    run.loads["generator-1"] = run.load(playing=1)
    run.evaluator.is_running = True

    def play(second):
        run.loads["generator-1"] = run.load(playing=1, ended=second)

    assert run.after(2 * STALL, play) == []
    run.evaluator.is_running = False
    assert run.after(STALL + 10, play) == ["playing/generator-0"]


@pytest.mark.parametrize("steps", [1, 2, 3], ids=["lost", "starting", "stale"])
def test_a_generator_that_is_restarted_has_not_stalled(run, steps):
    run.loads["generator-0"] = run.load(playing=3)
    run.after(STALL - 20)
    for step in ["mark_lost", "begin_restart", "mark_loaded"][:steps]:
        getattr(run.first.health, step)()
    run.loads.pop("generator-0")  # as the conductor does
    run.learner.says.doing = "waiting"
    assert run.after(10 * STALL) == []


def test_trajectories_that_nobody_acknowledges_are_a_stall_of_sending(run):
    run.loads["generator-1"] = run.load(unacknowledged=2)
    assert run.after(STALL + 10) == ["sending/generator-1"]


@pytest.mark.parametrize("stage", ["training", "publishing", "installing"])
def test_what_has_a_limit_of_its_own_is_given_that(run, stage):
    if stage == "training":
        run.learner.says.doing = "training"
    elif stage == "publishing":
        run.learner.says.writing = True
    else:
        run.first.open_calls, run.first.answer_seconds = 1, 150.0
    name = "installing/generator-0" if stage == "installing" else stage
    assert run.after(LIMITS[stage] - 10) == []
    assert run.after(20) == [name]


def test_a_learner_that_waits_while_nobody_has_work_is_a_stall_of_the_run(run):
    run.learner.says.doing = "waiting"
    run.evaluator.is_running = True
    assert run.after(3 * STALL) == []  # an evaluation
    run.evaluator.is_running = False
    run.loads["generator-0"] = run.load(playing=3)
    assert run.after(STALL + 10) == ["playing/generator-0"]  # whoever has work is to blame
    run.loads["generator-0"] = run.load(playing=0)
    assert run.after(STALL + 10) == ["run"]


async def test_the_groups_of_one_that_stays_silent_are_leased_again_less_what_has_arrived(tmp_path):
    run = await begun(tmp_path, "supervise.silence_seconds=10")
    assert run.admission.lease_group("generator-0", free_episodes=4)
    run.learner.lacks = {0: [1, 3]}

    async def look_after(seconds):
        run.clock.now += seconds
        run.fleet.note_answer(run.fleet["generator-1"])
        for _ in range(4):  # one that is passed over because the clock has jumped, and what it begins
            await run.let_look()
        return run.admission.list_leased_groups("generator-0")

    async with run.watching():
        assert await look_after(11) == [0]
        assert run.first.state == "suspect"
        assert await look_after(8) == [0]
        assert await look_after(2) == []
    returned = {"generator": "generator-0", "pid": 21, "seconds": 21.0, "leased_again": [0]}
    assert run.events[-1] == ("leases_returned", returned)
    again = run.admission.lease_group("generator-1", free_episodes=4)
    assert (again.group_index, again.episode_indices) == (0, (1, 3))


async def test_one_that_answers_while_the_learner_is_asked_keeps_its_groups(tmp_path):
    run = await begun(tmp_path, "supervise.silence_seconds=10")
    assert run.admission.lease_group("generator-0", free_episodes=4)
    run.clock.now += 25
    run.learner.lacks = {0: [1, 3]}
    run.learner.deaf = True
    async with run.watching():
        await until(lambda: "missing_episodes" in run.learner.asked)
        run.fleet.note_answer(run.first)
        run.learner.deaf = False
        for _ in range(3):
            await run.let_look()
    assert run.admission.list_leased_groups("generator-0") == [0]


async def test_a_learner_that_does_not_answer_is_a_stall_and_one_that_does_is_none(run):
    assert run.after(2 * STALL) == []
    run.learner.deaf = True
    async with run.watching():
        await run.let_look()
        assert run.after(STALL + 10) == ["answering/learner"]


async def test_a_learner_that_is_frozen_in_a_step_is_not_judged_by_what_it_said_before(tmp_path):
    """Its step was taken for stalled, which ends the run, before its silence was, which restarts the learner."""
    run = await begun(tmp_path, "supervise.on_stall=warn")
    run.lease_all()
    step = run.watch.config.supervise.limits.step
    run.learner.says.doing = "training"
    assert run.after(step - STALL / 2) == []
    run.learner.deaf = True
    async with run.watching():
        await run.let_look()
        assert run.after(STALL - 10) == []
        assert run.after(20) == ["answering/learner"]
        run.learner.deaf = False
        await run.let_look()
        assert run.after(0) == []
        assert run.after(STALL / 2 + 10) == ["training"]


async def test_a_warning_only_says_it_with_queues_and_stacks(tmp_path):
    run = await begun(tmp_path, "supervise.on_stall=warn")
    run.lease_all()
    run.loads["generator-0"] = run.load(playing=3)
    await run.stand_still(123.4)
    ((event, facts),) = run.events
    assert (event, facts["stage"]) == ("stalled", "playing/generator-0")
    assert (facts["seconds"], facts["limit"], facts["waiting"], facts["action"]) == (123.4, STALL, 3, "warn")
    assert facts["queues"]["playing/generator-0"]["waiting"] == 3
    assert facts["learner"].lacking == {4: [1]}
    assert [g["state"] for g in facts["generators"]] == ["healthy", "healthy"]
    assert "test_a_warning_only_says_it" in (tmp_path / "stacks" / "conductor.txt").read_text()
    assert all(actor.reasons == ["playing/generator-0 did nothing for 123 s"] for actor in (run.learner, *run.handles))
    assert run.world.killed == []


async def test_a_stalled_generator_is_restarted_by_ending_its_process(run):
    run.loads["generator-0"] = run.load(playing=3)
    await run.stand_still(123.4)
    assert run.world.killed == [(run.handles[0], True)]
    assert run.events[0][1]["action"] == "restart"
    assert run.first.end_reason.startswith("generator-0, in `playing`, did nothing")


async def test_a_generator_that_stands_still_in_several_stages_is_restarted_once(run):
    """Or the second restart would end the process that the first one has begun."""
    run.loads["generator-0"] = run.load(playing=1, unacknowledged=1)
    run.loads["generator-1"] = run.load(playing=1)
    await run.stand_still(101.0)
    assert run.world.killed == [(run.handles[0], True), (run.handles[1], True)]
    stalled = [facts["stage"] for event, facts in run.events if event == "stalled"]
    assert stalled == ["playing/generator-0", "playing/generator-1"]
    assert run.after(0) == ["playing/generator-0", "sending/generator-0", "playing/generator-1"]


async def test_one_that_does_not_answer_is_killed_as_a_process(run, monkeypatch):
    monkeypatch.setattr("r3async.actors.process.KILL_AFTER_SECONDS", -1)
    run.world.lingers = 100
    run.loads["generator-0"] = run.load(playing=3)
    await run.stand_still(123.4)
    assert run.world.killed == [(run.handles[0], True), (21, "far")]


@pytest.mark.parametrize(
    ("action", "state", "seconds", "message"),
    [
        ("abort", {"playing": 3}, 123, r"generator-1, in `playing`, did nothing for 123 s .* 3 units of work waited"),
        (
            "restart",
            {"doing": "training"},
            3723,
            r"the learner, in `training`, did nothing for 3723 s \(limit 3600 s\), though 1 unit of work waited",
        ),
        ("abort", {"deaf": True}, 123, r"the learner has not answered for 123 s"),
        (
            "abort",
            {"storing": {"full": False}},
            123,
            r"the spool's disk has taken nothing for 123 s \(limit 100 s\), and generators wait",
        ),
        ("abort", {"weights_wait": {"why": "full"}}, 123, r"the disk of weights has taken nothing for 123 s"),
    ],
)
async def test_what_cannot_be_restarted_ends_the_run_and_is_named(
    tmp_path, monkeypatch, action, state, seconds, message
):
    monkeypatch.setattr("r3async.actors.stalls.DUMP_TIMEOUT_SECONDS", 0.01)
    run = await begun(tmp_path, f"supervise.on_stall={action}")
    run.lease_all()
    run.learner.deaf = state.pop("deaf", False)
    run.loads["generator-1"] = run.load(playing=state.pop("playing", 0))
    for name, value in state.items():
        setattr(run.learner.says, name, value)
    with pytest.raises(RunFailed, match=message):
        await run.stand_still(seconds)
    assert run.events[0][1]["action"] == "abort"


async def test_a_run_in_which_everybody_waits_ends_and_says_what_is_missing_and_where_the_stacks_are(run):
    run.learner.says.doing = "waiting"
    message = r"nobody has work.*on_stall = 'restart'.*Missing by group: \{4: \[1\]\}.*stacks"
    with pytest.raises(RunFailed, match=message):
        await run.stand_still(123.4)
    assert run.events[0][1]["action"] == "abort"


async def test_a_learner_that_does_not_answer_is_ended_and_the_run_restarts_from_its_newest_checkpoint(
    run, monkeypatch
):
    monkeypatch.setattr("r3async.actors.stalls.DUMP_TIMEOUT_SECONDS", 0.01)
    run.learner.deaf = True
    with pytest.raises(ProcessLost, match=r"the learner has not answered for 123 s \(limit 100 s\); its process was"):
        await run.stand_still(123.4)
    assert run.world.killed == [(run.learner, False), (11, "far")]
    assert run.events[0][1]["action"] == "restart"


@pytest.mark.parametrize("full", [False, True])
async def test_while_storage_waits_no_generator_is_blamed_and_the_run_waits(run, full):
    """It was `sending` that stalled, and generators were killed for it one after the other."""
    run.loads["generator-0"] = run.loads["generator-1"] = run.load(unacknowledged=3)
    run.learner.says.doing = "waiting"
    run.learner.says.storing = {"why": "No space left", "seconds": 1.0, "full": full}
    run.evaluator.is_running = full  # then a checkpoint is on its way
    assert run.after(STALL - 10) == []
    assert run.after(20) == ([] if full else ["storing"])
    if not full:
        await run.stand_still(0)
        ((event, facts),) = run.events
        assert (event, facts["stage"], facts["action"]) == ("stalled", "storing", "warn")
    run.learner.says.storing, run.learner.says.doing = None, "training"
    assert run.after(STALL + 10) == ["sending/generator-0", "sending/generator-1"]


async def test_who_does_not_answer_is_asked_by_signal(run, monkeypatch):
    monkeypatch.setattr("r3async.actors.stalls.DUMP_TIMEOUT_SECONDS", 0.01)
    run.handles[0].deaf = run.handles[1].deaf = True
    run.first.process = 21, "near"
    run.loads["generator-0"] = run.load(playing=3)
    await run.stand_still(123.4)
    assert run.events[0][1]["did_not_answer"] == ["generator-0", "generator-1"]
    assert run.world.asked == [(21, "near"), (21, "far")]


BLOCKED = """
import sys, time
from pathlib import Path
from r3async.actors.process import prepare_process
from r3async.world.real import REAL_WORLD
def held_up():
    Path(sys.argv[1], "ready").touch()
    time.sleep(60)
lock = prepare_process(REAL_WORLD, Path(sys.argv[1]), "generator-0")
held_up()
"""


def wait_for(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_is_held_up_writes_its_stacks_to_its_log(tmp_path):
    log, processes = tmp_path / "logs" / "generator-0.log", REAL_WORLD.processes
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["ray::GeneratorActor", "-c", BLOCKED, str(tmp_path)]
    with subprocess.Popen(command, executable=sys.executable, env=environment) as process:
        try:
            wait_for((tmp_path / "ready").exists)
            assert not processes.request_stack_dump(process.pid, "far")
            assert processes.request_stack_dump(process.pid, processes.host)
            wait_for(lambda: "in held_up" in log.read_text())
            assert process.poll() is None
            assert not processes.kill_process(process.pid, "far")
            assert processes.is_alive(process.pid, processes.host)
            assert not processes.is_alive(process.pid, "far")
            assert processes.kill_process(process.pid, processes.host)
            assert process.wait(timeout=120) == -signal.SIGKILL
            assert not processes.is_alive(process.pid, processes.host)
        finally:
            process.kill()


def test_a_process_of_somebody_else_is_sent_nothing():
    processes = REAL_WORLD.processes
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not processes.request_stack_dump(process.pid, processes.host)
            assert not processes.kill_process(process.pid, processes.host)
            assert process.poll() is None
        finally:
            process.kill()
    assert not processes.kill_process(process.pid, processes.host)


@pytest.fixture
def clock():
    return Clock()


def names(stalls):
    return [stall.stage for stall in stalls]


def test_a_stage_with_work_that_does_nothing_stalls_and_one_without_work_does_not(clock):
    dog = Watchdog(clock, 10)
    for now in range(0, 13, 3):
        clock.now = now
        dog.observe_stage("learner", done=4, waiting=0)
        dog.observe_stage("generator", done=7, waiting=2)
        dog.observe_stage("transport", done=now, waiting=1)
    (stall,) = dog.find_stalls()
    assert (stall.stage, stall.seconds, stall.limit, stall.done, stall.waiting) == ("generator", 12, 10, 7, 2)


def test_time_without_work_does_not_count(clock):
    dog = Watchdog(clock, 10)
    dog.observe_stage("learner", 1, 0)
    clock.now = 100
    dog.observe_stage("learner", 1, 3)
    clock.now = 109
    dog.observe_stage("learner", 1, 3)
    assert not dog.find_stalls()
    clock.now = 110
    assert names(dog.find_stalls()) == ["learner"]


def test_time_in_which_nobody_knows_what_a_stage_did_does_not_count(clock):
    dog = Watchdog(clock, 10)
    dog.pause_stage("learner")
    dog.observe_stage("learner", 1, 3)
    clock.now = 6
    dog.observe_stage("learner", 1, 3)
    for clock.now in (20, 40):
        dog.pause_stage("learner")
        assert not dog.find_stalls()
    clock.now = 43
    dog.observe_stage("learner", 1, 3)
    assert not dog.find_stalls()
    clock.now = 44
    (stall,) = dog.find_stalls()
    assert stall.seconds == 10


def test_a_stall_is_told_once_and_again_only_after_the_stage_has_moved(clock):
    dog = Watchdog(clock, 10, {"slow": 50})
    dog.observe_stage("slow", 0, 1)
    dog.observe_stage("fast", 0, 1)
    clock.now = 20
    assert names(dog.take_new_stalls()) == ["fast"]
    assert dog.take_new_stalls() == []
    clock.now = 60
    assert names(dog.take_new_stalls()) == ["slow"]
    dog.observe_stage("fast", 1, 1)
    clock.now = 75
    assert names(dog.take_new_stalls()) == ["fast"]
    assert dog.describe_stages()["fast"] == {"done": 1, "waiting": 1, "still_for": 15}


def test_a_restarted_process_counts_from_zero_and_has_moved(clock):
    dog = Watchdog(clock, 10)
    dog.observe_stage("engine", 500, 1)
    clock.now = 9
    dog.observe_stage("engine", 0, 1)
    clock.now = 18
    assert not dog.find_stalls()


def test_a_stage_that_ended_is_not_missed(clock):
    dog = Watchdog(clock, 10)
    dog.observe_stage("engine", 5, 1)
    dog.forget_stage("engine")
    clock.now = 99
    assert not dog.find_stalls()


async def test_the_dump_names_every_thread_and_every_task_with_its_line(tmp_path):
    held = threading.Event()

    def wait_for_nothing():
        held.wait(20)

    async def wait_for_ever():
        await asyncio.sleep(20)

    threading.Thread(target=wait_for_nothing, name="stuck-thread", daemon=True).start()
    task = asyncio.create_task(wait_for_ever(), name="stuck-task")
    await asyncio.sleep(0)
    path = dump_stacks(tmp_path / "logs" / "stacks.txt", "transport stood still")
    dump_stacks(path, "again")
    held.set()
    task.cancel()
    text = path.read_text()
    assert text.count("====") == 2
    for part in ("transport stood still", "stuck-thread", "held.wait(20)", "stuck-task", "await asyncio.sleep(20)"):
        assert part in text
