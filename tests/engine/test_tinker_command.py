"""`r3async tinker` as a process: the loops of the recipe, what it prints, and how it ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tinker", reason='the SDK is not installed: pip install "r3async[tinker]"')

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "learner.backend=torch",
    "learner.dtype=float32",
    "generator.dtype=float32",
    "generator.kv_cache_gib=0.25",
    "episode.max_total_tokens=512",
]
pytestmark = [pytest.mark.engine, pytest.mark.long]


def start(folder, model, *changes, **environment):
    command = [sys.executable, "-m", "r3async.tools.cli", "tinker", str(model), *SETTINGS, *changes]
    options = ["--port", "0", "--as", "tiny/moe"]
    variables = {name: value for name, value in os.environ.items() if name != "TINKER_API_KEY"} | environment
    process = subprocess.Popen([*command, *options], cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline()


def read_exports(line, folder):
    found = re.fullmatch(r'export TINKER_BASE_URL=(\S+) TINKER_API_KEY="\$\(cat (\S+)\)"\n', line)
    assert found[2] == str(folder / "runs" / "tinker" / "key")
    assert Path(found[2]).stat().st_mode & 0o777 == 0o600
    return {"TINKER_BASE_URL": found[1], "TINKER_API_KEY": Path(found[2]).read_text()}


def stop(process, number=signal.SIGTERM):
    process.send_signal(number)
    process.communicate(timeout=240)
    return process.returncode


@pytest.mark.timeout(600)
def test_loops_of_recipe_and_page_learn_and_the_server_starts_again(tiny_model, tmp_path):
    process, line = start(tmp_path, tiny_model)
    try:
        exports = read_exports(line, tmp_path)
        printed = {}
        for loop in ("supervised", "reinforce", "turns"):
            command = [sys.executable, str(ROOT / "examples" / "tinker" / f"{loop}.py"), "tiny/moe"]
            done = subprocess.run(command, env=os.environ | exports, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stdout + done.stderr
            printed[loop] = done.stdout
        losses = [float(value) for value in re.findall(r"cross entropy (\S+)", printed["supervised"])]
        assert losses[-1] < 0.9 * losses[0]
        for loop in ("reinforce", "turns"):
            assert set(re.findall(r"routes (\S+)", printed[loop].replace(",", " "))) == {"1.00"}
        assert max(float(value) for value in re.findall(r"k3 (\S+)", printed["reinforce"])) < 1e-6
        page = (ROOT / "docs" / "tinker.md").read_text()
        program = "".join(re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
        command = [sys.executable, "-c", program.replace("Qwen/Qwen3-30B-A3B", "tiny/moe")]
        done = subprocess.run(command, env=os.environ | exports, capture_output=True, text=True, timeout=100)
        assert re.fullmatch(r"1\.0 \S+\n", done.stdout), done.stdout + done.stderr
    finally:
        assert stop(process) == 0
    process, line = start(tmp_path, tiny_model)
    try:
        assert read_exports(line, tmp_path)["TINKER_API_KEY"] == exports["TINKER_API_KEY"]
        program = "import tinker; client = tinker.ServiceClient().create_training_client_from_state({!r}).result()"
        (path,) = re.findall(r"saved: (\S+)", printed["supervised"])
        command = [sys.executable, "-c", program.format(path)]
        exports = read_exports(line, tmp_path)
        done = subprocess.run(command, env=os.environ | exports, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    finally:
        assert stop(process, signal.SIGINT) == 0


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_several_ranks_train_as_one(tiny_model, tmp_path):
    process, line = start(tmp_path, tiny_model, "learner.parallel.dp=2")
    try:
        command = [sys.executable, str(ROOT / "examples" / "tinker" / "reinforce.py"), "tiny/moe"]
        variables = os.environ | read_exports(line, tmp_path)
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert set(re.findall(r"routes (\S+),", done.stdout)) == {"1.00"}
        assert max(float(value) for value in re.findall(r"k3 (\S+)", done.stdout)) < 1e-6
    finally:
        assert stop(process) == 0


def test_a_directory_in_use_and_a_key_of_another_kind_are_refused(tiny_model, tmp_path):
    process, line = start(tmp_path, tiny_model, TINKER_API_KEY="tml-own")
    try:
        assert re.fullmatch(r"export TINKER_BASE_URL=\S+  # and TINKER_API_KEY as it is here\n", line)
        command = [sys.executable, "-m", "r3async.tools.cli", "tinker", str(tiny_model), *SETTINGS]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2
        assert "is in use" in done.stderr
        other = subprocess.run(
            [*command, "name=other"],
            cwd=tmp_path,
            env=os.environ | {"TINKER_API_KEY": "sk-1"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert other.returncode == 2
        assert "the key must begin with 'tml-'" in other.stderr
    finally:
        assert stop(process) == 0
