"""Adapters, against the real packages."""

import asyncio
import gc
import itertools
import json
import sys

import gymnasium
import psutil
import pytest

from r3async.config import ConfigError, EnvConfig
from r3async.envs import Action, EnvironmentFailed, Message
from r3async.envs.adapters.gymnasium_games import write_colors_as_words
from r3async.envs.adapters.textarena_games import choose_random_move
from r3async.envs.factory import build_environment_factory
from r3async.envs.pool_worker import EnvironmentHost, WorkerCall, WorkerReply
from tests.helpers.rewards import mean_reward
from tests.helpers.verifiers import tasksets_in


@pytest.fixture(scope="module", autouse=True)
def tasksets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasksets")
    with tasksets_in(folder):
        yield folder


def make(name, args=None, **settings):
    return build_environment_factory(EnvConfig(name=name, args=args or {}, **{"workers": 1, **settings}))


async def say(env, *answers):
    return [await env.step(Action(answer)) for answer in answers]


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "countdown"])
@pytest.mark.long
async def test_reasoning_gym_pays_its_own_answers(task):
    factory = make(f"reasoning-gym:{task}")
    assert await mean_reward(factory, "oracle", 5) == 1.0
    env = factory()
    assert await env.reset(7) == await factory().reset(7) != await factory().reset(8)
    await env.reset(2**63 - 1)
    assert (await say(env, f"so it is <answer>{env.oracle()}</answer>"))[0].reward == 1.0
    await env.reset(1)
    assert (await say(env, "nothing of the kind"))[0].reward < 0.5


@pytest.mark.long
async def test_reasoning_gym_takes_the_tasks_settings_and_a_system_message():
    env = make("reasoning-gym:chain_sum", {"max_terms": 2, "max_digits": 1, "system": "be brief"})()
    system, asked = await env.reset(1)
    assert system == Message("system", "be brief")
    assert sum(asked.content.count(sign) for sign in "+-") == 1


async def test_gymnasium_draws_and_names_its_moves_and_ends():
    args = {"render_mode": "ansi", "is_slippery": False, "actions": ["left", "down", "right", "up"], "prompt": "Go!"}
    env = make("gymnasium:FrozenLake-v1", args)()
    (first,) = await env.reset(3)
    assert first.content == "Go!\n[on red: S]FFF\nFHFH\nFFFH\nHFFG"
    results = await say(env, "fly", *["down"] * 2, "right", "down", "right", "right")
    assert results[0].messages == [Message("user", "answer with one of: left, down, right, up")]
    assert "[on red: F]HFH" in results[1].messages[0].content
    assert [result.reward for result in results] == [0, 0, 0, 0, 0, 0, 1]
    assert results[-1].done
    await env.reset(4)
    assert [result.done for result in await say(env, "a", "b", "c")] == [False, False, True]


async def test_gymnasium_drawings_show_every_state_of_the_taxi_apart():
    texts = {}
    game = gymnasium.make("Taxi-v4", render_mode="ansi")
    game.reset(seed=1)
    for row, column, passenger, destination in itertools.product(range(5), range(5), range(5), range(4)):
        game.unwrapped.s = game.unwrapped.encode(row, column, passenger, destination)
        texts.setdefault(write_colors_as_words(game.render()), []).append((row, column, passenger, destination))
    assert len(texts) == 500
    env = make("gymnasium:Taxi-v4", {"render_mode": "ansi"})()
    (first,) = await env.reset(1)
    assert "\n| : :[on yellow:  ]: : |\n" in first.content
    assert "|[magenta: R]: " in first.content
    assert "|[blue bold: B]: |" in first.content


async def test_gymnasium_observations_are_plain_and_the_seed_deals_the_cards():
    factory = make("gymnasium:Blackjack-v1", {"actions": ["stick", "hit"]})
    hands = [(await factory().reset(seed))[0].content for seed in (1, 1, 2, 3, 4)]
    assert hands[0] == hands[1]
    assert len(set(hands)) > 1
    assert all(len(eval(hand)) == 3 for hand in hands)
    env = factory()
    await env.reset(1)
    (result,) = await say(env, "stick")
    assert result.done
    assert result.reward in (-1.0, 0.0, 1.0)


