"""Secrets are known to the process that needs them, and written nowhere."""

import json
import os
import stat
import sys

import msgspec
import pytest
from typer.testing import CliRunner

from r3async.checkpoint.resume_checks import find_changed_settings
from r3async.config import (
    Config,
    ConfigError,
    EnvConfig,
    Secret,
    collect_secrets,
    config_from_dict,
    config_to_dict,
    config_to_toml,
    load_command_config,
    load_config,
)
from r3async.envs.pool import make_pooled_factory
from r3async.rollout.agents import make_agent
from r3async.rollout.episode import EpisodeError, EpisodeTask
from r3async.rollout.evaluation import check_environment
from r3async.tools.cli import app
from r3async.tools.eval import find_evaluation_target
from r3async.tools.submit.jobs import make_package
from r3async.weights.manifest import WeightError
from r3async.weights.version_folder import VersionFolder
from r3async.world.real import REAL_WORLD
from tests.helpers.serving import TASK, answer_ids, client_of, ready, renderer, serving, user

PLANTED = "planted-5b1d0c7fa2e94863"


@pytest.fixture
def planted() -> Config:
    """With a secret wherever there may be one."""
    agent = {"name": "agent-command", "args": {"command": ["python"], "environment": {"API_KEY": PLANTED}}}
    return config_from_dict(
        {"serving": {"enabled": True, "token": PLANTED}, "env": agent, "evaluation": {"every_steps": 1, "env": agent}}
    )


def texts_of(config: Config) -> tuple[str, ...]:
    fields = str(msgspec.structs.asdict(config))
    return repr(config), config_to_toml(config), json.dumps(config_to_dict(config)), fields


def test_a_secret_prints_as_stars_and_only_reveal_gives_it_away():
    secret = Secret(PLANTED)
    for text in (str(secret), repr(secret), f"{secret}", f"{[secret]}", str({"a": secret})):
        assert PLANTED not in text
    assert secret.reveal("serving.token") == PLANTED
    assert secret == Secret(PLANTED) != Secret("other")
    assert (bool(secret), bool(Secret())) == (True, False)


def test_what_is_written_of_a_configuration_has_no_secret_in_it(planted):
    assert set(collect_secrets(planted)) == {
        "serving.token",
        "env.args.environment.API_KEY",
        "evaluation.env.args.environment.API_KEY",
    }
    for text in texts_of(planted):
        assert PLANTED not in text
    with pytest.raises(TypeError):
        json.dumps(msgspec.structs.asdict(planted.serving))
    with pytest.raises(TypeError):
        msgspec.json.encode(planted)


MCP_SERVERS = {
    "files": {"command": ["python", "--read-only", "-v", f"--token={PLANTED}", PLANTED, "$R3_WORD"]},
    "web": {
        "url": f"http://localhost/mcp?key={PLANTED}",
        "headers": {"Authorization": f"Bearer {PLANTED}", "X-Key": "$TOKEN", "X-Other": "Bearer $TOKEN"},
    },
    "user": {"url": f"http://me:{PLANTED}@localhost/mcp", "headers": {"X-Mixed": f"{PLANTED} $TOKEN"}},
}
MCP_ARGS = {"servers": MCP_SERVERS, "environment": {"TOKEN": PLANTED}}


@pytest.mark.parametrize(
    "env",
    [
        {"name": "mcp:guess", "args": MCP_ARGS},
        {"name": "mix", "args": {"a": {"name": "mcp:guess", "args": MCP_ARGS}, "b": {"name": "guess"}}},
    ],
    ids=["alone", "one of several"],
)
def test_what_may_be_a_secret_of_a_tool_server_is_written_nowhere(env, tmp_path, monkeypatch):
    config = config_from_dict({"env": env})
    for text in texts_of(config):
        assert PLANTED not in text
    for kept in ('"python"', '"--read-only"', '"-v"', '"$R3_WORD"', '"$TOKEN"', '"Bearer $TOKEN"'):
        assert kept in json.dumps(config_to_dict(config))
    there = config_from_dict(config_to_dict(config, reveal=True))
    assert there == config
    monkeypatch.setenv("R3_WORD", "a word")
    given = there.env.reveal_args()
    servers = given["a"]["args"]["servers"] if env["name"] == "mix" else given["servers"]
    assert servers["files"]["command"] == [*MCP_SERVERS["files"]["command"][:-1], "a word"]
    assert (servers["web"], servers["user"]) == (MCP_SERVERS["web"], MCP_SERVERS["user"])
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    with pytest.raises(ConfigError, match=r"servers\.files\.command\[3\]` is '\*\*\*'"):
        check_environment(load_config(str(tmp_path / "config.toml")))
    assert find_changed_settings(config_to_dict(config), config) == {}


def test_a_run_resumes_with_a_variable_where_a_word_was_literal():
    def with_word(word):
        return config_from_dict({"env": {"name": "mcp:guess", "args": {"servers": {"a": {"command": ["x", word]}}}}})

    assert find_changed_settings(config_to_dict(with_word(PLANTED)), with_word("$TOKEN")) == {}
    assert find_changed_settings(config_to_dict(with_word("--one")), with_word("--two")) != {}


