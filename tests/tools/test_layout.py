"""Each test is in the folder of what it starts."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"unit", "sim", "ranks", "engine", "gpu", "ray", "tools", "dev"}


def tracked() -> list[Path]:
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def test_every_test_is_in_a_folder():
    tests = [path.relative_to(ROOT / "tests") for path in tracked() if path.is_relative_to(ROOT / "tests")]
    lost = [
        str(path) for path in tests if path.name.startswith("test_") and path.parts[:-1] not in {(f,) for f in FOLDERS}
    ]
    assert len(tests) > 200
    assert not lost
