"""Tools in an environment: those of MCP servers, and commands in a sandbox."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from r3async.config import ConfigError, EnvConfig
from r3async.envs import Action, EnvironmentFailed
from r3async.envs.factory import build_environment_factory
from r3async.envs.sandbox import CommandLimits, Sandbox, build_docker_command, build_local_command, find_isolation
from tests.helpers.transport import free_port, until

SERVER = str(Path(__file__).parents[1] / "helpers" / "mcp_server.py")


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def mcp(*mode, of="reverse-text", **args):
    servers = {"sums": {"command": [sys.executable, SERVER, *mode]}}
    return EnvConfig(name=f"mcp:{of}", args={"servers": servers, "task": {"letters": 3, "turns": 1}} | args)


@pytest.fixture
async def env():
    made = []

    def make(*mode, **args):
        made.append(build_environment_factory(mcp(*mode, **args))())
        return made[-1]

    yield make
    for environment in made:
        await environment.close()


def servers_running():
    return [p for p in psutil.Process().children(recursive=True) if any(SERVER in w for w in _words(p))]


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.long
async def test_tools_of_a_server_are_offered_called_at_once_and_the_task_judges_the_answer(env):
    environment = env()
    (asked,) = await environment.reset(7)
    assert [tool["function"]["name"] for tool in environment.tools] == ["add", "wait", "shout", "fail", "greeted"]
    assert environment.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    wait = call("wait", seconds=0.5)
    result = await environment.step(Action(f"Both. {wait}{wait}{call('add', a=3, b=4)}"))
    assert [m.content for m in result.messages] == ["over", "over", "7 (1)"]
    assert [(m.role, m.name) for m in result.messages] == [("tool", "wait"), ("tool", "wait"), ("tool", "add")]
    assert (result.reward, result.done, result.metrics) == (0, False, {"tool_calls": 3})
    final = await environment.step(Action(asked.content[::-1]))
    assert (final.reward, final.done) == (1, True)
    (asked,) = await environment.reset(8)
    assert environment.oracle() == asked.content[::-1], "what the task knows is known"


async def test_the_task_gets_the_tokens_of_an_answer_if_it_takes_them(env, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    task = {"path": str(tmp_path / "rows.jsonl"), "reward": "tests.unit.test_envs_tools:counted"}
    environment = env(of="dataset", task=task)
    await environment.reset(0)
    assert environment.takes_tokens
    assert (await environment.step(Action("two", token_ids=[4, 5, 6]))).reward == 3


def counted(completions, completion_ids):
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.long
async def test_an_episode_has_servers_of_its_own_and_they_end_with_it(env):
    one, two = env(), env()
    await asyncio.gather(one.reset(1), two.reset(1))
    assert len(servers_running()) == 2
    for environment, said in ((one, "2 (1)"), (one, "2 (2)"), (two, "2 (1)")):
        assert (await environment.step(Action(call("add", a=1, b=1)))).messages[0].content == said
    await one.reset(2)
    assert (await one.step(Action(call("add", a=1, b=1)))).messages[0].content == "2 (1)"
    await asyncio.gather(one.close(), two.close())
    assert servers_running() == []


@pytest.mark.long
async def test_calls_have_limits_and_what_goes_wrong_is_told_to_the_policy(env):
    environment = env(call_timeout=1.5, output_characters=20, calls_at_once=2, calls=7)
    await environment.reset(1)

    async def told(*calls):
        return [m.content for m in (await environment.step(Action("".join(calls)))).messages]

    assert await told(call("wait", seconds=60)) == ["error: wait took longer than 1.5 s"]
    (failed,) = await told(call("fail"))
    assert failed.startswith("error: ")
    (wrong,) = await told(call("add", a="x"))
    assert wrong.startswith("error: ")
    assert (await told(call("nothing")))[0].startswith("error: there is no t")
    many = await told(call("shout", times=25), call("shout", times=5), call("shout", times=1))
    assert many == ["x" * 20 + "\n[5 characters left out]", "xxxxx", "error: not called, an answer may have 2 calls"]
    last = await environment.step(Action(call("add", a=1, b=1)))
    assert last.done, "seven calls are over, and the task judges what is said then"


@pytest.fixture
def running_server():
    """The address of one that runs, over HTTP."""
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.long
async def test_a_server_that_runs_is_asked_over_http_with_headers_that_name_secrets(env, running_server):
    web = {"url": running_server, "headers": {"Authorization": "Bearer $TOKEN"}, "tools": ["add", "greeted"]}
    asked = {"servers": {"web": web}, "environment": {"TOKEN": "secret"}}
    one, two = env(**asked), env(**asked)
    await asyncio.gather(one.reset(1), two.reset(1))
    assert [tool["function"]["name"] for tool in one.tools] == ["add", "greeted"]
    said = await one.step(Action(call("add", a=1, b=1) + call("greeted")))
    assert [m.content for m in said.messages] == ["2 (1)", "Bearer secret"]
    assert (await two.step(Action(call("add", a=1, b=1)))).messages[0].content == "2 (2)", "one server for both"
    await asyncio.gather(one.close(), two.close())


@pytest.mark.parametrize("fault", ["dies", "hangs", "does not run"])
async def test_a_server_that_does_not_start_fails_the_episode_and_is_named(env, fault):
    web = {"servers": {"sums": {"url": "http://127.0.0.1:1/mcp"}}}
    environment = env(**web, start_timeout=20) if fault == "does not run" else env(fault, start_timeout=1.0)
    with pytest.raises(EnvironmentFailed, match="the MCP servers sums could not start"):
        await environment.reset(1)
    assert servers_running() == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"servers": {}}, "names no server"),
        ({"servers": {"a": {"command": ["python"], "tool": []}}}, "unknown field `tool`"),
    ],
)
def test_wrong_arguments_are_named(args, message):
    with pytest.raises(ConfigError, match=message):
        build_environment_factory(EnvConfig(name="mcp:reverse-text", args=args))


@pytest.fixture(params=["isolated", "plain"])
async def sandbox(request, monkeypatch):
    """As well isolated as this machine lets us, and not at all."""
    made = await Sandbox.open(CommandLimits(seconds=10, memory_mib=512, file_mib=1, output_bytes=100, processes=32))
    if request.param == "isolated" and not made.isolation_prefix:
        await made.close()
        pytest.skip("this machine lets no namespace be made")
    if request.param == "plain":
        made.isolation_prefix = ()
    yield made
    await made.close()
    assert not made.directory.exists()


async def test_a_command_says_its_output_and_its_code_and_leaves_files_for_the_next(sandbox):
    await sandbox.write({"a/b.txt": "text\n"})
    ran = await sandbox.run("cat a/b.txt; echo wrong >&2; pwd > where; exit 3")
    assert (ran.exit_code, ran.output) == (3, "text\nwrong\n")
    assert ran.format_for_policy() == "text\nwrong\n[exit code 3]"
    assert (await sandbox.run("cat where")).output.strip() == str(sandbox.directory)
    assert (await sandbox.run("echo $HOME; touch $TMPDIR/x")).exit_code == 0
    assert sorted(path.name for path in sandbox.directory.iterdir()) == ["a", "where"]
    with pytest.raises(ValueError, match="outside of the sandbox"):
        await sandbox.write({"../out": "x"})


async def test_a_command_has_limits(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    assert "SECRET" not in (await sandbox.run("env | grep SECRET")).output
    assert (await sandbox.run("head -c 5000000 /dev/zero > big")).exit_code != 0
    assert (sandbox.directory / "big").stat().st_size == 2**20
    eats = await sandbox.run('python3 -c "bytearray(2**30)"')
    assert eats.exit_code == 1
    assert "MemoryError" in eats.output
    many = await sandbox.run("seq 100000")
    assert many.output.startswith("1\n2\n")
    assert many.output.endswith("99999\n100000\n")
    assert "bytes left out" in many.output
    assert len(many.output) < 200


@pytest.mark.long
async def test_a_command_that_never_ends_is_killed_with_all_that_it_started(sandbox):
    mark = f"600.{os.getpid()}{id(sandbox)}"
    ran = await sandbox.run(f"echo begun; sleep {mark} & sleep {mark}", seconds=3.0)
    assert ran.exit_code is None
    assert ran.output == "begun\n"
    assert ran.format_for_policy() == "begun\n[out of time]"
    await _none_of(mark)
    for output in ("", ">/dev/null 2>&1"):  # the command ends when its shell does, and not what is in the background
        left = await sandbox.run(f"echo begun; sleep {mark} {output} & echo done")
        assert left.format_for_policy() == "begun\ndone\n[exit code 0]"
        await _none_of(mark)
    running = asyncio.create_task(sandbox.run(f"sleep {mark}"))
    await until(lambda: any(mark in _words(p) for p in psutil.process_iter()))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await _none_of(mark)


PUT_IN_PLACE = {
    "a pipe": "mkfifo t.py",
    "a pipe with a reader": "mkfifo t.py; sleep 20 <t.py & sleep 0.2",
    "a link out": "ln -s {} t.py",
    "a link to nothing": "ln -s nowhere t.py",
    "a directory": "mkdir -p t.py/in/it",
    "a file that may not be written": "echo wrong > t.py; chmod 0 t.py",
    "a program": "echo wrong > t.py; chmod 755 t.py",
}


@pytest.mark.long
async def test_a_file_is_written_whatever_a_command_left_in_its_place(sandbox, tmp_path):
    (tmp_path / "out").write_text("outside")
    file = sandbox.directory / "t.py"
    for what, command in PUT_IN_PLACE.items():
        assert (await sandbox.run("rm -rf t.py; " + command.format(tmp_path / "out"))).exit_code == 0, what
        await asyncio.wait_for(sandbox.write({"t.py": "right\n"}), 120)
        assert not file.is_symlink(), what
        assert file.read_text() == "right\n", what
        assert os.access(file, os.X_OK) == (what == "a program")
    assert (tmp_path / "out").read_text() == "outside"


@pytest.mark.long
async def test_a_file_is_written_whatever_a_command_left_in_the_place_of_its_directory(sandbox, tmp_path):
    for command in (f"ln -s {tmp_path} d", "echo a file > d", "mkfifo d", "mkdir d; chmod 0 d", "ln -s d d"):
        await sandbox.run("rm -rf d")
        assert (await sandbox.run(command)).exit_code == 0
        await asyncio.wait_for(sandbox.write({"d/e/t.py": "right\n"}), 120)
        assert (await sandbox.run("cat d/e/t.py")).output == "right\n"
    assert list(tmp_path.iterdir()) == []


LOSE_DIRECTORY = {
    "removed": 'rm -rf "$PWD"',
    "replaced by a link": "cd ..; mv work x; ln -s {elsewhere} work",
    "replaced by a pipe": "cd ..; mv work x; mkfifo work",
    "removed with all beside it": 'rm -rf "$(dirname "$PWD")"',
}


@pytest.mark.long
@pytest.mark.parametrize("how", LOSE_DIRECTORY)
async def test_a_lost_directory_is_told_and_nothing_is_written_elsewhere(sandbox, tmp_path, how):
    """Where commands are confined, the directory cannot be lost, only what is in it."""
    await sandbox.write({"shop.py": "x\n"})
    ran = await sandbox.run(LOSE_DIRECTORY[how].format(elsewhere=tmp_path))
    if "--keep-caps" in sandbox.isolation_prefix:
        assert ran.reset_reason == ""
    else:
        assert (
            "[the working directory was removed or replaced: an empty directory took its place]"
            in ran.format_for_policy()
        )
        assert (await sandbox.run("ls -A")).format_for_policy() == "[exit code 0]"
    await sandbox.write({"test.py": "y\n"})
    assert (await sandbox.run("cat test.py")).format_for_policy() == "y\n[exit code 0]"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
async def test_no_depth_of_directories_stays_or_hides_what_is_in_it(sandbox):
    deep = "import os\nfor _ in range(3000): os.mkdir('deep'); os.chdir('deep')"
    ran = await sandbox.run(f'python3 -c "{deep}"')
    assert "[directories in each other without end: an empty directory took its place]" in ran.format_for_policy()
    await _only_folders(sandbox)


@pytest.mark.long
async def test_files_of_all_commands_together_are_bounded(sandbox):
    sandbox.limits = msgspec.structs.replace(sandbox.limits, disk_mib=2)
    ran = await sandbox.run("n=0; while true; do n=$((n+1)); head -c 500000 /dev/zero > $TMPDIR/$n; done")
    assert ran.format_for_policy() == (
        "[ended: more than 2 MiB of files]\n[more than 2 MiB of files: an empty directory took its place]"
    )
    await _only_folders(sandbox)
    quick = [await sandbox.run(f"head -c 1000000 /dev/zero > {n}") for n in range(3)]
    assert [ran.reset_reason for ran in quick] == ["", "", "more than 2 MiB of files"]
    empty = await sandbox.run("mkdir many; cd many; seq 5000 | xargs touch; sleep 60", seconds=60)
    assert empty.ended_by == "ended: more than 2 MiB of files"


HIDES_FILES = """
import os, time
files = [open(str(n), "wb") for n in range(4)]
for n, file in enumerate(files):
    os.unlink(str(n))
    file.write(bytes(10**6))
    file.flush()