def test_words_of_a_command_may_be_typed_and_headers_may_not():
    servers = "env.args.servers"
    command = f'{servers}.a.command=["python", "server.py"]'
    assert load_command_config("quickstart", ["env.name=mcp:guess", "env.args={}", command]).env.name == "mcp:guess"
    with pytest.raises(ConfigError, match="is a secret, and command lines can be read by others"):
        load_command_config(
            "quickstart", ["env.name=mcp:guess", "env.args={}", f"{servers}.a.headers.Authorization=abc"]
        )


def test_an_actor_is_given_the_secrets_and_a_file_is_not(planted):
    there = config_from_dict(config_to_dict(planted, reveal=True))
    assert there == planted
    assert there.env.reveal_args()["environment"] == {"API_KEY": PLANTED}
    read = config_from_dict(config_to_dict(planted))
    with pytest.raises(
        ConfigError, match=r"`serving.token` is '\*\*\*': secrets are not written to files. Set it again"
    ):
        read.serving.token.reveal("serving.token")


def test_a_resumed_run_does_not_take_the_stars_for_the_secret(planted, tmp_path):
    (tmp_path / "config.toml").write_text(config_to_toml(planted))
    read = load_config(str(tmp_path / "config.toml"))
    with pytest.raises(ConfigError, match=r"environment.API_KEY` is '\*\*\*'"):
        check_environment(read)
    assert find_changed_settings(config_to_dict(planted), planted) == {}
    named = msgspec.structs.replace(planted.serving, token=Secret("$TOKEN"))
    assert find_changed_settings(config_to_dict(planted), msgspec.structs.replace(planted, serving=named)) == {}


def test_a_secret_that_is_named_by_a_variable_is_found_again(monkeypatch, tmp_path):
    config = config_from_dict({"serving": {"token": "$R3_TEST_TOKEN"}})
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    again = load_config(str(tmp_path / "config.toml"))
    assert again.serving.token == config.serving.token
    with pytest.raises(
        ConfigError, match=r"`serving.token` = '\$R3_TEST_TOKEN': there is no such environment variable"
    ):
        again.serving.token.reveal("serving.token")
    monkeypatch.setenv("R3_TEST_TOKEN", PLANTED)
    assert again.serving.token.reveal("serving.token") == PLANTED
    assert PLANTED not in config_to_toml(again)


def test_a_wrong_secret_is_refused_without_being_shown():
    with pytest.raises(ConfigError, match=r"`serving.token` must be a text") as refused:
        config_from_dict({"serving": {"token": [PLANTED]}})
    assert PLANTED not in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [f"serving.token={PLANTED}", f"serving={{ token = '{PLANTED}' }}", f"env.args.environment.KEY={PLANTED}"],
)
def test_a_secret_on_a_command_line_is_refused_and_a_variables_name_is_not(override):
    """Of a job, the cluster shows the command to everybody; of a process, the machine does."""
    for command in (["train"], ["submit", "run"]):
        result = CliRunner().invoke(app, [*command, "quickstart", override, "--dry-run"])
        assert result.exit_code != 0
        assert PLANTED not in result.output
        assert "is a secret, and command lines can be read by others" in str(result.exception or result.output)
    named = override.replace(PLANTED, "$NAME")
    assert "$NAME" in str(collect_secrets(load_command_config("quickstart", [named, "serving.enabled=true"])))


def test_what_a_job_of_the_cluster_shows_has_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN", PLANTED)
    monkeypatch.setenv("R3_TEST_TOKEN", PLANTED)
    monkeypatch.chdir(tmp_path)
    config = load_command_config("quickstart", ["serving.enabled=true", "serving.token=$R3_TEST_TOKEN"])
    package = make_package(config, "quickstart", ["serving.token=$R3_TEST_TOKEN"])
    assert PLANTED not in package.entrypoint + json.dumps(package.runtime_env)
    assert "R3_TEST_TOKEN" in package.entrypoint


