"""What several modules of this folder begin with."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from r3async.tools.cli import app
from tests.helpers.bad_inputs import make_folder


@pytest.fixture
def inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs `r3async inspect` in `tmp_path`, expects an exit code, and returns the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["inspect", *words])
        assert result.exit_code == code, result.output
        return result.output

    return run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of wrong inputs, which no command may change."""
    folder = tmp_path_factory.mktemp("bad")
    make_folder(folder)
    return folder
