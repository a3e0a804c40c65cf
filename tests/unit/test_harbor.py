"""`harbor:FOLDER`: tasks in Harbor's format, in the sandbox, and in Docker where it is there."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from r3async.config import ConfigError, EnvConfig
from r3async.envs import Action, EnvironmentFailed
from r3async.envs.adapters import harbor_tasks
from r3async.envs.adapters.harbor_format import parse_rewards
from r3async.envs.containers import find_docker_problem
from r3async.envs.factory import build_environment_factory
from r3async.envs.sandbox import can_confine, run_bounded
from r3async.world.processes import run_on_own_loop

EXAMPLE = Path(__file__).parents[2] / "examples" / "harbor" / "tasks"
confined = pytest.mark.skipif(not run_on_own_loop(can_confine()), reason="this machine forbids namespaces")
TEST = "#!/bin/bash\ntest -e /app/done && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
DONE = Action("Done.")


def bash(command):
    return Action(f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>")


def make(folder, variables=(), **args):
    return build_environment_factory(
        EnvConfig(name=f"harbor:{folder}", args={"images": False, **args}, variables=list(variables))
    )


@pytest.fixture
def write(tmp_path):
    """Write a task by its files, and return the folder that it is in."""

    def write(toml="", test=TEST, name="task", **files):
        every = {"task.toml": toml, "instruction.md": f"Do {name}.\n", "tests/test.sh": test, **files}
        for path, text in every.items():
            place = tmp_path / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return tmp_path

    return write


async def play(environment, *actions, seed=0):
    """Play an episode and close it. Returns the results of its steps."""
    try:
        await environment.reset(seed)
        return [await environment.step(action) for action in actions]
    finally:
        await environment.close()


@pytest.mark.long
@confined
async def test_the_recipes_tasks_pay_for_their_solutions_and_for_nothing_else():
    factory = make(EXAMPLE)
    assert factory().size == 3
    for seed in range(3):
        env = factory()
        await env.reset(seed)
        called, ended = [await env.step(Action(env.oracle())) for _ in range(2)]
        await env.close()
        assert called.messages[0].content == "[exit code 0]"
        assert (ended.reward, ended.done) == (1, True)
        assert (ended.metrics["commands"], ended.metrics["tests_without_reward"]) == (1, 0)
        assert (await play(env, DONE, seed=seed))[0].reward == 0
    _, half = await play(factory(), bash("echo 'echo \"Hello, $1!\"' > greet.sh"), DONE)
    assert (half.reward, half.metrics["greets_by_name"]) == (0, 1)


@confined
async def test_a_task_has_the_folders_of_a_container_and_changes_nothing_else(write):
    toml = '[environment]\nworkdir = "/app/here"\nenv = { KIND = "small" }\n[agent.env]\nTOKEN = "${R3_TOKEN:-none}"'
    files = {"environment/seen.txt": "the task's\n", "environment/Dockerfile": "FROM scratch"}
    folder = write(toml, **files)
    look = "pwd; ls; cat seen.txt; ls /tests; touch /usr/mine; rmdir /app; mv /tests /t; echo $KIND $TOKEN"
    said = (await play(make(folder)(), bash(look)))[0].messages[0].content.splitlines()
    assert said[:3] == ["/app/here", "seen.txt", "the task's"]
    assert "touch: cannot touch '/usr/mine': Read-only file system" in said
    assert sum("cannot move '/tests'" in line or "failed to remove '/app'" in line for line in said) == 2
    assert said[-2:] == ["small none", "[exit code 0]"]


@confined
async def test_the_tests_are_those_of_the_task_whatever_a_command_left(write):
    cheat = "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; mkdir /logs/verifier; ln -s /tests /logs/x"
    folder = write(name="a")
    write(name="b", **{"tests/check.py": "import sys; sys.exit(0)"}, test="#!/bin/sh\npython3 -I /tests/check.py\n")
    factory = make(folder)
    assert (await play(factory(), bash(cheat + "; echo 1 > /logs/verifier/reward.json"), DONE))[1].reward == 0
    assert (await play(factory(), bash("touch done"), bash("rm -r /logs/*"), DONE))[2].reward == 1
    silent = (await play(factory(), DONE, seed=1))[0]  # the exit code of the tests says nothing, as in Harbor
    assert (silent.reward, silent.metrics["tests_without_reward"]) == (0, 1)


@confined
async def test_time_and_number_of_commands_are_limited(write):
    toml = "[agent]\ntimeout_sec = 1.5\n[verifier]\ntimeout_sec = 1.0"
    folder = write(toml, "#!/bin/sh\necho 1 > /logs/verifier/reward.txt; sleep 60\n")
    hang, late, ended = await play(make(folder)(), bash("sleep 60"), bash("echo hi"), DONE)
    assert hang.messages[0].content == "[out of time]"
    assert (late.done, late.reward, late.metrics["tests_without_reward"]) == (True, 0, 1), "its call was not made"
    assert ended.done
    folder = write()
    results = await play(make(folder, commands=1, seconds=0.5)(), bash("sleep 9"), bash("touch done"))
    assert results[0].messages[0].content == "[out of time]"
    assert (results[1].done, results[1].reward) == (True, 0)


@confined
async def test_a_solution_of_several_files_and_one_that_is_missing(write):
    folder = write(**{"solution/solve.sh": 'cp "$(dirname "$0")/answer" /app/done', "solution/answer": "42"})
    env = make(folder)()
    await env.reset(0)
    (solved, ended) = [await env.step(Action(env.oracle())) for _ in range(2)]
    assert (solved.messages[0].content, ended.reward) == ("[exit code 0]", 1)
    await env.close()
    (folder / "task" / "solution" / "solve.sh").unlink()
    await env.reset(0)
    with pytest.raises(EnvironmentFailed, match=r"no solve\.sh, which the oracle runs"):
        env.oracle()
    await env.close()


def test_what_tests_write():
    assert parse_rewards("0.5\n") == parse_rewards('{"reward": 0.5}') == {"reward": 0.5}
    assert parse_rewards('{"reward": 1, "brief": 0.25}') == {"reward": 1, "brief": 0.25}
    for text in ("", "nan", "much", '{"reward": "1"}', '{"reward": 1e999}', "[1]"):
        assert parse_rewards(text) == {}, text


@confined
async def test_several_rewards_need_one_that_is_trained(write):
    folder = write(test='#!/bin/sh\necho \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json')
    with pytest.raises(EnvironmentFailed, match="its tests wrote a, b, and no `reward`"):
        await play(make(folder)(), DONE)
    write(test="#!/bin/sh\necho '{\"a\": 0.5}' > /logs/verifier/reward.json")
    assert (await play(make(folder)(), DONE))[0].reward == 0.5


def test_tasks_that_cannot_be_played_are_named_at_the_start(write, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"env\.name.*no task\.toml in"):
        make(tmp_path)
    with pytest.raises(ConfigError, match=r"env\.args.*unknown field `image`"):
        make(tmp_path, image="x")
    folder = write(name="fine")
    for name, toml in {
        "stepwise": '[[steps]]\nname = "a"',
        "apart": '[verifier]\nenvironment_mode = "separate"',
        "asks": '[verifier.env]\nKEY = "${R3_TEST_KEY}"',
        "odd": "[agent]\ntimeout_sec = 'long'",
        "broken": "[agent",
    }.items():
        write(toml, name=name)
    write(name="composed", **{"environment/docker-compose.yaml": ""})
    (folder / "empty").mkdir()
    (folder / "empty" / "task.toml").touch()
    with pytest.raises(ConfigError, match="7 of its 8 tasks cannot run: ") as refused:
        make(folder)
    for part in (
        "stepwise (it asks for several steps)",
        "apart (it asks for an environment of the verifier's own)",
        "asks (it wants the variable R3_TEST_KEY: set it, and name it in `env.variables`)",
        "composed (it asks for docker-compose.yaml)",
        "empty (it has no instruction.md)",
        "odd (Expected `float | null`, got `str` - at `$.agent.timeout_sec`)",
        "mend or remove them",
    ):
        assert part in str(refused.value)
    monkeypatch.setenv("R3_TEST_KEY", "k")
    assert make(write(name="asks").parent / folder.name / "asks", ["R3_TEST_KEY"])().size == 1


@confined
def test_a_workdir_of_this_machine_is_refused(write):
    folder = write('[environment]\nworkdir = "/usr/src"')
    with pytest.raises(ConfigError, match=r"task \(its workdir is /usr/src\): outside of a container"):
        make(folder)


def test_a_machine_without_docker_or_without_namespaces_says_what_it_lacks(write, monkeypatch):
    async def cannot():
        return False

    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    folder = write('[environment]\ndocker_image = "python:3.12"', name="imaged")
    write(name="built", **{"environment/Dockerfile": "FROM python:3.12"})
    write(name="plain")
    with pytest.raises(ConfigError, match="2 of its 3 tasks cannot run: built, imaged: they need images") as refused:
        make(folder, images=True)
    assert "set `env.args.images` = false" in str(refused.value)
    monkeypatch.setattr(harbor_tasks, "can_confine", cannot)
    with pytest.raises(ConfigError, match=r"3 of its 3 tasks cannot run: .*need namespaces"):
        make(folder)


# -- containers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """An image made of a static busybox, since none can be pulled everywhere."""
    busybox = os.environ.get("R3ASYNC_TEST_BUSYBOX") or shutil.which("busybox")
    if busybox is None or run_on_own_loop(find_docker_problem()):
        pytest.skip("this needs Docker, and a static busybox")
    folder, name = tmp_path_factory.mktemp("image"), "r3async-test-busybox"
    folder.chmod(0o755)
    (folder / "bin").mkdir()
    shutil.copy(busybox, folder / "bin" / "busybox")
    for applet in subprocess.check_output([busybox, "--list"], text=True).split():
        if applet != "busybox":
            (folder / "bin" / applet).symlink_to("busybox")
    (folder / "bin" / "bash").unlink(missing_ok=True)
    (folder / "bin" / "bash").write_text('#!/bin/sh\nexec sh "$@"\n')
    (folder / "bin" / "bash").chmod(0o755)
    (folder / "etc").mkdir()
    (folder / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\nada:x:99:99::/:/bin/sh\n")
    packed = subprocess.run(["tar", "-C", folder, "-c", "."], check=True, capture_output=True).stdout
    subprocess.run(
        ["docker", "import", "-c", "ENV PATH=/bin", "-", name], input=packed, check=True, capture_output=True
    )
    yield name
    subprocess.run(["docker", "rmi", "--force", name], capture_output=True, timeout=240, check=False)


async def list_containers() -> set[str]:
    """Return the names of all containers, also of those that have ended."""
    return set((await run_bounded(["docker", "ps", "--all", "--format", "{{.Names}}"], 30, 65536)).output.split())


@pytest.mark.long
async def test_a_task_is_played_in_a_container_of_its_image(image, write):
    toml = '[environment]\nworkdir = "/app"\nnetwork_mode = "no-network"\n[agent]\nuser = "ada"\n[verifier]\nuser = 0'
    folder = write(
        toml, **{"environment/Dockerfile": f"FROM {image}\nRUN mkdir /app && echo 7 > /app/seven && chmod 777 /app"}
    )
    env = make(folder, images=True, seconds=1)()
    before = await list_containers()
    await env.reset(0)
    (container,) = await list_containers() - before
    look = await env.step(bash("cat seven; id -un; touch done; for n in 1 2 3 4 5; do echo $n; echo $n- >&2; done"))
    assert look.messages[0].content.split("\n")[:-1] == [
        "7",
        "ada",
        *(f"{n}{end}" for n in range(1, 6) for end in ("", "-")),
    ]
    slow = await env.step(bash("sleep 60"))
    assert slow.messages[0].content == "[out of time]"
    assert (await env.step(DONE)).reward == 1
    await env.close()
    assert container not in await list_containers()
    write(f'[environment]\ndocker_image = "{image}"', **{"environment/Dockerfile": "FROM nowhere"})
    (folder / "task" / "environment" / "Dockerfile").unlink()
    (folder / "task" / "environment" / "given").touch()
    (listed, ended) = await play(make(folder, images=True)(), bash("ls -d given; mkdir /app; touch /app/done"), DONE)
    assert listed.messages[0].content.startswith("given\n")
    assert ended.reward == 1
    write(**{"environment/Dockerfile": f"FROM {image}\nRUN false"})
    with pytest.raises(EnvironmentFailed, match=r"(?s)`docker build .*failed"):
        await play(make(folder, images=True)(), DONE)
