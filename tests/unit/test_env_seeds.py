"""Equal task seeds give equal tasks: in any process, beside any other episode, and for libraries that draw from sets or from
the generators of the whole process."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from r3async.config import EnvConfig
from r3async.envs import Action
from r3async.envs.factory import build_environment_factory
from r3async.world.processes import actor_environment
from tests.helpers.playing import make_player, play_lease
from tests.helpers.serving import answer_ids, ready, renderer
from tests.unit.test_episodes import limits

SLOW_TASKS = {
    *("arc_agi", "figlet_font", "futoshiki", "group_anagrams", "intermediate_integration", "knight_swap"),
    *("polynomial_equations", "puzzle24", "rearc"),
}
"""Tasks of reasoning-gym 0.1.25 that took a second or more to make on two busy cores; the other 97 take 0.1 s at most,
but for five that take half a second."""


@pytest.fixture
def pooled(monkeypatch):
    """Make factories of `Unseeded`, whose processes have hash seeds of their own unless something sets one."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    made = []

    def make(**settings):
        made.append(build_environment_factory(EnvConfig(name="tests.helpers.envs:Unseeded", **settings)))
        return made[-1]

    yield make
    for factory in made:
        factory().pool.close()


async def play_texts(env, seed, beside=None):
    """Return what an episode of three turns shows; `beside` is reset and stepped in between."""
    texts = [(await env.reset(seed))[0].content]
    for turn in range(3):
        if beside is not None:
            await beside.reset(turn)
            await beside.step(Action("b"))
        texts.append((await env.step(Action("a"))).messages[0].content)
    return texts


async def test_episodes_of_one_task_in_several_processes_draw_the_same_numbers_and_orders(pooled):
    factory = pooled(workers=2)
    envs = [factory() for _ in range(4)]
    texts = await asyncio.gather(*(play_texts(env, 5) for env in envs))
    assert len({(await env.step(Action("a"))).metrics["pid"] for env in envs}) == 2
    assert texts == [texts[0]] * 4
    assert len(set(texts[0])) == 4  # each turn draws anew
    assert await play_texts(factory(), 6) != texts[0]


async def test_an_episode_draws_the_same_numbers_whatever_is_played_beside_it_in_its_process(pooled):
    factory = pooled(workers=1)
    assert await play_texts(factory(), 5, beside=factory()) == await play_texts(factory(), 5)


async def test_a_hash_seed_of_the_users_own_wins(pooled, monkeypatch):
    assert actor_environment(1)["PYTHONHASHSEED"] == "0"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert actor_environment(1)["PYTHONHASHSEED"] == "7"
    (first,) = await pooled(workers=1)().reset(5)
    assert first.content.endswith("seed 7")


class UnseededHere:
    """Draws from the generators of this process, in each of its methods; `shown` collects what every episode drew."""

    shown: list[list[str]]

    def __init__(self):
        from tests.helpers.envs import Unseeded

        self.drawn, self.inner = [], Unseeded()
        self.shown.append(self.drawn)

    async def reset(self, task_seed):
        self.drawn.append(self.inner.made + self.inner.reset(task_seed))
        await asyncio.sleep(0)
        return self.drawn[-1]

    async def step(self, action):
        result = self.inner.step(action)
        self.drawn.append(result.messages[0].content)
        await asyncio.sleep(0)
        return result


async def test_episodes_that_overlap_in_this_process_draw_the_numbers_of_their_task():
    UnseededHere.shown = []
    chat = renderer()
    settings = limits(max_total_tokens=4096, max_prompt_tokens=2048)
    player = make_player(UnseededHere, await ready(answer_ids(chat, "a")), chat, settings, [])
    await asyncio.gather(play_lease(player, 0, 9, range(3)), play_lease(player, 1, 8, range(3)))
    groups = UnseededHere.shown[:3], UnseededHere.shown[3:]
    assert len(groups[0][0]) > 2
    assert all(group == [group[0]] * 3 for group in groups)
    assert groups[0][0] != groups[1][0]


@pytest.mark.long
def test_the_tasks_of_reasoning_gym_are_the_same_in_two_runs_whose_hash_seeds_differ():
    from reasoning_gym.factory import DATASETS

    names = sorted(DATASETS.keys() - SLOW_TASKS)
    assert len(names) == 106 - len(SLOW_TASKS)
    command = [sys.executable, "-m", "tests.helpers.reasoning_gym_tasks", *names]
    runs = [
        subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE) for seed in "12"
    ]
    one, other = (json.loads(run.communicate(timeout=200)[0]) for run in runs)
    assert sorted(one) == names
    assert one == other
