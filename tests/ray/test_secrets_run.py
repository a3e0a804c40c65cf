"""A run with secrets wherever it takes any: no file that it leaves, no log of Ray's and no command line has them."""

from __future__ import annotations

import io
import secrets
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from r3async.config import EnvConfig, ServingConfig, load_config
from r3async.tools.train import train
from r3async.views.report import write_report
from tests.ray.test_resume_run import settings

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

PLANTED = f"planted{secrets.token_hex(8)}"
PROGRAM = """
import json, os, urllib.request
assert os.environ["API_KEY"].startswith("planted")
assert "R3_TEST_PLANTED" not in os.environ
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"messages": [{"role": "user", "content": os.environ["R3ASYNC_TASK_SEED"]}]}).encode()
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, head), timeout=60))
print(json.dumps({"reward": len(answer["choices"][0]["message"]["content"]) % 2}))
"""


class CommandLines(threading.Thread):
    """Looks at those of all processes until it is stopped. `found`: which had what it must not."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: list[list[str]] = []
        self.looked = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.2):
            for process in psutil.process_iter(["cmdline"]):
                words = process.info["cmdline"] or []
                self.found += [words] if any(PLANTED in word for word in words) else []
            self.looked += 1


def files_with(directory: Path, text: str) -> list[Path]:
    needle = text.encode()
    return [p for p in directory.rglob("*") if p.is_file() and not p.is_symlink() and needle in p.read_bytes()]


def test_a_run_writes_none_of_its_secrets_anywhere(untrained, tmp_path, monkeypatch):
    import ray

    monkeypatch.setenv("R3_TEST_PLANTED", PLANTED)
    chosen = [
        "steps=2",
        "generator.concurrency=4",
        "episode.max_turns=1",
        "evaluation.every_steps=1",
        "evaluation.tasks=2",
    ]
    config = load_config("quickstart", settings(untrained, "run", *chosen))
    agent = EnvConfig(
        name="agent-command",
        args={"command": [sys.executable, "-c", PROGRAM], "environment": {"API_KEY": PLANTED}},
    )
    config = msgspec.structs.replace(
        config,
        env=agent,
        evaluation=msgspec.structs.replace(config.evaluation, env=agent),
        serving=ServingConfig(enabled=True, token=PLANTED),
    )
    looking = CommandLines()
    looking.start()
    run_dir = train(config, "quickstart", Console(file=(screen := io.StringIO())), tmp_path)
    looking.stop.set()
    looking.join(10.0)
    write_report(run_dir)
    assert looking.looked
    assert looking.found == []
    assert PLANTED not in screen.getvalue()
    assert (run_dir / "report.html").is_file()
    assert list(run_dir.glob("checkpoints/*/run.json"))
    assert list(run_dir.glob("serving-*.json"))
    assert '"***"' in (run_dir / "config.toml").read_text()
    assert files_with(run_dir, "agent-command")  # the search finds what is there
    assert files_with(run_dir, PLANTED) == []
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    assert list(logs.iterdir())
    assert files_with(logs, PLANTED) == []
