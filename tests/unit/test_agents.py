"""Agents in the place of environments: functions, commands, and somebody outside."""

import asyncio
import os
import random
import shutil
import sys
from pathlib import Path

import openai
import pytest

from r3async.config import ConfigError, EnvConfig, EpisodeConfig, ServingConfig, config_from_dict
from r3async.rollout import agents
from r3async.rollout.agent_player import open_agent_player
from r3async.rollout.agents import make_agent, parse_last_reward
from r3async.rollout.episode import EpisodeError, EpisodeTask
from r3async.rollout.evaluation import check_environment
from r3async.rollout.play_context import PlayContext
from tests.helpers.serving import TASK, answer_ids, ready, renderer
from tests.helpers.transport import until

SETTINGS = EpisodeConfig(
    max_turns=3, max_new_tokens=96, max_prompt_tokens=900, max_total_tokens=1000, timeout=100, retries=0
)
HERE = str(Path(__file__).parents[2])


def function(name, **args):
    return EnvConfig(name=f"agent:tests.helpers.agents:{name}", args=args)


def program(code, **args):
    return EnvConfig(name="agent-command", args={"command": [sys.executable, "-c", code], **args})


async def play(env, answers=("abcd",), settings=SETTINGS, task=TASK, **values):
    chat = renderer()
    engine = await ready(answer_ids(chat, *answers))
    async with open_agent_player(
        env, settings, ServingConfig(**values), PlayContext(engine, chat, generator_id="g")
    ) as player:
        return await player(task)


@pytest.mark.parametrize(
    ("env", "reward", "rows"),
    [
        (function("counts"), 4, 1),
        (function("counts", worth=2), 8, 1),
        (function("counts_async"), 12, 3),
        (function("rewards_by_call"), 0.25, 1),
    ],
    ids=["in a thread", "with env.args", "as a task", "by the reward call"],
)
async def test_a_function_that_knows_nothing_of_us_plays_and_is_rewarded(env, reward, rows):
    trajectory = await play(env)
    assert trajectory.reward == pytest.approx(reward)
    assert (trajectory.stop_reason, len(trajectory.samples)) == ("stop", rows)
    assert trajectory.trajectory_id == "g00000003e0000"
    assert trajectory.generator_id == "g"
    assert all(s.table["routing_recorded"][:-1].all() for s in trajectory.samples)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("forgets", "gave no reward"),
        ("says_nan", "must be a finite number, not nan"),
        ("crashes", "the agent's own fault"),
        ("leaves", "ended with SystemExit"),
    ],
)
async def test_what_an_agent_does_wrong_is_reported(name, message):
    with pytest.raises((EpisodeError, RuntimeError), match=message):
        await play(function(name))


async def test_an_agent_that_fails_when_it_is_refused_more_has_played_its_episode_if_it_was_rewarded():
    trajectory = await play(function("never_ends"))
    assert (trajectory.stop_reason, trajectory.reward, len(trajectory.turns)) == ("turns", 3, 3)


async def test_an_agent_that_takes_too_long_loses_its_episode_and_the_setting_is_named():
    await play(function("counts"))  # a process's first use of the client may take longer than the agent below has
    settings = EpisodeConfig(max_turns=3, max_prompt_tokens=90, max_total_tokens=100, timeout=1.0)
    with pytest.raises(EpisodeError, match=r"episode\.timeout = 1\.0 s and has no reward; the agent had 1 answers"):
        await play(function("sleeps"), settings=settings)
    trajectory = await play(function("sleeps"), settings=settings, unrewarded=0.0)
    assert (trajectory.stop_reason, trajectory.reward) == ("timeout", 0)


async def test_what_the_engine_failed_with_is_raised_whatever_the_agent_made_of_it():
    chat = renderer()
    engine = await ready([[1]])
    async with open_agent_player(function("counts"), SETTINGS, ServingConfig(), PlayContext(engine, chat)) as player:
        await engine.stop()
        with pytest.raises(Exception, match="the engine is not running"):
            await player(TASK)


ASKS = """
import os, openai, urllib.request
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
models = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", headers=key)
assert urllib.request.urlopen(models, timeout=20).read()
client = openai.OpenAI()
answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": os.environ["R3ASYNC_TASK_SEED"]}])
print("a line of its own")
print('{"reward": %s}' % len(answer.choices[0].message.content))
"""


