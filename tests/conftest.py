"""Settings and fixtures that the whole suite shares."""

import contextlib
import faulthandler
import functools
import gc
import importlib.metadata
import os
import sys
import threading

import hypothesis
import psutil
import pytest
import pytest_asyncio
import typer.main
import typer.testing

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# No deadline: on a busy machine an example may take long. The suite has the same examples each time; `pytest
# --hypothesis-profile=explore` draws others.
hypothesis.settings.register_profile("r3async", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("r3async")
# A machine may have a GPU that Ray sees, but a CPU build of torch does not.
if os.path.exists("/dev/nvidiactl") and "+cpu" in importlib.metadata.version("torch"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Tests have small matrices and many processes: threads that wait for each other on busy cores would take most of the
# time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A user's process builds the commands once, but one of the tests would a thousand times, a seventh of a second each.
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)
# Container images often set it. Then each of some hundred processes compiles our sources again, and all tests'
# assertions.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Make a directory with a tiny random Qwen3-MoE whose second layer is dense."""
    from tests.helpers.engine import make_model

    return make_model(tmp_path_factory.mktemp("model"), dense_layers=(1,), seed=0)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """Make a random Qwen3-MoE whose vocabulary does not divide by 2, and of which one layer is dense."""
    from tests.helpers.models import make_hf_model

    return make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4, mlp_only_layers=[1], vocab_size=97)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engine(tiny_model):
    """Start the suite's one vLLM engine, for 32 requests at once. Its tests run in the session's event loop."""
    from tests.helpers.engine import OBSERVED, started

    async with started(tiny_model, concurrency=32, gib=0.25, **OBSERVED) as engine:
        yield engine


def _ranks(world, tmp_path_factory):
    from tests.helpers.ranks import Ranks

    ranks = Ranks(world, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture
def ranks_of(request):
    """The shared process group of so many ranks; None for one."""
    return lambda world: None if world == 1 else request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Start two processes in a gloo process group. They end with the module: idle ones, with the groups of all learners
    that they had, wake 100 times a second for each group."""
    yield from _ranks(2, tmp_path_factory)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """Start four processes in a gloo process group."""
    yield from _ranks(4, tmp_path_factory)


@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    """Make a directory with a small model that was hardly warmed up, for runs whose engine is scripted."""
    from r3async.config import load_config
    from r3async.tools.init_model import init_model

    path = tmp_path_factory.mktemp("model") / "init"
    tiny = ["size=tiny", "max_warm_steps=1", "warm_reward=0.01"]
    init_model(path, load_config("quickstart", [f"model.init.{setting}" for setting in tiny]))
    return path


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory):
    """Make a directory with the quickstart's model, warmed up a little, for runs with a real engine."""
    from r3async.config import load_config
    from r3async.tools.init_model import init_model

    path = tmp_path_factory.mktemp("model") / "init"
    init_model(path, load_config("quickstart", ["model.init.warm_reward=0.05"]))
    return path


@pytest.fixture(scope="session")
def ray_head():
    """Yield the address of one Ray on this machine for all tests that need one, since starting and ending one takes ten
    seconds and more."""
    from tests.helpers.cluster import plain_head

    with plain_head() as address:
        yield address


@pytest.fixture(scope="module")
def local_ray(ray_head):
    """Connect a module's runs, including those of child processes, to the suite's Ray."""
    import ray

    ray.init(address=ray_head, logging_level="error")
    os.environ["RAY_ADDRESS"] = ray_head
    yield
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()


@pytest.fixture(scope="session")
def token_cluster():
    """Start a Ray that takes jobs and requires a token, and yield the variables that its clients' environment needs."""
    from tests.helpers.cluster import own_cluster

    with own_cluster() as environment:
        yield environment


STARTED_BY = {
    "ray_head": "ray",
    "token_cluster": "ray",
    "vllm_engine": "engine",
    "two_ranks": "ranks",
    "four_ranks": "ranks",
    "ranks_of": "ranks",
}
"""Markers of tests by the fixture that they use: what the fixture starts."""
LONGEST = (
    "ray/test_pipeline.py",
    "sim/test_simulate.py",
    "sim/test_checkpoints.py",
    "unit/test_resume_learner.py",
    "unit/test_full_disk.py",
    "unit/test_schedule_machine.py",
)
"""Files that `make test` gives to its processes first, so that no process waits for another one's long file at the
end."""
MARKED_FOLDERS = {"engine": "engine", "gpu": "emulated", "ranks": "ranks", "ray": "ray"}
"""Markers of all tests of a folder."""


def pytest_itemcollected(item):
    folder = item.path.parent.name
    if folder in MARKED_FOLDERS:
        item.add_marker(MARKED_FOLDERS[folder])
    given = item.callspec.params if hasattr(item, "callspec") else {}
    taken = [f for f in getattr(item, "fixturenames", ()) if f in STARTED_BY and f not in given]
    for fixture in taken:
        item.add_marker(STARTED_BY[fixture])


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Look for no garbage among what is imported and collected, neither meanwhile nor later: all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        places = {config.rootpath / "tests" / name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.fixture(autouse=True)
def _only_what_its_marker_says(request, monkeypatch):
    """Fail a test that starts Ray or an engine without the marker, since it would make `make test` slow for
    everybody."""
    if request.node.get_closest_marker("ray") is None and "ray" in sys.modules:
        import ray

        monkeypatch.setattr(ray, "init", lambda *args, **kwargs: pytest.fail("it starts Ray: mark it `ray`"))
    if request.node.get_closest_marker("engine") is None and "r3async.rollout.vllm.engine" in sys.modules:
        from r3async.rollout.vllm.engine import VllmEngine

        if request.node.get_closest_marker("ray") is None:
            monkeypatch.setattr(VllmEngine, "start", lambda self: pytest.fail("it starts vLLM: mark it `engine`"))
    if request.node.get_closest_marker("ranks") is None:
        said = "it starts a process group: mark it `ranks`"
        monkeypatch.setattr(sys.modules[__name__], "_ranks", lambda *args: pytest.fail(said))


EXIT_SECONDS = 120.0


def pytest_sessionfinish(session, exitstatus):
    """Report what keeps this process from ending, and end it.

    A thread or a child that a test left behind can do that silently.
    """

    def give_up():
        sys.stderr.write(f"\nthe tests are over, and after {EXIT_SECONDS:.0f} s their process has not ended:\n")
        faulthandler.dump_traceback(all_threads=True)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                sys.stderr.write(f"a child lives: {child.pid} {' '.join(child.cmdline())[:200]}\n")
                child.kill()
        sys.stderr.flush()
        os._exit(int(exitstatus))

    timer = threading.Timer(EXIT_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    # No Python thread runs if the hanging code holds the interpreter.
    faulthandler.dump_traceback_later(2 * EXIT_SECONDS, exit=True)
