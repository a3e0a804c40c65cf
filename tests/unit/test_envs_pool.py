"""Blocking environments in processes: what hangs, crashes or raises hurts its own episode and is told by name."""

import asyncio
import copy
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from r3async.config import ConfigError, EnvConfig
from r3async.envs import Action, EnvironmentFailed, HasOracle
from r3async.envs.errors import summarize_error
from r3async.envs.factory import build_environment_factory
from r3async.envs.pool import WorkerPool
from tests.helpers.processes import has_ended
from tests.helpers.rewards import mean_reward
from tests.helpers.transport import until

ECHO = "tests.helpers.envs:Echo"


def pool_of(factory):
    return factory().pool


@pytest.fixture
def make():
    """Makes factories; ends their processes."""
    made = []

    def factory(**settings):
        made.append(build_environment_factory(EnvConfig(**{"name": ECHO, "workers": 1, **settings})))
        return made[-1]

    yield factory
    for one in made:
        pool_of(one).close()


def where(messages):
    return int(messages[0].content.split()[-1])


async def test_an_episode_is_played_in_one_other_process_and_episodes_are_spread(make):
    factory = make(workers=2)
    envs = [factory() for _ in range(4)]
    assert pool_of(factory).workers == [], "no process is started before an episode is"
    pids = [where(await env.reset(seed)) for seed, env in enumerate(envs)]
    assert os.getpid() not in pids
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]
    for seed, env in enumerate(envs):
        assert (await env.step(Action(str(seed)))).reward == 0.5
        assert (await env.step(Action(str(seed + 1)))).done


async def test_an_oracle_in_another_process_answers_at_once(make):
    factory = make()
    assert isinstance(factory(), HasOracle)
    assert await mean_reward(factory, "oracle", 5) == 1.0


async def test_a_copy_repeats_the_answers_so_far(make):
    env = make()()
    await env.reset(3)
    await env.step(Action("3"))
    other = copy.deepcopy(env)
    assert other.oracle() == "4"
    assert (await other.step(Action("4"))).reward == (await env.step(Action("4"))).reward == 0.5


async def test_a_call_that_hangs_is_ended_with_its_process_and_the_next_episode_gets_a_new_one(make):
    factory = make(step_timeout=1.0)
    hanging, neighbour = factory(), factory()
    first = where(await hanging.reset(1))
    assert where(await neighbour.reset(2)) == first
    calls = [asyncio.create_task(env.step(Action(text))) for env, text in ((hanging, "hang"), (neighbour, "2"))]
    beats = 0
    while not all(call.done() for call in calls):
        await asyncio.sleep(0.02)
        beats += 1
    assert beats > 10, "the event loop continues"
    late, waiting = (call.exception() for call in calls)
    assert "`step` took longer than env.step_timeout = 1 s" in str(late)
    assert isinstance(waiting, EnvironmentFailed)  # and not a cancellation
    with pytest.raises(EnvironmentFailed, match=r"process of .* is lost: `step` took longer than env\.step_timeout"):
        await neighbour.step(Action("2"))
    assert not psutil.pid_exists(first)
    again = factory()
    assert where(await again.reset(1)) != first
    assert (await again.step(Action("1"))).reward == 0.5


async def test_a_tool_that_hangs_is_ended_with_the_process_that_waits_for_it(make, tmp_path):
    mark = tmp_path / "pid"
    env = make(step_timeout=2.0)()
    await env.reset(1)
    with pytest.raises(EnvironmentFailed, match=r"env\.step_timeout = 2 s"):
        await env.step(Action(f"use a tool that hangs {mark}"))
    assert not psutil.pid_exists(int(mark.read_text()))


async def test_what_is_raised_there_is_told_with_the_last_frame_and_the_process_stays(make):
    factory = make()
    env, neighbour = factory(), factory()
    there = where(await neighbour.reset(2))
    for answer, error in (("raise", "ValueError: the dice rolled off the table"), ("quit", "SystemExit: no licence")):
        await env.reset(1)
        with pytest.raises(EnvironmentFailed, match=r"(?s)helpers/envs\.py.*in step.*" + error) as caught:
            await env.step(Action(answer))
        raised = summarize_error(caught.value)
        assert raised.error == error
        assert re.fullmatch(r"envs\.py:\d+ in step", raised.place)
        assert raised.trace.rstrip().endswith(error)
        assert summarize_error(pickle.loads(pickle.dumps(caught.value))) == raised  # as it crosses to the conductor
    for answer, error in (
        ("nonsense", r"must return a StepResult; yours returned str: write StepResult"),
        ("half a character", r"(?s)raised in `step`.*surrogates not allowed"),
    ):
        with pytest.raises(EnvironmentFailed, match=error):
            await env.step(Action(answer))
    assert (await neighbour.step(Action("2"))).reward == 0.5
    assert where(await factory().reset(3)) == there


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("crash", "ended by itself in `step`, with exit code -9"),
        ("exit", "ended by itself in `step`, with exit code 7"),
        ("no reply", "its process sent what is no reply"),
    ],
)
async def test_a_lost_process_is_reported_with_how_it_was_lost_and_replaced(make, answer, message):
    factory = make()
    env = factory()
    there = where(await env.reset(1))
    with pytest.raises(EnvironmentFailed, match=message):
        await env.step(Action(answer))
    assert where(await factory().reset(2)) != there


async def test_a_class_that_does_not_work_in_another_process_says_why(make):
    with pytest.raises(EnvironmentFailed, match=r"(?s)raised in `reset`.*not in this process"):
        await make(name="tests.helpers.envs:Stubborn")().reset(1)


