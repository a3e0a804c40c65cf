"""The probe against real vLLM and a real learner: reported log-probs that are not those of sampling are found, and two experts
whose scores are equal up to rounding are no fault."""

import numpy as np
import pytest
import torch

from r3async.actors.generator_probe import probe_generator
from r3async.actors.process import RunFailed
from r3async.config import load_config
from r3async.learner.torch.backend import TorchLearner
from r3async.rollout.engine import sample_probe
from r3async.weights.probe import compare_probe, compare_sampled_probe, make_probe_pair, make_probe_text
from r3async.weights.version_store import VersionStore
from tests.helpers import torch as ht
from tests.helpers.engine import Reference
from tests.helpers.fleet import Events
from tests.helpers.models import gates_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = np.frombuffer(make_probe_text(200).encode(), np.uint8).astype(np.int32)
ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture(scope="module")
def learner(tiny_model):
    learner = TorchLearner.from_pretrained(ht.settings(), tiny_model)
    yield learner
    learner.close()


def scores(learner, temperature: float, text: np.ndarray = TEXT) -> np.ndarray:
    return np.stack([learner.score_sequence(text), learner.score_sequence(text, temperature)])


def ties(reference: Reference):
    """The router's weights, again and again, such that at one token of the text the last expert that is chosen and the next one
    score the same, up to what float32 rounds."""
    gate = next(gates_of(reference.model))
    seen: list[torch.Tensor] = []
    hook = gate.register_forward_hook(lambda module, args, output: seen.append(args[0].reshape(len(TEXT), -1)))
    reference.score(TEXT)
    hook.remove()
    weight = gate.weight.detach().double()
    for x in seen[0][40:180:20].double():
        scores = weight @ x
        last, following = scores.argsort(descending=True)[reference.model.config.num_experts_per_tok - 1 :][:2]
        for shift in np.arange(-2e-6, 2e-6, 1e-7):
            changed = weight.clone()
            changed[following] += (scores[last] - scores[following] + shift) * x / (x @ x)
            yield changed.float()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
async def test_what_is_sampled_is_what_the_learner_thinks_at_the_runs_temperature(
    vllm_engine, learner, tiny_model, tmp_path, temperature
):
    reference = Reference(tiny_model)
    with VersionStore(tmp_path) as publisher:  # other tests may have left other weights
        version = vllm_engine.version + 1
        await vllm_engine.install_version(publisher.write_tensors(version, reference.tensors(), torch.float32), 30)
    ours = scores(learner, temperature)
    assert np.abs(ours[1] - reference.score(TEXT, temperature)).max() < 1e-4
    result = compare_sampled_probe(await sample_probe(vllm_engine, TEXT, temperature), ours, temperature, 1e-3)
    assert result.passed, result.describe_sampled(temperature)
    assert result.max_difference < 1e-3


async def test_a_tie_of_two_experts_ends_no_run_and_weights_that_differ_do(vllm_engine, tiny_model, tmp_path):
    """Where engine and learner round to different sides, one text differs, and the same tokens in another order do not."""
    reference, config, events = Reference(tiny_model), load_config("quickstart", ["episode.temperature=0.7"]), Events()
    learner = TorchLearner.from_pretrained(ht.settings(), tiny_model)
    published = []

    async def ask(method, text=None):
        if method == "find_weight_differences":
            return await vllm_engine.find_weight_differences(published[-1], 30)
        if method == "sample_probe":
            return await sample_probe(vllm_engine, np.asarray(text, np.int32), config.episode.temperature)
        return await getattr(vllm_engine, method)(np.asarray(text, np.int32))

    async def probed():
        both = np.stack([scores(learner, config.episode.temperature, text) for text in make_probe_pair(TEXT)])
        await probe_generator(ask, "generator-0", vllm_engine.version, TEXT.tolist(), both, 1e-3, config, events)

    try:
        router = learner.export_weights(copy=False)[ROUTER]
        with VersionStore(tmp_path) as publisher:
            for tied in ties(reference):
                tensors = reference.tensors() | {ROUTER: tied}
                published.append(publisher.write_tensors(vllm_engine.version + 1, tensors, torch.float32))
                await vllm_engine.install_version(published[-1], 30)
                router.copy_(tied)
                result = compare_probe(
                    TEXT.tolist(), learner.score_sequence(TEXT), await vllm_engine.score_tokens(TEXT), 1e-3
                )
                if not result.passed:
                    break
            else:
                pytest.fail("engine and learner chose the same experts at every tie")
            await probed()
            assert "probe_tie" in events.names()

            router[0] += 0.3  # what the learner has is not what it published
            with pytest.raises(RunFailed, match="holds what loading the published tensors again gives"):
                await probed()
            await vllm_engine.install_version(
                publisher.write_tensors(vllm_engine.version + 1, reference.tensors(), torch.float32), 30
            )  # other tests take it as they find it
    finally:
        learner.close()
