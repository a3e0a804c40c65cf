"""A run whose probe failed is diagnosed when it has ended; what goes wrong with that is said, and raises nothing."""

import subprocess

import pytest

from r3async.tools.diagnose import afterwards
from r3async.tools.diagnose.afterwards import diagnose_failed_run
from r3async.weights.probe import FAILED_MODEL_DIRECTORY


@pytest.fixture
def kept(tmp_path):
    directory = tmp_path / FAILED_MODEL_DIRECTORY
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (tmp_path / "config.toml").write_text("")
    return directory


def said(run) -> list[str]:
    lines: list[str] = []
    diagnose_failed_run(run, lines.append, lambda text: None)
    return lines


def test_a_run_that_failed_for_another_reason_is_not_diagnosed(tmp_path):
    assert said(tmp_path) == []


@pytest.mark.long
def test_what_cannot_be_diagnosed_is_left_to_the_person_with_the_reason(tmp_path, kept):
    (line,) = said(tmp_path)
    assert "was not diagnosed (configuration error: the start model of" in line
    assert f"`r3async diagnose {tmp_path}`" in line


def test_a_diagnosis_that_takes_too_long_is_ended(tmp_path, kept, monkeypatch):
    monkeypatch.setattr(afterwards, "DIAGNOSE_TIMEOUT_SECONDS", 0.01)
    (line,) = said(tmp_path)
    assert "timed out" in line
    assert f"`r3async diagnose {tmp_path}`" in line


def test_a_diagnosis_that_cannot_be_written_is_said_all_the_same(tmp_path, kept, monkeypatch):
    done = subprocess.CompletedProcess([], 1, stdout="PARTED: engine, embedding\n", stderr="")
    monkeypatch.setattr(afterwards.subprocess, "run", lambda *_, **__: done)
    (kept / afterwards.DIAGNOSIS_FILE).mkdir()
    assert said(tmp_path) == [
        "PARTED: engine, embedding",
        f"it was not written to {kept / afterwards.DIAGNOSIS_FILE}: Is a directory",
    ]


def test_a_large_model_is_left_to_the_person(tmp_path, kept, monkeypatch):
    monkeypatch.setattr(afterwards.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    with (kept / "model.safetensors").open("wb") as file:
        file.truncate(afterwards.MAX_WEIGHT_BYTES + 1)
    (line,) = said(tmp_path)
    assert "names the layer that differs first" in line