async def test_a_command_has_an_address_a_key_and_a_seed_and_says_its_reward_in_its_last_line(monkeypatch):
    """A proxy of the machine, which would look for 127.0.0.1 on its own machine, is not asked: neither by a command nor by a
    function."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")
    assert (await play(function("counts"))).reward == pytest.approx(4)
    env = EnvConfig(name="agent-command", args=program(ASKS).args, variables=["HTTP_PROXY", "http_proxy"])
    trajectory = await play(env)
    assert (trajectory.reward, trajectory.stop_reason) == (4, "stop")
    text = renderer().decode(trajectory.samples[0].table["token_ids"].tolist())
    assert text == "<|user|>11<|assistant|>abcd<|end|>"
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1"


@pytest.mark.parametrize("example", ["chat_agent", "responses_agent", "messages_agent"])
@pytest.mark.long
async def test_the_examples_play_with_their_own_command(example):
    call = '<tool_call>{"name":"add","arguments":{"a":%d,"b":%d}}</tool_call>'
    rng = random.Random(11)
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    command = ["python", f"examples/agent/{example}.py"]
    env = EnvConfig(name="agent-command", args={"command": command, "directory": HERE})
    trajectory = await play(env, answers=(call % (a, b), str(a + b)))
    assert (trajectory.reward, len(trajectory.turns), len(trajectory.samples)) == (1.0, 2, 1)
    text = renderer().decode(trajectory.samples[0].table["token_ids"].tolist())
    assert text.endswith(f"<|tool|>{a + b}<|assistant|>{a + b}<|end|>")
    trajectory = await play(env, answers=("nothing",))
    assert 0 <= trajectory.reward < 0.25


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("mini"), reason="mini-swe-agent is not on the PATH: pipx install mini-swe-agent")
async def test_mini_swe_agent_plays_as_its_package_has_it(monkeypatch, tmp_path):
    """It mends what it was given, is told where an answer has no call, and is refused a longer context."""
    monkeypatch.setenv("HOME", str(tmp_path))  # no settings of yours
    env = EnvConfig(name="agent-command", args={"command": ["python", "examples/agent/mini_swe.py"], "directory": HERE})
    settings = EpisodeConfig(max_turns=8, max_new_tokens=256, max_prompt_tokens=3000, max_total_tokens=4000, retries=0)

    def call(command):
        return f'Next. <tool_call>{{"name":"bash","arguments":{{"command":"{command}"}}}}</tool_call>'

    mend, submit = call("sed -i 's/min/max/' work.py"), call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    task = EpisodeTask(group_index=0, episode_index=0, task_seed=1)  # largest
    trajectory = await play(env, (call("python check.py"), mend, submit), settings, task)
    assert (trajectory.reward, len(trajectory.turns), len(trajectory.samples)) == (1.0, 3, 1)
    assert "AssertionError" in renderer().decode(trajectory.samples[0].table["token_ids"].tolist())

    # It drops an answer without a call from the conversation, which then is another sample.
    trajectory = await play(env, ("What now?", mend, submit), settings, task)
    assert (trajectory.reward, len(trajectory.turns), len(trajectory.samples)) == (1.0, 3, 2)

    trajectory = await play(env, (call("seq 2000"), mend), settings, task)
    assert (trajectory.reward, trajectory.stop_reason, len(trajectory.turns)) == (0.0, "length", 1)


async def test_a_command_that_fails_is_an_error_with_the_end_of_its_stderr():
    with pytest.raises(EpisodeError, match=r"(?s)exited with 3: .*no luck"):
        await play(
            program("import sys; print('x' * 100000, file=sys.stderr); print('no luck', file=sys.stderr); sys.exit(3)")
        )


async def test_a_command_that_takes_too_long_is_ended_with_all_it_started(tmp_path):
    mark = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time\n"
        "sleeps = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "children = [subprocess.Popen(sleeps, start_new_session=apart).pid for apart in (False, True)]\n"
        f"open({str(mark)!r}, 'w').write(' '.join(map(str, [os.getpid(), *children])))\n"
        "time.sleep(60)"
    )
    settings = EpisodeConfig(max_prompt_tokens=90, max_total_tokens=100, timeout=2.0)
    with pytest.raises(EpisodeError, match=r"episode\.timeout"):
        await play(program(code), settings=settings)
    pids = [int(pid) for pid in mark.read_text().split()]
    assert len(pids) == 3
    await until(lambda: all(map(gone, pids)))


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


LEAVES = """
import json, os, subprocess, sys, time, urllib.request
child = '''
import os, signal, sys, time
def told(*_):
    print("told to end", flush=True)
    {deaf} or sys.exit()
signal.signal(signal.SIGTERM, told)
open({mark!r} + "~", "w").write(str(os.getpid()))
os.rename({mark!r} + "~", {mark!r})
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-c", child], start_new_session=True, env={env})
while not os.path.exists({mark!r}):
    time.sleep(0.01)
body = json.dumps(dict(messages=[dict(role="user", content="go")])).encode()
key = dict(Authorization="Bearer " + os.environ["OPENAI_API_KEY"])
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)).read()
print('{{"reward": 3}}')
"""


@pytest.mark.parametrize(
    ("deaf", "env"),
    [(False, None), (True, None), (False, {"PATH": os.defpath})],
    ids=["obeys", "ignores SIGTERM", "has an environment of its own"],
)
async def test_a_program_that_leaves_a_child_in_a_session_of_its_own_has_its_reward_and_the_child_is_ended(
    tmp_path, monkeypatch, deaf, env
):
    monkeypatch.setattr(agents, "TERMINATION_SECONDS", 1.0)
    mark = tmp_path / "pid"
    trajectory = await play(program(LEAVES.format(deaf=deaf, env=env, mark=str(mark))))
    assert (trajectory.reward, trajectory.stop_reason) == (3, "stop")
    assert gone(int(mark.read_text()))


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ('x\n{"reward": 2}\n', 2),
        ("", None),
        ("done", None),
        ('{"reward": 1}\nbye', None),
        ("[1]", None),
        ("[" * 5000, None),
        ('{"reward": ' + "1" * 5000 + "}", None),
        ('{"reward": NaN}', None),
    ],
    ids=range(8),
)
def test_the_last_line_of_a_programs_output_says_its_reward(output, reward):
    assert parse_last_reward(output) == reward


async def test_somebody_outside_takes_episodes_that_wait_and_says_when_they_are_done(tmp_path):
    import json
    import stat

    chat = renderer()
    engine = await ready(answer_ids(chat, "ab"))
    serving = ServingConfig(enabled=True)
    async with open_agent_player(
        EnvConfig(name="agent-outside"),
        SETTINGS,
        serving,
        PlayContext(engine, chat, generator_id="g0"),
        directory=tmp_path,
    ) as player:
        file = tmp_path / "serving-g0.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        door = json.loads(file.read_text())
        playing = [asyncio.create_task(player(EpisodeTask(7, i, 42))) for i in range(2)]
        async with openai.AsyncOpenAI(base_url=door["base_url"], api_key=door["token"]) as owner:
            for i in range(2):
                begun = await owner.post("/r3async/sessions", body={}, cast_to=object)
                assert (begun["episode"], begun["task_seed"]) == (f"g00000007e000{i}", 42)
                async with openai.AsyncOpenAI(base_url=begun["base_url"], api_key=begun["key"]) as agent:
                    await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
                    await agent.post("/r3async/reward", body={"reward": i, "done": True}, cast_to=object)
        trajectories = await asyncio.gather(*playing)
    assert [t.reward for t in trajectories] == [0, 1]
    assert [t.stop_reason for t in trajectories] == ["stop", "stop"]


async def test_an_environment_is_left_to_others_and_nothing_listens_unless_asked():
    chat = renderer()
    engine = await ready([[1]])
    async with open_agent_player(
        EnvConfig(name="reverse-text"), SETTINGS, ServingConfig(), PlayContext(engine, chat)
    ) as player:
        assert player is None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"name": "agent:nowhere:play"}, "cannot be loaded: No module named 'nowhere'"),
        ({"name": "agent:tests.helpers.agents:asks_too_much"}, "missing a required argument: 'wrong'"),
        ({"name": "agent:tests.helpers.agents:counts", "args": {"word": 1}}, "unexpected keyword argument 'word'"),
        ({"name": "agent-command", "args": {"command": "python x"}}, "must be a list of words"),
        ({"name": "agent-command", "args": {"command": ["python"], "directory": "/nowhere"}}, "is not a directory"),
        ({"name": "agent-command", "args": {"command": ["python3", "no.py", "-v"]}}, "there is no file 'no.py' in '/"),
        (
            {"name": "agent-command", "args": {"command": ["python", "no.py"], "directory": HERE}},
            f"there is no file 'no.py' in '{HERE}'",
        ),
        ({"name": "agent-command", "args": {"command": ["python"], "environment": {"A": 1}}}, "a table of texts"),
        ({"name": "agent-command", "args": {"comand": ["python"]}}, r"`env\.args\.comand`"),
    ],
)
def test_a_wrong_agent_is_refused_before_anything_starts(env, message):
    with pytest.raises(ConfigError, match=message):
        make_agent(EnvConfig(**env))


def test_what_an_agent_needs_of_the_run_is_named():
    agent = {"name": "agent:tests.helpers.agents:counts"}
    with pytest.raises(ConfigError, match=r"`model\.path`"):
        check_environment(config_from_dict({"env": agent}))
    check_environment(config_from_dict({"env": agent, "model": {"path": "x"}}))
    outside = {"env": {"name": "agent-outside"}, "model": {"path": "x"}}
    with pytest.raises(ConfigError, match=r"serving\.enabled = true"):
        check_environment(config_from_dict(outside))
    outside["serving"] = {"enabled": True}
    check_environment(config_from_dict(outside))
    with pytest.raises(ConfigError, match=r"`evaluation\.env\.name`"):
        check_environment(config_from_dict({**outside, "evaluation": {"every_steps": 1}}))
    check_environment(config_from_dict({**outside, "evaluation": {"every_steps": 1, "env": {"name": "reverse-text"}}}))
    with pytest.raises(ConfigError, match="no such environment"):
        check_environment(config_from_dict({"evaluation": {"every_steps": 1, "env": {"name": "revers"}}}))
