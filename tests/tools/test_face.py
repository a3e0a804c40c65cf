"""What a user's code may import: names of `r3async` itself, and a package that is whole where it is installed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import r3async
from r3async import ConfigError, load_config

ROOT = Path(__file__).parents[2]


def run(*words: object, cwd: Path, path: Path, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run(
        [str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    made = run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, ROOT),
        cwd=out,
        path=out,
    )
    assert made.returncode == 0, made.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel's files, where nothing of the checkout is."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_every_name_of_the_face_is_there_and_it_has_few():
    assert 20 <= len(r3async.__all__) <= 30
    for name in r3async.__all__:
        assert getattr(r3async, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        r3async.trian  # noqa: B018


def test_the_face_costs_nothing_before_it_is_used(tmp_path):
    code = "import r3async, sys; assert not {'torch', 'ray', 'numpy', 'msgspec'} & set(sys.modules), sys.modules"
    done = run(sys.executable, "-c", code, cwd=tmp_path, path=ROOT)
    assert done.returncode == 0, done.stderr


def test_train_is_the_function_whatever_was_imported_before(tmp_path):
    code = "import r3async.learner.trainer, r3async.tools.train, r3async; assert callable(r3async.train)"
    assert run(sys.executable, "-c", code, cwd=tmp_path, path=ROOT).returncode == 0


def test_settings_are_given_by_key_by_section_or_as_text():
    wanted = load_config("quickstart", ["learner.lr=0.25", "steps=3"])
    assert load_config("quickstart", {"learner.lr": 0.25, "steps": 3}) == wanted
    assert load_config("quickstart", {"learner": {"lr": 0.25}, "steps": 3}) == wanted
    with pytest.raises(ConfigError, match=r"did you mean `learner\.lr`"):
        load_config("quickstart", {"learner.lrr": 0.25})


def test_a_wrong_setting_of_train_and_evaluate_is_named(tmp_path):
    with pytest.raises(ConfigError, match="did you mean `steps`"):
        r3async.train("quickstart", runs=tmp_path, stepps=3)
    with pytest.raises(ConfigError, match="nothing-of-that-name"):
        r3async.evaluate("nothing-of-that-name", runs=tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_within_a_running_event_loop_both_say_how_to_be_called_and_make_nothing(tmp_path):
    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        r3async.train("quickstart", runs=tmp_path)
    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        r3async.evaluate(env="reverse-text", policy="oracle", runs=tmp_path)
    assert list(tmp_path.iterdir()) == []
    found = await asyncio.to_thread(r3async.evaluate, env="reverse-text", policy="oracle", episodes=2)
    assert found.episodes == 2


def test_evaluate_plays_the_tasks_of_an_environment():
    found = r3async.evaluate(env="reverse-text", policy="oracle", episodes=4)
    assert (found.episodes, found.reward_mean) == (4, 1.0)


def test_the_wheel_has_actors_tools_and_presets_and_not_what_tests_the_project(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"r3async"}
    for needed in ("actors/conductor.py", "tools/cli.py", "tools/simulate/run.py", "views/report.html", "py.typed"):
        assert f"r3async/{needed}" in names
    assert {f"r3async/presets/{p.name}" for p in (ROOT / "configs").glob("*.toml")} <= set(names)
    for left_out in ("bench", "chaos", "fuzz", "lint_seam", "config_reference"):
        assert not [name for name in names if name.startswith(f"r3async/tools/{left_out}")]


def test_the_installed_package_runs_by_itself_beside_a_users_packages_of_our_folders_names(installed, tmp_path):
    for name in ("tools", "actors", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a stranger')\n")
    (tmp_path / "my_envs.py").write_text("from r3async import Action, Message, StepResult\n")
    code = "import r3async, my_envs; print(r3async.__file__, r3async.load_config('quickstart').steps)"
    found = run(sys.executable, "-c", code, cwd=tmp_path, path=installed)
    steps = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text())["steps"]
    assert found.stdout.split() == [str(installed / "r3async" / "__init__.py"), str(steps)], found.stderr
    plan = run(sys.executable, "-m", "r3async", "train", "quickstart", "--dry-run", cwd=tmp_path, path=installed)
    assert plan.returncode == 0, plan.stderr
    for command in ("bench", "chaos"):
        missing = run(sys.executable, "-m", "r3async", command, "x", cwd=tmp_path, path=installed)
        assert (missing.returncode, "part of the repository only" in missing.stderr) == (2, True), missing.stderr


def test_every_module_of_the_installed_package_can_be_imported(installed, tmp_path):
    code = """
import importlib, pkgutil, sys
import r3async
failed = []
for found in pkgutil.walk_packages(r3async.__path__, "r3async."):
    if found.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("r3async"):
            failed.append((found.name, str(error)))
sys.exit(str(failed) if failed else 0)
"""
    done = run(sys.executable, "-c", code, cwd=tmp_path, path=installed)
    assert done.returncode == 0, done.stderr[-2000:]
