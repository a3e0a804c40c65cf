"""vLLM's second model runner, which CUDA uses by default, on CPU: tests of the first one, and the project's own checks of
a GPU's engine."""

import asyncio
import json
import subprocess

import pytest
import pytest_asyncio

from dev.gpu.second_runner import environment
from r3async.tools.gpu_check.part import RESULT, command
from tests.engine.test_vllm_engine import (
    current,
    test_a_new_request_never_sees_an_older_versions_cache,
    test_logprobs_are_those_of_the_distribution_that_was_sampled_from,
    test_routes_are_those_of_the_router_for_moe_layers_only,
    test_routes_begin_where_they_are_asked_for,
    test_the_second_turn_gives_the_rows_that_the_first_did_not,
)
from tests.engine.test_vllm_sampling import (
    engine,
    path,
    test_supports_are_those_of_the_model_and_log_probs_are_renormalised,
)
from tests.engine.test_vllm_update import (
    MODES,
    test_both_sides_of_the_switch_are_those_of_their_version_and_new_requests_are_of_the_new_one_alone,
)
from tests.helpers.engine import OBSERVED, started
from tests.helpers.scheduler import ObservingExtension

__all__ = [
    "current",
    "engine",
    "path",
    "test_a_new_request_never_sees_an_older_versions_cache",
    "test_both_sides_of_the_switch_are_those_of_their_version_and_new_requests_are_of_the_new_one_alone",
    "test_logprobs_are_those_of_the_distribution_that_was_sampled_from",
    "test_routes_are_those_of_the_router_for_moe_layers_only",
    "test_routes_begin_where_they_are_asked_for",
    "test_supports_are_those_of_the_model_and_log_probs_are_renormalised",
    "test_the_second_turn_gives_the_rows_that_the_first_did_not",
]
pytestmark = [pytest.mark.v2, pytest.mark.asyncio(loop_scope="session")]


class NamingExtension(ObservingExtension):
    """A worker that names the modules of its model runner's classes."""

    def r3_runner(self) -> list[str]:
        return [kind.__module__ for kind in type(self.model_runner).__mro__]


@pytest.fixture(scope="module", autouse=True)
def _second_runner():
    """Let the engines of this module begin with the second runner."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vllm_engine(_second_runner, tiny_model):
    args = OBSERVED | {"worker_extension_cls": f"{__name__}.{NamingExtension.__name__}"}
    async with started(tiny_model, concurrency=8, **args) as engine:
        yield engine


@pytest.fixture(params=[MODES[0], *(pytest.param(each, marks=pytest.mark.nightly) for each in MODES[1:])])
def mode(request, vllm_engine, monkeypatch):
    """Every mode was tested with the first runner; each takes half a minute with this one."""
    monkeypatch.setattr(vllm_engine.installer, "on_update", request.param)
    return request.param


async def test_the_engine_has_the_second_runner(vllm_engine):
    (modules,) = await vllm_engine.core.collective_rpc("r3_runner")
    assert "vllm.v1.worker.gpu.model_runner" in modules
    assert "vllm.v1.worker.gpu_model_runner" not in modules


@pytest.mark.nightly
@pytest.mark.parametrize(
    "parts",
    [[("generations", {}), ("learner_agrees", {"backend": "torch"})], [("updates", {"on_update": "keep"})]],
    ids=["generations-learner_agrees", "updates"],
)
async def test_checks_of_a_gpus_engine_pass(tmp_path, parts):
    """Answers with routes for every row and the learner's log-probs of them; six versions under running requests."""
    for name, arguments in parts:
        line = command(tmp_path, True, f"engine:{name}", {"mode": "eager", **arguments})
        output = await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, timeout=280)
        figures = json.loads(output.stdout.rpartition(RESULT)[2] or "{}")
        assert figures.get("ok"), f"{name}: {figures} {output.stderr[-2000:]}"
