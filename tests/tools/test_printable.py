"""Whatever models, environments and exceptions say, a terminal gets no character of theirs that it would obey."""

import io
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from r3async.data.control_messages import Welcome, encode_control
from r3async.envs import EnvironmentFailed
from r3async.record.events import open_event_log
from r3async.tools import cli
from r3async.tools.submit import commands as submit_commands
from r3async.tools.submit import jobs as submit
from r3async.tools.tail.lines import print_run_lines
from r3async.tools.tail.live import LiveView
from r3async.tools.terminal import SafeConsole
from r3async.views.follow import FollowedRun
from r3async.world.process_output import clean_log_output, escape_control_characters
from tests.tools.test_tail import write_run

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rdone\u202egnp.exe\x08\x7f\ud800"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f\ud800-\udfff]")


def harmless(text: str) -> bool:
    return OBEYED.search(text) is None


@given(st.text(st.characters(), max_size=60))
def test_what_is_printable_is_harmless_stays_so_and_stays_the_same_json(text):
    shown = escape_control_characters(text)
    assert harmless(shown)
    assert escape_control_characters(shown) == shown
    assert "\n" not in escape_control_characters(text, keep_newlines=False)
    assert json.loads(escape_control_characters(json.dumps(text, ensure_ascii=False))) == text
    shown.encode()


def test_readable_text_is_left_as_it_is():
    text = "1 + 1 = 2\n\tπ, 日本語, naïve, 👍🏽 \\x1b"
    assert escape_control_characters(text) == text
    assert escape_control_characters(text, keep_newlines=False) == text.replace("\n", "\\u000a").replace(
        "\t", "\\u0009"
    )
    assert escape_control_characters("\x1b[31m") == "\\u001b[31m"
    assert clean_log_output("\x1b[36m(pid=1)\x1b[0m ok\r\n50%\r") == "(pid=1) ok\n50%\\u000d"


def test_rich_shows_its_own_colours_and_none_of_anybody_elses():
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, color_system="standard", width=200)
    console.print(f"{HOSTILE} here", style="bold red", markup=False, highlight=False)
    console.print(Text.assemble("a ", (HOSTILE, "green")))
    shown = file.getvalue()
    assert "\x1b[1;31m" in shown
    assert harmless(re.sub(r"\x1b\[[0-9;]*m", "", shown))
    assert "\\u001b]0;owned" in shown
    plain = io.StringIO()
    Console(file=plain, width=200).print(HOSTILE.rstrip("\ud800"), markup=False)
    assert not harmless(plain.getvalue())  # Rich by itself does not do it


def test_the_live_line():
    file = io.StringIO()
    with LiveView(SafeConsole(file=file, width=300), steps=3) as view:
        view.print_line(f"the environment says {HOSTILE}")
        view.show_phase(f"loading {HOSTILE}")
    assert "the environment says \\u001b" in file.getvalue()
    assert harmless(file.getvalue())


def hostile_run(tmp_path: Path) -> Path:
    run = write_run(tmp_path, 2)
    events = open_event_log(run, "generator-0")
    events.warning("episode_failed", error=f"ValueError: {HOSTILE[:-1]}", exception=HOSTILE[:-1])
    events.error("run_failed", error=HOSTILE[:-1])
    return run


def test_tail_line_by_line(tmp_path):
    out = io.StringIO()
    assert print_run_lines(FollowedRun(hostile_run(tmp_path)), out, follow=False) == 1
    assert "\\u001b]0;owned" in out.getvalue()
    assert harmless(out.getvalue())


def test_inspect(tmp_path, monkeypatch):
    """A message with a name that no session of ours has."""
    message = encode_control(Welcome(f"owned{HOSTILE[:-1]}", "e", 1, 2, [HOSTILE[:-1]]))
    (tmp_path / "welcome").write_bytes(message)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["inspect", "welcome"])
    assert "session=owned\\u001b]0;" in result.output
    assert harmless(result.output)


def test_a_jobs_log(monkeypatch, capsys):
    submit.write_log(f"\x1b[32m{HOSTILE}\x1b[0m\n")
    assert harmless(capsys.readouterr().out)
    jobs = SimpleNamespace(find_job=str, get_logs=lambda job: f"{HOSTILE}\n")
    monkeypatch.setattr(submit_commands, "_open_jobs", lambda *args: nullcontext(jobs))
    result = CliRunner().invoke(cli.app, ["submit", "logs", "job"])
    assert (result.exit_code, harmless(result.output)) == (0, True)
    assert "owned" in result.output


class Hostile:
    def oracle(self):
        return "x"

    async def reset(self, task_seed):
        raise EnvironmentFailed(HOSTILE)

    async def step(self, action):
        raise NotImplementedError


@pytest.mark.parametrize("raised", [cli.ConfigError(HOSTILE), RuntimeError(HOSTILE)])
def test_errors_of_any_command(monkeypatch, capsys, raised):
    def fail(**_: object) -> None:
        raise raised

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert "owned" in said
    assert harmless(said)


def test_eval(monkeypatch, capsys):
    words = ["r3async", "eval", "--env", "tests.tools.test_printable:Hostile", "--policy", "oracle", "--tasks", "1"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr()
    assert "owned" in said.err
    assert harmless(said.out + said.err)
