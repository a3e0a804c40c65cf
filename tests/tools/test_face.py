"""What a user's code may import: names of `r3async` itself, and a package that is whole where it is installed."""

import asyncio
import concurrent.futures
import sys
import threading
import tomllib
import zipfile
from pathlib import Path

import pytest

import r3async
from r3async import ConfigError, load_config
from r3async.api import _run_blocking
from tests.helpers.cli import Said, run_program

ROOT = Path(__file__).parents[2]


def run(*words: object, cwd: Path, path: Path, timeout: int = 120) -> Said:
    return run_program(words, cwd=cwd, timeout=timeout, PYTHONPATH=str(path))


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
    assert 20 <= len(r3async.__all__) <= 36
    for name in r3async.__all__:
        assert getattr(r3async, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        r3async.trian  # noqa: B018


def test_the_face_costs_nothing_before_it_is_used(tmp_path):
    code = "import r3async, sys; assert not {'torch', 'ray', 'numpy', 'msgspec'} & set(sys.modules), sys.modules"
    done = run(sys.executable, "-c", code, cwd=tmp_path, path=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_train_is_the_function_whatever_was_imported_before(tmp_path):
    code = "import r3async.learner.trainer, r3async.tools.training_session, r3async; assert callable(r3async.train)"
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


async def test_within_a_running_event_loop_as_a_notebooks_both_are_called_alike(tmp_path):
    assert asyncio.get_running_loop().is_running()
    found = r3async.evaluate(environment="reverse-text", policy="oracle", tasks=2, runs=tmp_path)
    assert (found.episodes, found.reward_mean) == (2, 1.0)
    with pytest.raises(ConfigError, match="`callbacks"):
        r3async.train("quickstart", runs=tmp_path, callbacks=[3])
    assert list(tmp_path.iterdir()) == []


async def test_a_first_interrupt_within_a_running_loop_stops_in_order_and_a_second_waits_for_nothing(monkeypatch):
    stopped, waited = [], []

    class Interrupted(concurrent.futures.Future):
        def result(self, timeout=None):
            waited.append(1)
            if len(waited) > len(interrupts):
                return super().result(timeout)
            raise KeyboardInterrupt

    monkeypatch.setattr("r3async.api.Future", Interrupted)
    go = threading.Event()

    def stop():
        stopped.append(1)
        go.set()

    interrupts = [1]
    assert _run_blocking(lambda: go.wait(5) and "in order", stop=stop) == "in order"
    assert stopped == [1]
    go.clear()
    waited.clear()
    interrupts.append(2)
    with pytest.raises(KeyboardInterrupt):
        _run_blocking(lambda: go.wait(5), stop=lambda: None)
    go.set()


def test_a_class_and_a_function_stand_where_names_do():
    class Fixed:
        async def reset(self, task_seed):
            return str(task_seed)

        async def step(self, action):
            return r3async.StepResult(float(action.text), done=True)

        def oracle(self):
            return "0.25"

    assert r3async.evaluate(environment=Fixed, policy="oracle", tasks=3).reward_mean == 0.25
    assert r3async.evaluate(environment=lambda: Fixed(), policy="oracle", tasks=3).reward_mean == 0.25
    with pytest.raises(r3async.ConfigError, match="the argument is called `environment`"):
        r3async.evaluate(env=Fixed, policy="oracle", tasks=3)


def test_a_function_is_a_reward_and_one_that_cannot_be_pickled_is_named(tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("prompt,answer\n" + "".join(f"{n}?,{n}\n" for n in range(6)))
    here = threading.Lock()
    found = r3async.evaluate(
        data={"path": str(rows), "eval": 3}, reward=lambda text, answer: 2.0 * (text == answer), environment="dataset",
        policy="oracle", tasks=3, evaluation={"samples_per_task": 2, "pass_reward": 2},
    )  # fmt: skip
    assert (found.reward_mean, found.episodes, found.passes["2"][0]) == (2.0, 6, 1.0)
    with pytest.raises(
        ConfigError, match=r"`reward` = function cannot be sent to the generators, because of here: TypeError"
    ):
        r3async.train("math", data=str(rows), reward=lambda text: here.locked(), runs=tmp_path)


def test_the_wheel_has_actors_tools_and_presets_and_not_what_tests_the_project(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"r3async"}
    for needed in ("actors/conductor.py", "tools/cli.py", "tools/plan.py", "views/report.html", "py.typed"):
        assert f"r3async/{needed}" in names
    assert {f"r3async/presets/{p.name}" for p in (ROOT / "configs").glob("*.toml")} <= set(names)
    assert not [name for name in names if "dev" in name.split("/")]


@pytest.mark.long
def test_the_installed_package_runs_by_itself_beside_a_users_packages_of_our_folders_names(installed, tmp_path):
    for name in ("tools", "actors", "configs", "dev"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a stranger')\n")
    (tmp_path / "my_envs.py").write_text("from r3async import Action, Message, StepResult\n")
    code = "import r3async, my_envs; print(r3async.__file__, r3async.load_config('quickstart').steps)"
    found = run(sys.executable, "-c", code, cwd=tmp_path, path=installed)
    steps = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text())["steps"]
    assert found.stdout.split() == [str(installed / "r3async" / "__init__.py"), str(steps)], found.stderr
    plan = run(sys.executable, "-m", "r3async", "train", "quickstart", "--dry-run", cwd=tmp_path, path=installed)
    assert plan.returncode == 0, plan.stderr


@pytest.mark.long
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
    done = run(sys.executable, "-c", code, cwd=tmp_path, path=installed, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
