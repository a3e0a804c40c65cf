"""`openenv:URL`, against servers of the real package where it is installed, and against one that misbehaves."""

import asyncio
import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiohttp import web

from r3async.config import ConfigError, EnvConfig
from r3async.envs import Action, EnvironmentFailed, Message
from r3async.envs.adapters.openenv_servers import choose_action_form
from r3async.envs.factory import build_environment_factory
from tests.helpers.transport import free_port

SERVER = Path(__file__).parents[1] / "helpers" / "openenv_server.py"
HANGMAN = Path(__file__).parents[2] / "examples" / "openenv" / "server.py"
START_SECONDS = 60.0
with_package = pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason="openenv-core is not installed: pip install -e '.[openenv]'"
)


def make(url, args=None, **settings):
    return build_environment_factory(EnvConfig(name=f"openenv:{url}", args=args or {}, **settings))


async def make_beside(*args, **settings):
    """`make` for a server on this event loop, which it would block."""
    return await asyncio.to_thread(make, *args, **settings)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# -- servers of the package --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(script, folder):
    """Start a server; yields its address and its process."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", folder / f"{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, str(script), str(port)], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _listens(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield url, process, log
    finally:
        process.kill()
        process.wait(120)


def _listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(SERVER, tmp_path_factory.mktemp("server")) as (url, *_):
        yield url


@with_package
@pytest.mark.long
async def test_the_recipes_game_is_played_until_its_server_is_gone(tmp_path):
    answers = "aeio", "<think>no x</think>ung", "z"
    with serving(HANGMAN, tmp_path) as (url, process, log):
        factory = make(url, {"prompt": "Hangman."}, step_timeout=10)
        env, same = factory(), factory()
        assert await env.reset(3) == await same.reset(3)
        played = [[await each.step(Action(answer)) for answer in answers] for each in (env, same)]
        assert played[0] == played[1]
        await same.close()
        await same.reset(1)  # the server has seen the end of the other session
        assert "Traceback" not in log.read_text()
        assert [result.done for result in played[0]] == [False, False, True]
        assert 0 < sum(result.reward for result in played[0]) <= 1
        assert played[0][0].messages[0].content.endswith(", 2 tries left")
        (asked,) = await env.reset(4)
        assert asked.content.startswith("Hangman.\nA word of ")
        process.kill()
        process.wait(120)
        with pytest.raises(EnvironmentFailed, match=f"{url}: `step` got no answer: "):
            await env.step(Action("a"))
        with pytest.raises(EnvironmentFailed, match="`step` without a session"):
            await env.step(Action("a"))
        with pytest.raises(EnvironmentFailed, match=f"{url}: no session: "):
            await env.reset(1)
        await same.close()


@with_package
@pytest.mark.long
async def test_sessions_do_not_mix_and_wait_for_a_free_one(server):
    url = f"{server}/text"
    factory = make(url, {"observation": "text", "reset": {"label": "n"}}, step_timeout=10, start_timeout=30)

    async def play(seed):
        env = factory()
        try:
            (asked,) = await env.reset(seed)
            results = [await env.step(Action(f"{seed}-{turn}")) for turn in range(3)]
            return asked.content, results[-1].messages[0].content, sum(result.reward for result in results)
        finally:
            await env.close()

    played = await asyncio.gather(*(play(seed) for seed in range(12)))  # of a server with four sessions
    assert played == [(f"task n{seed}", f"n{seed} {seed}-0 {seed}-1 {seed}-2", 9.0) for seed in range(12)]
    env = factory()
    await env.reset(1)
    assert (await env.step(Action("end"))).done
    with pytest.raises(EnvironmentFailed, match=f"{url}: `step` failed there: EXECUTION_ERROR: no luck"):
        await env.step(Action("fail"))
    busy = [factory() for _ in range(4)]
    for each in (env, *busy):
        await each.close()
    for each in busy:
        await each.reset(1)
    with pytest.raises(
        EnvironmentFailed, match=r"no session was free within env.start_timeout = 1 s.*max_concurrent_envs"
    ):
        await make(url, start_timeout=1)().reset(1)
    for each in busy:
        await each.close()


@with_package
@pytest.mark.long
async def test_a_step_that_hangs_is_given_up(server):
    url = f"{server}/slow"
    env = make(url, step_timeout=1)()
    await env.reset(1)
    with pytest.raises(EnvironmentFailed, match=f"{url}: `step` took longer than env.step_timeout = 1 s"):
        await env.step(Action("hello"))


@with_package
@pytest.mark.long
async def test_actions_of_numbers_and_of_several_fields(server):
    env = make(f"{server}/number", {"observation": "text", "invalid_reward": -0.5, "invalid_limit": 2})()
    await env.reset(7)
    assert (await env.step(Action("41"))).messages == [Message("user", "7 41")]
    refused = await env.step(Action("left"))
    assert (refused.reward, refused.done, refused.messages[0].role) == (-0.5, False, "user")
    assert refused.messages[0].content.startswith("error: value: Input should be a valid integer")
    assert (await env.step(Action("x"))).done
    await env.close()
    env = make(f"{server}/board", {"observation": "text"})()
    await env.reset(7)
    (tool,) = env.tools
    assert tool["function"]["name"] == "act"
    assert list(tool["function"]["parameters"]["properties"]) == ["row", "column"]
    moved = await env.step(Action(call("act", row=1, column=2) + call("act", row=0, column=0)))
    assert moved.messages == [Message("tool", "7 1 2", name="act"), Message("tool", "7 1 2 0 0", name="act")]
    assert moved.reward == 5
    assert (await env.step(Action("I pass"))).messages == [Message("user", "error: call the tool act")]
    await env.close()


@with_package
@pytest.mark.long
async def test_the_tools_of_a_server_are_offered_and_called(server):
    env = make(f"{server}/tools")()
    with pytest.raises(EnvironmentFailed, match=r"set `env\.args\.prompt`"):
        await env.reset(1)
    await env.close()
    env = make(f"{server}/tools", {"prompt": "Add 2 and 3."})()
    assert await env.reset(1) == [Message("user", "Add 2 and 3.")]
    assert [tool["function"]["name"] for tool in env.tools] == ["add"]
    said = await env.step(Action(call("add", a=2, b=3) + call("add", a="x", b=3)))
    assert [message.role for message in said.messages] == ["tool", "tool"]
    assert said.messages[0].content == "5"
    assert said.messages[1].content.startswith("error: ")
    assert (await env.step(Action("It is 5."))).done
    await env.close()


# -- a server of our own, whose replies are what a test wants ----------------------------------------------------------

SCHEMAS = {"action": {"properties": {"text": {"type": "string"}}}, "observation": {"properties": {"text": {}}}}


@pytest.fixture
async def misbehave():
    """Serve the schemas, and sessions that answer each message with the next of the given texts; None ends one."""
    runners = []

    async def start(*replies, schemas=SCHEMAS):
        async def session(request):
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            for reply in replies:
                await socket.receive()
                if reply is None:
                    request.transport.abort()
                    break
                await socket.send_str(reply)
            return socket

        app = web.Application()
        app.add_routes([web.get("/ws", session), web.get("/schema", lambda request: web.json_response(schemas))])
        runners.append(web.AppRunner(app, shutdown_timeout=0.1))
        await runners[-1].setup()
        port = free_port()
        await web.TCPSite(runners[-1], "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()


def reply(observation, **data):
    return json.dumps({"type": "observation", "data": {"observation": observation, **data}})


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ([reply({"text": "go"}), None], "`step` got no answer: "),
        ([reply({"text": "go"}), "no JSON"], "`step` got no answer: "),
        ([reply({"text": "go"}), reply({}, reward="much")], "`step` got no answer: .*reward"),
        (
            [reply({"text": "go"}), '{"type": "error", "data": {"code": "SESSION_ERROR", "message": "x"}}'],
            "`step` failed there: SESSION",
        ),
        ([reply({"text": "over"}, done=True)], "the episode was over after `reset`"),
        ([None], "`reset` got no answer"),
    ],
)
async def test_a_server_that_misbehaves_fails_the_episode(misbehave, replies, reason):
    url = await misbehave(*replies)
    env = (await make_beside(url))()

    async def play():
        await env.reset(1)
        await env.step(Action("hello"))

    with pytest.raises(EnvironmentFailed, match=f"{url}: {reason}"):
        await play()
    await env.close()


async def test_all_of_an_observation_is_shown_where_it_has_several_fields(misbehave):
    url = await misbehave(reply({"board": [1], "legal": "a b", "info": {}}), reply({"board": [2]}, reward=True))
    env = (await make_beside(url))()
    assert await env.reset(2**63 - 1) == [Message("user", '{"board":[1],"legal":"a b"}')]
    result = await env.step(Action("a"))
    assert (result.reward, result.messages) == (1.0, [Message("user", "[2]")])
    await env.close()


async def test_what_is_no_server_is_refused_at_the_start(misbehave):
    port = free_port()
    with pytest.raises(ConfigError, match=rf"env.name.*no OpenEnv server answers at http://127.0.0.1:{port}/schema"):
        make(f"http://127.0.0.1:{port}/")
    url = await misbehave(schemas={"detail": "Not Found"})
    with pytest.raises(ConfigError, match=r"env\.name.*no OpenEnv server answers.*start it, or give the address"):
        await make_beside(url)
    with pytest.raises(ConfigError, match="begins with http"):
        make("127.0.0.1:1")
    url = await misbehave()
    with pytest.raises(ConfigError, match=r"env.args.action`: .* no field 'txt'.*text"):
        await make_beside(url, {"action": "txt"})
    with pytest.raises(ConfigError, match=r"env.args.observation`: .* no field 'board'"):
        await make_beside(url, {"observation": "board"})
    with pytest.raises(ConfigError, match="unknown field `promt`"):
        await make_beside(url, {"promt": ""})


async def test_a_server_that_never_answers_is_refused_in_time(misbehave):
    async def hold(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", free_port())
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match=r"no OpenEnv server answers.*TimeoutError"):
        await make_beside(f"http://127.0.0.1:{port}", start_timeout=0.3)
    server.close()


def test_how_an_answer_becomes_an_action():
    text, number = {"type": "string"}, {"type": "integer"}
    one = {"properties": {"metadata": {}, "code": text}}
    assert choose_action_form(one, "").field == "code"
    required = {"properties": {"a": number, "b": text}, "required": ["a"]}
    assert (choose_action_form(required, "").field, choose_action_form(required, "").takes_text) == ("a", False)
    assert (choose_action_form(required, "b").field, choose_action_form(required, "b").takes_text) == ("b", True)
    assert choose_action_form({"properties": {"a": {"anyOf": [text, {"type": "null"}]}}}, "").takes_text
    assert choose_action_form({"properties": {"a": text, "b": text}}, "").field == ""
