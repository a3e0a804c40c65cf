"""Where runs are: `--runs` and R3ASYNC_RUNS mean the same to every command that takes a run's name, and to Python."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import r3async
from r3async.config import Config, ConfigError, config_from_dict, config_to_toml
from r3async.tools.cli import app
from r3async.tools.runs import RUNS_VARIABLE, get_runs_directory
from r3async.tools.submit.jobs import make_package


def write_run(root: Path) -> Path:
    run = root / "mine"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(config_to_toml(config_from_dict({})))
    (run / "events.jsonl").write_text(json.dumps({"time": 1.0, "level": "info", "event": "run_finished"}) + "\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "time": 1.0, "reward/mean": 0.5}) + "\n")
    (root / "latest").symlink_to("mine")
    return run


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


NO_RUN = {("submit", word) for word in ("status", "logs", "stop")}
"""Commands of jobs, which look for no run here."""


def test_every_command_that_takes_or_makes_a_run_has_the_option():
    taking = {
        path: command
        for path, command in commands()
        if path not in NO_RUN and any(_about_runs(each) for each in command.params)
    }
    assert {("tail",), ("report",), ("eval",), ("export",), ("diagnose",), ("scale",)} <= taking.keys()
    assert {("inspect", "show"), ("inspect", "routes"), ("train",), ("submit", "run"), ("sft",)} <= taking.keys()
    for path, command in taking.items():
        options = {name: each for each in command.params for name in each.opts}
        assert "--runs" in options, path
        assert options["--runs"].envvar == RUNS_VARIABLE, path


def _about_runs(parameter: Any) -> bool:
    said = f"{parameter.name} {getattr(parameter, 'help', '') or ''}"
    return parameter.param_type_name == "argument" and re.search(r"\b(runs?|preset)\b", said) is not None


LOOKING = (["tail", "--no-follow"], ["report"], ["inspect"], ["inspect", "trajectories"])


@pytest.mark.parametrize("words", LOOKING, ids=" ".join)
@pytest.mark.parametrize("named", [[], ["mine"]], ids=["latest", "name"])
@pytest.mark.parametrize("way", ["option", "variable"])
def test_a_run_of_another_root_is_found(tmp_path, monkeypatch, words, named, way):
    write_run(tmp_path / "elsewhere")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv(RUNS_VARIABLE, raising=False)
    lost = CliRunner().invoke(app, [*words, *named])
    assert (lost.exit_code, "mine" in lost.output and "run_finished" in lost.output) == (2, False)
    if way == "variable":
        monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "elsewhere"))
        found = CliRunner().invoke(app, [*words, *named])
    else:
        found = CliRunner().invoke(app, [*words, *named, "--runs", str(tmp_path / "elsewhere")])
    assert "no run" not in found.output
    if words[-1] != "trajectories":
        assert found.exit_code == 0, found.output


@pytest.mark.parametrize(
    "words", [["eval"], ["export", "mine", "model"], ["diagnose"], ["scale", "mine", "generators=2"]]
)
def test_commands_that_need_more_of_a_run_find_it_too(tmp_path, monkeypatch, words):
    write_run(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "elsewhere"))
    said = CliRunner().invoke(app, words)
    text = f"{said.output} {said.exception}"
    assert str(tmp_path / "elsewhere" / "mine") in text.replace("latest", "mine")
    assert "no run 'mine'" not in text


def test_python_takes_the_variable_too(tmp_path, monkeypatch):
    write_run(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "elsewhere"))
    assert get_runs_directory() == tmp_path / "elsewhere"
    with pytest.raises(ConfigError, match="elsewhere/mine has no model yet"):
        r3async.evaluate("mine")
    with pytest.raises(ConfigError, match="no run 'mine'"):
        r3async.evaluate("mine", runs=tmp_path)
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/file is a file"):
        r3async.train("quickstart")


def test_a_job_is_given_the_root_that_its_submitter_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "shared"))
    assert make_package(Config(), "quickstart").runtime_env["env_vars"][RUNS_VARIABLE] == str(tmp_path / "shared")
    shown = CliRunner().invoke(app, ["submit", "quickstart", "--dry-run", "--no-check"])
    assert f'"{RUNS_VARIABLE}": "{tmp_path}/shared"' in shown.output
