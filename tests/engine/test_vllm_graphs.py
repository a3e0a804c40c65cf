"""Routes of an engine that may decode in graphs are checked before the first of them is trained on."""

import numpy as np
import pytest

from r3async.rollout.engine import EngineError
from r3async.rollout.vllm.worker import WorkerExtension
from r3async.weights.version_store import VersionStore
from tests.helpers.engine import Weights, prompt, request, revive, same_sets, started

pytestmark = pytest.mark.asyncio(loop_scope="module")

DECODED = 4
"""Requests of a step that is taken for one of a graph: a prompt has more tokens."""


class LosingExtension(WorkerExtension):
    """A worker whose steps with few tokens lose their routes, as a graph would that was captured without them."""

    def r3_lose(self, how: str) -> None:
        capturer = self.model_runner.routed_experts_capturer
        capture = type(capturer).capture

        def lose(layer_id, topk_ids):
            if len(topk_ids) > DECODED or not how:
                capture(capturer, layer_id, topk_ids)
            elif how == "zeros":
                capturer.device_buffer[: len(topk_ids), layer_id] = 0

        capturer.capture = lose


async def test_an_engine_that_loses_the_routes_of_decoded_tokens_takes_no_weights(tiny_model, other_model, tmp_path):
    args = {"enforce_eager": False, "worker_extension_cls": f"{__name__}.{LosingExtension.__name__}"}
    with VersionStore(tmp_path) as publisher:
        weights = Weights(tiny_model, other_model, publisher)
        async with started(tiny_model, **args) as engine:
            for how in ("stale", "zeros"):
                await engine.core.collective_rpc("r3_lose", args=(how,))
                lost = r"recorded while decoding are not those of a second pass.*generator\.engine_args\.enforce_eager=true"
                with pytest.raises(EngineError, match=lost):
                    await engine.install_version(weights.publish(), 30)
                with pytest.raises(EngineError, match="while decoding"):
                    await engine.generate(request(prompt(8), 4))
                await revive(engine)
            await engine.core.collective_rpc("r3_lose", args=("",))
            await engine.install_version(weights.publish(), 30)
            answer = await engine.generate(request(prompt(8), 4))
    whole = np.concatenate([prompt(8), answer.token_ids])
    assert same_sets(answer.routed_experts, weights.reference(weights.version).routes(whole)[:-1])
