"""A model that passed the checks that load torch is not checked again until something changes."""

import os
import sys
from pathlib import Path

import pytest

from r3async.config import ConfigError, load_config
from r3async.tools.init_model import build_byte_tokenizer
from r3async.tools.local_cache import check_once
from tests.helpers import architectures as ha
from tests.helpers.cli import run_program


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def load(model: Path, *words: str):
    return load_config("quickstart", [f"model.path={model}", *words])


class Check:
    __name__ = "check"

    def __init__(self, error: Exception | None = None):
        self.calls = 0
        self.error = error

    def __call__(self, config):
        self.calls += 1
        if self.error is not None:
            raise self.error


def test_a_check_is_made_again_only_for_other_files_settings_or_another_check(model):
    check = Check()
    check_once(check, load(model))
    check_once(check, load(model, "steps=3"))
    assert check.calls == 1
    check_once(check, load(model, "learner.lora.rank=4"))
    assert check.calls == 2
    for change in (lambda path: path.write_text("{} "), lambda path: os.utime(path, ns=(1, 1))):
        before = check.calls
        change(model / "config.json")
        check_once(check, load(model))
        check_once(check, load(model))
        assert check.calls == before + 1
    (model / "tokenizer.json").symlink_to("nowhere")
    check_once(check, load(model))
    other = Check()
    other.__name__ = "other"
    check_once(other, load(model))
    assert (check.calls, other.calls) == (5, 1)


def test_a_check_is_made_again_with_other_packages_and_other_code(model, monkeypatch):
    check = Check()
    check_once(check, load(model))
    monkeypatch.setattr("r3async.tools.local_cache.list_package_versions", lambda: ["torch 3"])
    check_once(check, load(model))
    monkeypatch.setattr("r3async.tools.local_cache._iter_code", lambda: [model / "config.json"])
    check_once(check, load(model))
    check_once(check, load(model))
    assert check.calls == 3


def test_marks_of_passed_checks_are_removed_when_they_are_old(model, tmp_path):
    check = Check()
    check_once(check, load(model))
    (mark,) = (tmp_path / "cache" / "r3async" / "checked").iterdir()
    os.utime(mark, (1, 1))
    check_once(check, load(model, "learner.lora.rank=4"))
    assert not mark.exists()
    check_once(check, load(model))
    assert check.calls == 3


def test_what_does_not_pass_is_checked_every_time(model):
    check = Check(ConfigError("no such model"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="no such model"):
            check_once(check, load(model))
    assert check.calls == 2


def test_without_a_cache_that_can_be_written_all_is_checked(model, tmp_path):
    (tmp_path / "cache").touch()
    check = Check()
    check_once(check, load(model))
    check_once(check, load(model))
    assert check.calls == 2


STARTING = """
import sys
from r3async.config import load_config
from r3async.tools.preflight import check_start

check_start(load_config("quickstart", ["model.path=model"]))
print("torch" in sys.modules)
"""


def test_the_second_start_with_a_model_loads_no_torch(tmp_path):
    sizes = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32, "mlp_only_layers": []}
    ha.make_model(tmp_path / "model", "qwen3_moe", max_position_embeddings=4096, **sizes, eos_token_id=None)
    build_byte_tokenizer().save_pretrained(tmp_path / "model")
    said = [
        run_program([sys.executable, "-c", STARTING], cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
        for _ in range(2)
    ]
    assert [done.stdout for done in said] == ["True\n", "False\n"], said[-1].stderr[-2000:]