time.sleep(60)
"""


async def test_files_without_a_name_count_as_long_as_they_are_open(sandbox):
    sandbox.limits = msgspec.structs.replace(sandbox.limits, disk_mib=2, seconds=60)
    await sandbox.write({"hides.py": HIDES_FILES})
    assert (await sandbox.run("python3 hides.py")).ended_by == "ended: more than 2 MiB of files"
    assert (await sandbox.run("echo goes on")).format_for_policy() == "goes on\n[exit code 0]"


async def test_processes_without_end_are_ended_also_for_root(sandbox):
    mark = f"600.{os.getpid()}{id(sandbox)}"
    ran = await sandbox.run(f"while true; do sleep {mark} & done; wait")
    assert ran.ended_by == "ended: more than 32 processes" or "fork" in ran.output
    await _none_of(mark)


@pytest.fixture
async def isolated(request):
    """A sandbox as well isolated as this machine lets us; without the flag that is asked for, the test is skipped."""
    made = await Sandbox.open(CommandLimits(seconds=10, memory_mib=256))
    try:
        if request.param not in made.isolation_prefix:
            pytest.skip(f"this machine does not let us unshare with {request.param}")
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize("isolated", ["--keep-caps"], indirect=True)
async def test_a_confined_command_writes_in_its_sandbox_only(isolated):
    name = f"r3async-{os.getpid()}-{id(isolated)}"
    places = [Path(folder, name) for folder in (Path.cwd(), "/dev/shm", "/tmp", "/var/tmp", Path.home())]
    ran = await isolated.run("; ".join(f"echo > {place} && echo {place.parent}" for place in places))
    assert [line for line in ran.output.splitlines() if "cannot create" not in line] == ["/dev/shm", "/tmp"]
    assert not any(place.exists() for place in places)
    assert (await isolated.run(f"ls /tmp/{name} /dev/shm")).output.strip() == f"/tmp/{name}\n\n/dev/shm:"
    full = await isolated.run("for n in 1 2; do head -c 200000000 /dev/zero > /dev/shm/$n; done")
    assert "No space left on device" in full.output
    assert (await isolated.run("mount -o remount,rw /")).exit_code != 0


@pytest.mark.parametrize("isolated", ["--keep-caps"], indirect=True)
@pytest.mark.parametrize("folder", ["/tmp", str(Path.home())])
async def test_folders_at_the_top_of_the_file_system_have_no_other_path(isolated, folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", folder)
    sandbox = await Sandbox.open(isolated.limits, top_folders=["app", "logs"])
    try:
        await sandbox.write({"app/data": b"\xff\n", "logs/here": "text"})
        work = sandbox.directory
        ran = await sandbox.run(
            f"pwd; od -An -tx1 data; cat /logs/here; ls -d /usr /proc/self; mv /logs /x; mv {work}/logs {work}/x"
        )
        assert ran.output.startswith("/app\n ff 0a\ntext/proc/self\n/usr\n")
        assert ran.output.count("Read-only file system") == 2
        ran = await sandbox.run(
            f"touch /top {work}/mine /usr/mine /app/mine /logs/mine; PATH=$PATH:/usr/sbin chroot / true; "
            "unshare --user true"
        )
        assert ran.output.count("Read-only file system") == 3
        assert ran.output.count("not permitted") == 2
        assert sorted(path.name for path in work.rglob("mine")) == ["mine", "mine"]
        assert (await sandbox.run("pwd; ls")).output == "/app\ndata\nmine\n", "each command has them"
    finally:
        await sandbox.close()


async def _only_folders(sandbox):
    assert sorted(path.name for path in sandbox.directory.parent.iterdir()) == ["home", "tmp", "work"]
    assert (await sandbox.run("ls -A")).output == ""


async def _none_of(mark):
    await until(lambda: not any(mark in " ".join(_words(p)) for p in psutil.process_iter()))


@pytest.mark.parametrize("isolated", ["--net"], indirect=True)
async def test_an_isolated_command_reaches_no_network_and_its_session_ends_with_it(isolated):
    code = "import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    connect = f'python3 -c "{code.format(port=port)}"'
    assert (await isolated.run(connect)).exit_code == 1
    isolated.isolation_prefix = ()
    assert (await isolated.run(connect)).exit_code == 0
    server.close()
    isolated.isolation_prefix = await find_isolation()
    if "--pid" in isolated.isolation_prefix:
        mark = f"r3-escape-{os.getpid()}"
        await isolated.run(f"setsid python3 -c 'import time; time.sleep(600) # {mark}' & sleep 1", seconds=0.5)
        await _none_of(mark)


async def test_a_repository_is_mended_by_commands_and_rewarded_by_its_tests():
    make = build_environment_factory(EnvConfig(name="examples/code/repair.py:MendRepository"))
    for seed in range(3):
        environment = make()
        await environment.reset(seed)
        (failed,) = (await environment.step(Action(environment.oracle()))).messages
        assert "FAILED (" in failed.content
        assert "[exit code 1]" in failed.content
        assert (await environment.step(Action(environment.oracle()))).messages[0].content == "[exit code 0]"
        final = await environment.step(Action(environment.oracle()))
        assert (final.reward, final.done, final.metrics) == (1, True, {"commands": 2})
        directory = environment.sandbox.directory
        await environment.close()
        assert not directory.exists()
    await environment.reset(seed)
    await environment.step(Action(call("run", command="echo 'import sys; sys.exit(0)' > test_shop.py")))
    assert (await environment.step(Action("Done."))).reward == 0
    await environment.close()


def test_the_words_of_a_command():
    limits = CommandLimits(seconds=5, memory_mib=64, processes=7, file_mib=2)
    words = build_local_command("echo hi", limits, ("unshare", "--user", "--net", "--"), Path("/d"))
    assert words[:5] == ["unshare", "--user", "--net", "--", sys.executable]
    settings = json.loads(words[-4])
    assert settings["root"] == ""
    bounds = {"AS": 64 * 2**20, "CPU": 6, "FSIZE": 2 * 2**20, "CORE": 0, "NPROC": 7}
    assert settings["limits"] == {f"RLIMIT_{name}": bound for name, bound in bounds.items()}
    plain, confined = (
        json.loads(build_local_command("echo hi", limits, prefix, Path("/d"))[-4])
        for prefix in ((), ("unshare", "--user", "--keep-caps", "--"))
    )
    assert "RLIMIT_NPROC" not in plain["limits"], "it would count all of our user's"
    assert (confined["root"], confined["shm_bytes"]) == ("/d", 64 * 2**20)
    docker = build_docker_command("echo hi", limits, "python:3.12", Path("/d"), "r3-1")
    parts = "name r3-1,network none,memory 64m,pids-limit 7,tmpfs /tmp:size=64m,volume /d:/work,cap-drop ALL"
    for part in ("rm", *parts.split(",")):
        assert f"--{part}" in " ".join(docker)
    assert docker[-4:] == ["python:3.12", "/bin/sh", "-c", "echo hi"]
    assert "--network bridge" in " ".join(build_docker_command("x", CommandLimits(network=True), "i", Path("/d"), "n"))
    with pytest.raises(ValueError, match="`seconds` = 0 must be above 0"):
        CommandLimits(seconds=0)


async def test_a_machine_without_unshare_runs_commands_all_the_same(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *a, **k: None)
    assert await find_isolation() == ()