async def test_gymnasium_text_spaces_are_spoken_as_they_are():
    env = make("gymnasium:tests.helpers.envs:Parrot-v0", {"invalid_reward": -0.5})()
    wrong, right = await say(env, "far too long", (await env.reset(5))[0].content)
    assert (wrong.reward, wrong.done, right.reward, right.done) == (-0.5, False, 1.0, True)


async def test_textarena_alone_shows_what_is_new_and_pays_its_own_reward():
    env = make("textarena:GuessTheNumber-v0", {"min_number": 1, "max_number": 8})()
    (first,) = await env.reset(4)
    assert "between 1 and 8" in first.content
    low, high = 1, 8
    while True:
        (result,) = await say(env, f"[{(low + high) // 2}]")
        if result.done:
            break
        (news,) = result.messages
        assert "between 1 and 8" not in news.content
        low, high = ((low + high) // 2 + 1, high) if "higher" in news.content else (low, (low + high) // 2 - 1)
    assert result.reward == 1.0


async def test_textarena_games_that_play_at_once_keep_their_own_rng():
    """Games use the process's random numbers; whether others are played beside one must not change it."""

    async def game(env, beside=None):
        seen = [await env.reset(9)]
        for move in "04826":
            if beside is not None:
                await beside.reset(int(move))
            result = await env.step(Action(f"[{move}]"))
            seen.append(result)
            if result.done:
                break
        return seen

    factory = make("textarena:TicTacToe-v0")
    assert await game(factory()) == await game(factory(), beside=factory())


async def test_textarena_plays_an_opponent_of_ones_own_and_pays_the_winner():
    env = make("textarena:TicTacToe-v0", {"opponent": "tests.helpers.envs:first_free"})()
    await env.reset(1)
    results = await say(env, "[4]", "[1]", "[7]")  # the opponent takes 0 and 2
    assert "[Player 1] [0]" in results[0].messages[0].content
    assert [(result.reward, result.done) for result in results] == [(0, False), (0, False), (1, True)]
    await env.reset(1)
    assert (await say(env, "[3]", "[5]", "[8]"))[-1].reward == -1  # 0, 1 and 2 are the opponent's


async def test_textarena_seats_the_policy_second():
    env = make("textarena:TicTacToe-v0", {"seat": 1, "opponent": "tests.helpers.envs:first_free"})()
    (first,) = await env.reset(1)
    assert "You are Player 1" in first.content
    assert "[Player 0] [0]" in first.content


async def test_textarena_starts_games_whatever_error_tells_how_many_players_they_take():
    (first,) = await make("textarena:GermanWhist-v0")().reset(1)
    assert "Player 0" in first.content


def test_a_random_opponent_takes_a_move_that_was_offered():
    import random

    moves = {choose_random_move("[GAME] Available Moves: '[3]', '[5]'\n[Player 0]", random.Random(s)) for s in range(9)}
    assert moves == {"[3]", "[5]"}
    assert choose_random_move("Bid [bet] or [fold]\n[GAME] go", random.Random(1)) in ("[bet]", "[fold]")
    assert choose_random_move("nothing", random.Random(1)) == ""


@pytest.mark.long
async def test_verifiers_scores_a_single_turn_with_its_own_weights():
    factory = make("verifiers:vf_single_sums", {"taskset": {"size": 3}})
    env = factory()
    system, asked = await env.reset(5)
    assert (system, asked.role) == (Message("system", "add"), "user")
    assert await factory().reset(5) == [system, asked]
    right = str(2 * int(asked.content[0]))
    paid = []
    for answer in (right, "99", "many"):
        await env.reset(5)
        (result,) = await say(env, answer)
        assert result.done
        paid.append((result.reward, result.metrics))
    assert paid == [
        (1.0, {"rewards/right": 1, "rewards/brief": 1, "turns": 1}),
        (0.25, {"rewards/right": 0, "rewards/brief": 1, "turns": 1}),
        (0.0, {"rewards/right": 0, "rewards/brief": 0, "turns": 1}),
    ]


@pytest.mark.long
async def test_verifiers_tasks_are_numbered_so_that_each_is_posed_once_an_epoch():
    env = make("verifiers:vf_coached_sums", {"tasks": 9})()
    assert env.size == 9
    assert len({(await env.reset(seed))[0].content for seed in range(9)}) == 9


async def test_verifiers_multi_turn_environments_lead_the_conversation():
    env = make("verifiers:vf_coached_sums", {"tasks": 9})()
    (asked,) = await env.reset(2)
    results = await say(env, "no", "no", str(2 * int(asked.content[0])))
    assert [result.messages for result in results[:2]] == [[Message("user", "try again")]] * 2
    assert [result.done for result in results] == [False, False, True]
    assert [result.reward for result in results] == [0, 0, 1.5]  # finalize added one half
    await env.reset(2)
    assert (await say(env, "pass"))[0].done  # its own @stop
    await env.reset(2)
    assert (await say(env, "no", "no", "no"))[-1].reward == 0.75


def call(name, /, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.long
async def test_verifiers_tasks_with_tools_are_played_with_their_servers(tasksets, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tasksets))
    env = make("verifiers:vf_shop")()
    await env.reset(2)
    (offered,) = env.tools
    assert offered["function"]["name"] == "prices_look_up"
    assert offered["function"]["parameters"]["required"] == ["name"]
    look, fail = call("prices_look_up", name="tea"), call("prices_look_up", name="nothing")
    results = await say(env, f"Let me see. {look}{look}", fail, "12")
    assert [[(m.role, m.name, m.content) for m in result.messages] for result in results] == [
        [("tool", "prices_look_up", "tea costs 12")] * 2,
        [("tool", "prices_look_up", "Error executing tool look_up: no such thing")],
        [],
    ]
    # 1 for the answer, 0.25 for each call that a server counted, and 0.125 for each that the trace has.
    assert [(result.reward, result.done) for result in results] == [(0, False), (0, False), (1.875, True)]
    await env.reset(2)
    assert (await say(env, call("prices_look", name="tea")))[0].done  # there is no such tool, so this is text


@pytest.mark.long
async def test_verifiers_tools_of_a_taskset_are_one_process_for_all_episodes_and_end_with_their_environments(
    tasksets, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(tasksets))
    factory = make("verifiers:vf_shared_shop")

    async def look_up_twice(env):
        await env.reset(1)
        return [(await env.step(Action(call("prices_look_up", name="tea")))).messages[0].content for _ in range(2)]

    first, *others = itertools.chain(*await asyncio.gather(look_up_twice(factory()), look_up_twice(factory())))
    assert first.startswith("tea costs ")
    assert others == [first] * 3
    server = psutil.Process(int(first.removeprefix("tea costs ")))
    assert server.is_running()
    del factory
    gc.collect()
    await asyncio.to_thread(server.wait, 20)


async def test_verifiers_tools_that_other_processes_would_not_find_are_refused(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ConfigError, match="'vf_shop': install it, or put its folder into PYTHONPATH"):
        make("verifiers:vf_shop")


async def test_verifiers_obeys_the_turn_limit_of_its_agent():
    env = make("verifiers:vf_coached_sums", {"tasks": 9, "pupil": {"max_turns": 1}})()
    await env.reset(2)
    assert (await say(env, "no"))[0].done


async def test_verifiers_episodes_that_are_played_at_once_do_not_mix():
    factory = make("verifiers:vf_coached_sums", {"tasks": 9})

    async def one(seed):
        env = factory()
        (asked,) = await env.reset(seed)
        await asyncio.sleep(0)
        return (await say(env, "no", str(2 * int(asked.content[0]))))[-1].reward

    assert await asyncio.gather(*(one(seed) for seed in range(12))) == [1.5] * 12


async def test_an_error_inside_verifiers_fails_the_episode_with_its_traceback():
    env = make("verifiers:vf_coached_sums", {"tasks": 1})()
    await env.reset(1)
    with pytest.raises(Exception, match="the coach burnt out"):
        await say(env, "burn")


async def test_a_verifiers_episode_that_is_abandoned_leaves_nothing_running():
    env = make("verifiers:vf_coached_sums", {"tasks": 1})()
    await env.reset(1)
    before = asyncio.all_tasks() - {asyncio.current_task()}
    assert before
    del env
    for _ in range(100):
        await asyncio.sleep(0.05)
        if all(task.done() for task in before):
            break
    assert all(task.done() for task in before)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("reasoning-gym:chain_sums", {}, "no task 'chain_sums'; did you mean 'chain_sum'"),
        ("reasoning-gym:chain_sum", {"max_term": 2}, r"`env\.args\.max_term`: .*did you mean 'max_terms'"),
        ("reasoning-gym:chain_sum", {"min_terms": 9}, "do not fit"),
        ("gymnasium:FrozenLak-v1", {}, "FrozenLake"),
        ("gymnasium:no_such_module:Game-v0", {}, "cannot be loaded"),
        ("gymnasium:FrozenLake-v1", {"actions": ["a"]}, "names 1 actions, FrozenLake-v1 has 4"),
        ("gymnasium:Pendulum-v1", {}, "only Discrete and Text ones"),
        ("textarena:TicTacTo-v0", {}, "no game 'TicTacTo-v0'; did you mean 'TicTacToe"),
        ("textarena:TicTacToe-v0-raw", {}, "`textarena:TicTacToe-v0` shows the game as text"),
        ("textarena:TicTacToe-v0", {"sead": 1}, r"cannot be made with `env\.args` = {'sead': 1}: TypeError: .*sead"),
        ("textarena:TicTacToe-v0", {"opponent": "tests.helpers.envs:none"}, r"`env\.args\.opponent`"),
        ("textarena:TicTacToe-v0", {"opponent": "tests.helpers.envs:one_argument"}, r"\(observation, rng\)"),
        ("verifiers:vf_no_such", {}, "cannot be loaded"),
        ("verifiers:vf_single_sums", {"tasks": 0}, "at least 1"),
        ("verifiers:vf_single_sums", {"taskset": {"sise": 2}}, "cannot be loaded"),
        ("verifiers:vf_pair_sums", {}, r"has several agents \(one, other\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(name, args, message):
    with pytest.raises(ConfigError, match=message):
        make(name, args)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("reasoning-gym:chain_sum", "reasoning_gym"),
        ("gymnasium:FrozenLake-v1", "gymnasium"),
        ("textarena:TicTacToe-v0", "textarena"),
        ("verifiers:vf_single_sums", "verifiers.v1"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_the_command(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'r3async\[envs\]'"):
        make(name)


async def test_an_environment_is_reset_before_it_is_stepped():
    for name in ("textarena:TicTacToe-v0", "verifiers:vf_single_sums"):
        with pytest.raises(EnvironmentFailed, match="reset before"):
            await make(name)().step(Action(""))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "path", "arguments", "answers"),
    [
        ("reasoning-gym:chain_sum", "reasoning_gym_tasks:ReasoningGymEnvironment", {"task": "chain_sum"}, ["7"]),
        (
            "gymnasium:FrozenLake-v1",
            "gymnasium_games:GymnasiumEnvironment",
            {"id": "FrozenLake-v1", "render_mode": "ansi", "prompt": "Go!", "invalid_limit": 2},
            ["2", "fly", "1", "fly"],
        ),
        (
            "textarena:TicTacToe-v0",
            "textarena_games:TextArenaEnvironment",
            {"id": "TicTacToe-v0", "seat": 1},
            ["[4]", "[4]"],
        ),
    ],
)
async def test_an_episode_in_a_process_of_the_pool_is_the_one_that_would_be_played_here(name, path, arguments, answers):
    host = EnvironmentHost()
    host.handle_call(WorkerCall("load", path=f"r3async.envs.adapters.{path}", arguments=arguments))
    env = make(name, {key: value for key, value in arguments.items() if key not in ("id", "task")})()
    for seed in (3, 4):
        first = host.handle_call(WorkerCall("reset", instance=1, seed=seed))
        assert (await env.reset(seed), getattr(env, "oracle", str)()) == (first.messages, first.oracle)
        for answer in answers:
            here = host.handle_call(WorkerCall("step", instance=1, action=Action(answer)))
            assert await env.step(Action(answer)) == here.result
            if here.result.done:
                break
    assert host.handle_call(WorkerCall("drop", instance=1)) == WorkerReply()
    assert host.handle_call(WorkerCall("step", instance=1, action=Action("?"))).raised.line.startswith("KeyError")