def test_eval_of_a_run_whose_token_is_not_known_serves_its_own_agent(planted, tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    (run / "config.toml").write_text(
        config_to_toml(config_from_dict({"serving": {"token": PLANTED, "host": "0.0.0.0"}}))
    )
    target = find_evaluation_target(str(run), None, None, [], tmp_path)
    assert (target.config.serving.host, target.config.serving.token) == ("127.0.0.1", Secret())


class Variables:
    """Says what it sees of its environment."""

    def reset(self, task_seed):
        return json.dumps(dict(os.environ))

    def step(self, action):
        raise NotImplementedError


async def test_a_process_of_environments_has_an_allow_list_of_variables(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", PLANTED)
    monkeypatch.setenv("WANDB_API_KEY", PLANTED)
    monkeypatch.setenv("R3_TEST_LICENCE", "named")
    config = EnvConfig(name="tests.unit.test_secrets:Variables", variables=["R3_TEST_LICENCE"])
    environment = make_pooled_factory(config.name, {}, config, has_oracle=False)()
    try:
        (message,) = await environment.reset(0)
    finally:
        environment.pool.close()
    assert PLANTED not in message.content
    seen = json.loads(message.content)
    assert seen["R3_TEST_LICENCE"] == "named"
    assert seen["PATH"] == os.environ["PATH"]


async def test_an_agents_program_has_its_own_secrets_and_none_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN", PLANTED)
    monkeypatch.setenv("R3_TEST_OWN", "its own")
    report = tmp_path / "seen.json"
    script = f"import json, os; open({str(report)!r}, 'w').write(json.dumps(dict(os.environ)))"
    args = {"command": [sys.executable, "-c", script], "environment": {"API_KEY": "$R3_TEST_OWN", "PLAIN": "text"}}
    agent, chat = make_agent(EnvConfig(name="agent-command", args=args)), renderer()
    async with serving(await ready(answer_ids(chat, "x")), chat) as server:
        session = server.open_session(TASK)
        await agent(server, session)
        seen = json.loads(report.read_text())
        assert PLANTED not in report.read_text()
        assert (seen["API_KEY"], seen["PLAIN"], seen["OPENAI_API_KEY"]) == ("its own", "text", session.key)


async def test_an_agents_words_behind_a_flag_of_a_secret_are_given_to_it_and_shown_nowhere(monkeypatch):
    monkeypatch.setenv("R3_TEST_OWN", "its own")
    words = ["--model", "small", f"--token={PLANTED}", "--api-key", PLANTED, "--password", "$R3_TEST_OWN"]
    given = "".join([*words[:-1], "its own"])
    script = f"import sys; sys.exit(3 if len(''.join(sys.argv[1:])) == {len(given)} else 4)"
    command = [sys.executable, "-c", script, *words]
    config = config_from_dict({"env": {"name": "agent-command", "args": {"command": command}}})
    for text in texts_of(config):
        assert PLANTED not in text
        assert "small" in text
    assert config_from_dict(config_to_dict(config, reveal=True)) == config
    agent, chat = make_agent(config.env), renderer()
    async with serving(await ready(answer_ids(chat, "x")), chat) as server:
        with pytest.raises(EpisodeError, match=r"--model small \*\*\* --api-key \*\*\* .* exited with 3") as ended:
            await agent(server, server.open_session(TASK))
    assert PLANTED not in str(ended.value)


async def test_a_key_opens_its_own_episode_and_no_other():
    chat = renderer()
    async with serving(await ready(answer_ids(chat, "a", "b")), chat) as server:
        mine, other = server.open_session(TASK), server.open_session(EpisodeTask(9, 1, 5))
        assert mine.key != other.key
        async with client_of(server, mine.key) as me, client_of(server, other.key) as you:
            my_answer = await me.chat.completions.create(model="m", messages=[user("q")])
            your_answer = await you.chat.completions.create(model="m", messages=[user("q")])
            assert (await me.get("/r3async/session", cast_to=object))["episode"] == TASK.trajectory_id
            with pytest.raises(Exception, match="not the id of an answer in this episode"):
                await me.post("/r3async/reward", body={"reward": 1e6, "id": your_answer.id}, cast_to=object)
            await me.post("/r3async/reward", body={"reward": 2, "id": my_answer.id}, cast_to=object)
            with pytest.raises(Exception, match="'episode is not a field of this call: leave it out'"):
                await me.post(
                    "/r3async/reward", body={"reward": 3, "episode": other.task.trajectory_id}, cast_to=object
                )
        assert (other.is_rewarded, other.total_reward, mine.total_reward) == (False, 0.0, 2.0)
        for guess in ("r3-", mine.key[:-1], mine.key + "x", other.task.trajectory_id, server.token):
            async with client_of(server, guess or "none") as nobody:
                with pytest.raises(Exception, match="Incorrect API key"):
                    await nobody.get("/r3async/session", cast_to=object)


def test_the_folder_of_weights_is_for_its_owner_only(tmp_path):
    folder = VersionFolder(tmp_path / "weights", keep=1)
    for path in (tmp_path / "weights", folder.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    folder.close()
    (tmp_path / "weights").chmod(0o777)
    REAL_WORLD.files.make_private_directory(tmp_path / "weights")
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused_by_name(tmp_path):
    theirs = tmp_path / "weights"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(
        WeightError, match=r"belongs to user 12345, .* set weights.directory to a directory of your own"
    ):
        VersionFolder(theirs, keep=1)
    assert list(theirs.iterdir()) == []


def test_a_link_where_others_may_make_one_is_not_followed(tmp_path):
    elsewhere, shared = tmp_path / "elsewhere", tmp_path / "shm"
    elsewhere.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "r3async-0").symlink_to(elsewhere)
    with pytest.raises(WeightError, match="is a link, or no directory"):
        VersionFolder(shared / "r3async-0", keep=1)
    assert list(elsewhere.iterdir()) == []
    (tmp_path / "own").symlink_to(elsewhere)  # one's own is followed
    VersionFolder(tmp_path / "own", keep=1).close()
