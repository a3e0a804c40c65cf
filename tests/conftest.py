"""Settings and fixtures that the whole suite shares."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading

import psutil
import pytest
import pytest_asyncio

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Directory of a tiny random Qwen3-MoE whose second layer is dense."""
    from tests.helpers_engine import make_model

    return make_model(tmp_path_factory.mktemp("model"), dense_layers=(1,), seed=0)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engine(tiny_model):
    """The suite's one vLLM engine, 32 requests at once. Its tests run in the session's event loop."""
    from r3async.engines.vllm import VllmEngine

    engine = VllmEngine(str(tiny_model), dtype="float32", concurrency=32, max_model_len=512, kv_cache_gib=0.25)
    await engine.start()
    yield engine
    await engine.stop()


def _ranks(world, tmp_path_factory):
    from tests.helpers_ranks import Ranks

    ranks = Ranks(world, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Two processes in a gloo process group."""
    yield from _ranks(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory):
    """Four processes in a gloo process group."""
    yield from _ranks(4, tmp_path_factory)


@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    """Directory of a small model that was hardly warmed up, for runs whose engine is scripted."""
    from r3async.config import load_config
    from tools.init_model import init_model

    path = tmp_path_factory.mktemp("model") / "init"
    tiny = ["hidden_size=32", "expert_hidden_size=16", "layers=2", "max_warm_steps=1", "warm_reward=0.01"]
    init_model(path, load_config("quickstart", [f"model.init.{setting}" for setting in tiny]))
    return path


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory):
    """Directory of the quickstart's model, warmed up a little: what runs with a real engine begin with."""
    from r3async.config import load_config
    from tools.init_model import init_model

    path = tmp_path_factory.mktemp("model") / "init"
    init_model(path, load_config("quickstart", ["model.init.warm_reward=0.2"]))
    return path


@pytest.fixture(scope="module")
def local_ray():
    """One local Ray for all runs of a module, also those of child processes: to start one takes ten seconds and more."""
    import ray

    ray.init(num_cpus=32, include_dashboard=False, logging_level="error")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    yield
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()


STARTED_BY = {
    "local_ray": "ray",
    "ray": "ray",
    "vllm_engine": "engine",
    "two_ranks": "ranks",
    "four_ranks": "ranks",
    "ranks": "ranks",
}
"""What a test with this fixture starts: its marker follows from it."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        # The longest file first, or one process waits for the other at the end.
        long = {item.path for item in items if item.get_closest_marker("short_run")}
        items.sort(key=lambda item: item.path not in long)
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in STARTED_BY and fixture not in given:
                item.add_marker(STARTED_BY[fixture])


@pytest.fixture(autouse=True)
def _only_what_its_marker_says(request, monkeypatch):
    """A test that starts Ray or an engine without saying so would make `make test` slow for everybody."""
    if request.node.get_closest_marker("ray") is None and "ray" in sys.modules:
        import ray

        monkeypatch.setattr(ray, "init", lambda *args, **kwargs: pytest.fail("it starts Ray: mark it `ray`"))
    if request.node.get_closest_marker("engine") is None and "r3async.engines.vllm" in sys.modules:
        from r3async.engines.vllm import VllmEngine

        if request.node.get_closest_marker("ray") is None:
            monkeypatch.setattr(VllmEngine, "start", lambda self: pytest.fail("it starts vLLM: mark it `engine`"))


EXIT_SECONDS = 120.0


def pytest_sessionfinish(session, exitstatus):
    """A thread or a child that a test left behind can keep this process from ending, without a word. Say what it is, and end."""

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
    # No Python thread runs if what hangs holds the interpreter.
    faulthandler.dump_traceback_later(2 * EXIT_SECONDS, exit=True)
