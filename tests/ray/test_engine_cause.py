"""What an engine's child process failed with is part of the error that a person sees."""

import asyncio
import os
import subprocess
import sys

import pytest

from r3async.actors.process import CAUSE_CHARACTERS, cause_in, with_logged_cause
from r3async.rollout.engines import EngineError
from r3async.world.real import REAL

LOG = """\
(EngineCore pid=9) ERROR 11-22 22:34:37 [core.py:1366] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-22 22:34:37 [core.py:1366]     raise ValueError(
(EngineCore pid=9) ERROR 11-22 22:34:37 [core.py:1366] ValueError: Following weights were not initialized: {'a.b'}
(EngineCore pid=9) Process EngineCore:
(EngineCore pid=9) torch.OutOfMemoryError: CUDA out of memory
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
an Error: in the middle of a line is none
"""


def test_the_last_exception_that_says_something_itself_is_the_cause():
    assert cause_in(LOG) == "torch.OutOfMemoryError: CUDA out of memory"
    assert cause_in(LOG.replace("torch.Out", "no torch.Out")).startswith("ValueError: Following weights")
    assert cause_in("nothing went wrong\n") == ""
    assert len(cause_in(f"ValueError: {'x' * 5000}")) == CAUSE_CHARACTERS


@pytest.mark.parametrize(
    ("said", "logged", "expected"),
    [
        ("Engine core initialization failed. See root cause above", LOG, "The cause: torch.OutOfMemoryError"),
        ("Engine core initialization failed. See root cause above", None, "See root cause above"),
        ("no such model", LOG, "no such model"),
    ],
)
def test_it_is_added_to_an_error_that_points_to_it(said, logged, expected, tmp_path):
    log = tmp_path / "generator-0.log"
    if logged is not None:
        log.write_text(logged)

    async def start() -> None:
        raise EngineError(said)

    with pytest.raises(EngineError) as caught:
        asyncio.run(with_logged_cause(start(), log, REAL))
    assert expected in str(caught.value)
    assert ("The cause" in str(caught.value)) == ("The cause" in expected)


@pytest.mark.timeout(500)
def test_the_driver_prints_why_vllm_cannot_load_a_model(untrained, tmp_path):
    """The engine is told of more layers than the model's files hold; its child process alone knows."""
    words = ["name=broken", f"model.path={untrained}", "learner.backend=scripted", "weights.probe=false"]
    words += ["generator.engine_args.hf_overrides.num_hidden_layers=9"]
    command = [sys.executable, "-m", "r3async", "train", "quickstart", "--runs", str(tmp_path), *words]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=450, env=environment)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("the run failed: "), done.stderr
    assert "Following weights were not initialized" in last
    assert "Traceback" not in done.stderr
