"""What a process imports before it has something to compute: to start is then a matter of a second, and of 60 MB."""

import subprocess
import sys

import pytest


@pytest.mark.long
@pytest.mark.parametrize(
    "module",
    [
        "r3async.tools.cli",
        "r3async.tools.training_session",
        "r3async.actors.driver",
        "r3async.actors.conductor",
        "r3async.actors.generator",
    ],
)
def test_who_does_not_compute_does_not_load_torch(module):
    script = (
        f"import sys, {module}; print([m for m in ('torch', 'vllm', 'transformers', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
