"""What an engine's child process failed with is part of the error that a person sees."""

import sys

import pytest

from tests.helpers.cli import run_program


@pytest.mark.timeout(500)
def test_the_driver_prints_why_vllm_cannot_load_a_model(warm_model, tmp_path, ray_head):
    """The engine is told of more layers than the model's files hold; its child process alone knows."""
    words = ["name=broken", f"model.path={warm_model}", "learner.backend=scripted"]
    words += ["generator.engine_args.hf_overrides.num_hidden_layers=9"]
    command = [sys.executable, "-m", "r3async", "train", "quickstart", "--runs", str(tmp_path), *words]
    done = run_program(command, cwd=tmp_path, timeout=450, RAY_ADDRESS=ray_head)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("the run failed: "), done.stderr
    assert "Following weights were not initialized" in last
    assert "Traceback" not in done.stderr
