"""Writers that are killed: never a half checkpoint. Files that are changed: `test_fuzz`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def driver() -> dict[str, float]:
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as directory:
        command = [sys.executable, "-m", "tests.helpers.checkpoint_driver", f"{directory}/c"]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        where = Path(__file__).parents[2]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env, cwd=where, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_writer_that_is_killed_leaves_the_newest_checkpoint_intact():
    figures = driver()
    assert figures["at a point"] > 50
    assert figures["by chance"] == 25
    assert figures["left .partial"] > 10
    assert figures["left .removing"] > 2