async def test_an_environment_is_closed_when_it_is_done_and_when_it_is_forgotten(make, tmp_path):
    mark = tmp_path / "closed"
    factory = make(args={"mark": str(mark)})
    mark.unlink()  # the one that was constructed to check the arguments
    env, forgotten = factory(), factory()
    await env.reset(1)
    await env.step(Action(""))
    await env.step(Action(""))
    await until(mark.exists)
    await forgotten.reset(1)
    del forgotten
    gc.collect()
    await until(lambda: mark.read_text().count("closed") == 2)


@pytest.mark.long
async def test_environments_may_be_forgotten_at_any_moment(make):
    """Garbage is collected anywhere, also while a call is handed to a process."""
    factory, before = make(), gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for seed in range(30):
            env = factory()
            env.itself = env  # so that only the collector finds it
            await env.reset(seed)
    finally:
        gc.set_threshold(*before)
    del env
    gc.collect()
    assert len(pool_of(factory).workers[0].active_instances) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("when", "action"),
    [
        ("before it reads", "1"),
        ("before it reads a large action", "x" * 4_000_000),
        ("in the middle of its reply", "half a reply"),
    ],
    ids=["at once", "with a large action", "within its reply"],
)
async def test_a_process_that_is_stopped_is_ended_and_another_takes_its_place(make, when, action):
    """An action of more bytes than the connection buffers waits for a reader: the time limit is of that, too. Of a reply, the
    first bytes may have come, and the rest never does."""
    factory = make(step_timeout=1)
    env = factory()
    pid = where(await env.reset(1))
    if when.startswith("before"):
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentFailed, match=r"env\.step_timeout = 1 s; its process was ended"):
        await asyncio.wait_for(env.step(Action(action)), 120)
    assert not psutil.pid_exists(pid)
    again = factory()
    assert where(await asyncio.wait_for(again.reset(1), 30)) != pid
    assert (await again.step(Action("1"))).reward == 0.5


async def test_large_messages_pass_whole_in_both_directions(make):
    env = make()()
    await env.reset(1)
    assert (await env.step(Action("repeat" + "é" * 3_000_000))).messages[0].content == "é" * 3_000_000


async def test_closing_the_pool_ends_its_processes_and_what_they_play(make):
    factory = make(step_timeout=60)
    env = factory()
    pid = where(await env.reset(1))
    hanging = asyncio.create_task(env.step(Action("hang")))
    await asyncio.sleep(0.3)
    pool_of(factory).close()
    with pytest.raises(EnvironmentFailed, match="pool of environments was closed"):
        await asyncio.wait_for(hanging, 120)
    assert not psutil.pid_exists(pid)


OWNER = """
import asyncio, sys
from r3async.config import EnvConfig
from r3async.envs import Action
from r3async.envs.factory import build_environment_factory

async def main():
    env = build_environment_factory(EnvConfig(name="tests.helpers.envs:Echo", workers=1, step_timeout=600))()
    print((await env.reset(1))[0].content.split()[-1], flush=True)
    if sys.argv[1] == "hang":
        await env.step(Action("hang"))
    elif sys.argv[1] == "wait":
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("doing", ["hang", "wait", "leave", "stopped"])
def test_no_process_outlives_its_owner(doing):
    """Neither one killed with -9, whose environments wait, hang or are stopped, nor one that ends by itself."""
    command = [sys.executable, "-c", OWNER, "wait" if doing == "stopped" else doing]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        if doing == "stopped":
            os.kill(pid, signal.SIGSTOP)
        if doing != "leave":
            assert not has_ended(pid)
            time.sleep(0.5)
            owner.kill()
        owner.wait(120)
        asyncio.run(until(lambda: has_ended(pid)))


async def test_modules_found_here_are_found_there(make, tmp_path, monkeypatch):
    (tmp_path / "my_own_game.py").write_text(
        "from r3async.envs import StepResult\n"
        "class Game:\n"
        "    def reset(self, task_seed): return 'mine'\n"
        "    def step(self, action): return StepResult(1.0, done=True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    env = make(name="my_own_game:Game")()
    assert (await env.reset(1))[0].content == "mine"
    assert (await env.step(Action(""))).reward == 1.0


async def test_an_async_class_is_played_where_it_is_asked():
    env = build_environment_factory(EnvConfig(name="tests.helpers.envs:Awaiting"))()
    assert where(await env.reset(1)) == os.getpid()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "tests.helpers.envs:half_for_trying"}, "is no environment, but a function"),
        ({"name": "os:getcwd"}, "is no environment"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_environment_factory(EnvConfig(**{"name": ECHO, **settings}))


@pytest.mark.parametrize("setting", ["workers", "step_timeout", "start_timeout"])
def test_the_settings_of_the_pool_must_be_positive(setting):
    with pytest.raises(ValueError, match=setting):
        EnvConfig(**{setting: 0})


def test_a_pool_that_is_forgotten_at_the_end_of_the_interpreter_waits_for_no_frozen_thread(monkeypatch):
    pool = WorkerPool("tests.helpers.envs:Absent", {}, EnvConfig())
    worker, thawed = pool.pick_worker(), threading.Event()
    monkeypatch.setattr(worker, "stop", thawed.wait)  # for a thread that has its lock, and is frozen
    monkeypatch.setattr("r3async.envs.pool.sys.is_finalizing", lambda: True)
    forgetting = threading.Thread(target=pool.__del__, daemon=True)
    forgetting.start()
    forgetting.join(2)
    waits = forgetting.is_alive()
    thawed.set()
    assert not waits
