"""The Megatron backend with the newest megatron-core, which pip does not choose for Python 3.11."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEWEST = "3.12"
"""A Python for which the newest release has wheels. What we use of it is plain Python, of any version."""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_newest_release_trains_the_same(tmp_path: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*download, f"--python-version={NEWEST}", f"--dest={tmp_path}", "megatron-core<0.20"], check=True)
    (wheel,) = tmp_path.glob("megatron_core-*.whl")
    newest = tmp_path / "newest"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(newest)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(newest), str(ROOT)))}
    where = "import megatron.core as m; print(m.__file__, m.__version__)"
    found = subprocess.run([sys.executable, "-c", where], env=environment, capture_output=True, text=True, check=True)
    path, version = found.stdout.split()[-2:]
    assert Path(path).is_relative_to(newest)
    assert tuple(map(int, version.split(".")[:2])) >= (0, 19)
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_megatron.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert tests.returncode == 0, tests.stdout[-4000:]
