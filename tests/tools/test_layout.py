"""No module is longer than 400 lines, and each test is in the folder of what it starts."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 400
FOLDERS = {"unit", "sim", "ranks", "engine", "ray", "tools"}


def tracked() -> list[Path]:
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def too_long(paths: list[Path]) -> list[str]:
    lengths = [(path, path.read_text().count("\n")) for path in paths]
    return [f"{path.name}: {length} lines" for path, length in lengths if length > LIMIT]


def test_no_module_is_too_long():
    assert len(tracked()) > 300
    assert too_long(tracked()) == []


def test_a_module_of_one_line_too_many_is_named(tmp_path):
    for name, lines in (("short.py", LIMIT), ("long.py", LIMIT + 1)):
        (tmp_path / name).write_text("x\n" * lines)
    assert too_long(sorted(tmp_path.iterdir())) == ["long.py: 401 lines"]


def test_every_test_is_in_a_folder():
    tests = [path.relative_to(ROOT / "tests") for path in tracked() if path.is_relative_to(ROOT / "tests")]
    lost = [
        str(path) for path in tests if path.name.startswith("test_") and path.parts[:-1] not in {(f,) for f in FOLDERS}
    ]
    assert not lost
