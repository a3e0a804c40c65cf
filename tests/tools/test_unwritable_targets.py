"""Whatever cannot be written where the user says is one line that names the place, with exit code 2."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from r3async.tools.__main__ import main as edge_main
from r3async.tools.cli import main
from r3async.tools.targets import find_system_error, name_target
from tests.helpers.cli import typed
from tests.tools.test_damaged_runs import write_whole_run

LONG = "x" * 300
WRITERS = {
    "report": ("report", "demo", "--output", "TARGET"),
    "comparison": ("report", "demo", "demo", "-o", "TARGET"),
    "trajectories": ("inspect", "trajectories", "demo", "--export", "TARGET.jsonl"),
    "table": ("inspect", "trajectories", "demo", "--export", "TARGET.parquet"),
    "keys": ("keys", "TARGET"),
}
PLACES = {
    "below a file": "file/target",
    "too long": LONG,
    "below too long a name": f"{LONG}/target",
    "a link to itself": "loop/target",
    "no such directory": "/proc/nowhere/target",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    write_whole_run(root)
    (root / "file").write_text("")
    (root / "loop").symlink_to("loop")
    for name in ("directory", "directory.jsonl", "directory.parquet"):
        (root / name).mkdir()
    return root


@contextlib.contextmanager
def no_file_may_grow() -> Iterator[None]:
    """Let the system refuse every write to a file of this process, with an error that names no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("words", WRITERS.values(), ids=WRITERS)
def test_a_target_that_cannot_be_written_is_one_line(root: Path, words: tuple[str, ...], place: str) -> None:
    line = [word.replace("TARGET", place) for word in words]
    said = typed(*line, cwd=root, main=edge_main if words[0] == "keys" else main)
    assert said.returncode == 2, said
    assert "Traceback" not in said.stderr
    last = said.stderr.splitlines()[-1]  # after those of progress
    assert place.partition("/")[0] in last or "nowhere" in last
    assert "Errno" not in last


@pytest.mark.parametrize("name", ["report", "comparison", "trajectories", "table"])
def test_a_directory_in_place_of_a_file_is_one_line(root: Path, name: str) -> None:
    said = typed(*(word.replace("TARGET", "directory") for word in WRITERS[name]), cwd=root)
    assert (said.returncode, "directory" in said.stderr, "Traceback" in said.stderr) == (2, True, False), said


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_one_line_that_names_the_target(root: Path, name: str, tmp_path: Path) -> None:
    words = [word.replace("TARGET", f"{tmp_path}/new") for word in WRITERS[name]]
    with no_file_may_grow():
        said = typed(*words, cwd=root, main=edge_main if name == "keys" else main)
    assert (said.returncode, "Traceback" in said.stderr) == (2, False), said
    assert f"{tmp_path}/new" in said.stderr
    assert "File too large" in said.stderr
    assert name == "keys" or not os.listdir(tmp_path), "nothing half-written is left"


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_an_error_without_a_file_gets_the_targets_name(number: int) -> None:
    with pytest.raises(OSError, match="cannot be written") as raised, name_target(Path("mine")):
        raise OSError(number, os.strerror(number))
    assert (raised.value.errno, raised.value.filename) == (number, "mine")


def test_an_error_about_another_file_keeps_its_name() -> None:
    with pytest.raises(FileNotFoundError) as raised, name_target(Path("mine")):
        open("theirs/model.safetensors")  # noqa: SIM115
    assert raised.value.filename == "theirs/model.safetensors"


def test_the_systems_error_is_found_in_the_text_of_a_librarys() -> None:
    safetensors = pytest.importorskip("safetensors")
    numpy = pytest.importorskip("safetensors.numpy")
    import numpy as np

    with pytest.raises(safetensors.SafetensorError) as raised:
        numpy.save_file({"a": np.zeros(3)}, "/proc/nowhere/model.safetensors")
    found = find_system_error(raised.value)
    assert found is not None
    assert found.errno == errno.ENOENT
