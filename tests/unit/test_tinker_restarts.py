"""The server, the learner or the engine is lost in the middle of a loop of the SDK, which goes on as before."""

from urllib.parse import urlsplit

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason='the SDK is not installed: pip install "r3async[tinker]"')
from tinker import types  # noqa: E402

from tests.helpers.models import VOCAB, make_hf_model  # noqa: E402
from tests.helpers.tinker import KEY, ServerProcess, SingleProcessBackend, serve  # noqa: E402

PROMPT = [3, 1, 4, 1, 5]
TIMEOUT = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model"), std=0.3)


@pytest.fixture(scope="module")
def backend(model):
    return SingleProcessBackend(model)


@pytest.fixture(scope="module")
def alone(backend, tmp_path_factory):
    """What an undisturbed loop shows."""
    with serve(backend, tmp_path_factory.mktemp("alone")) as server:
        return run_loop(server.base_url, lambda: None)


def rl_datum(sequence, advantage):
    whole = [*PROMPT, *sequence.tokens]
    lead = len(PROMPT) - 1
    inputs = {
        "target_tokens": whole[1:],
        "logprobs": [0.0] * lead + list(sequence.logprobs),
        "advantages": [0.0] * lead + [advantage] * len(sequence.tokens),
    }
    return types.Datum(types.ModelInput.from_ints(whole[:-1]), inputs)


def supervised(start):
    tokens = [(start + 7 * i) % VOCAB for i in range(7)]
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * 6})


def run_loop(base_url, disturb):
    """Return the log-probs and metrics of a loop that calls `disturb` wherever something may be under way."""
    with tinker.ServiceClient(base_url=base_url, api_key=KEY) as service:
        client = service.create_lora_training_client("tiny/moe", rank=4, seed=3).result(TIMEOUT)
        shown = []
        disturb()
        for step in range(2):
            sampler = client.save_weights_and_get_sampling_client().result(TIMEOUT)
            disturb()
            prompt = types.ModelInput.from_ints(PROMPT)
            sampled = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4, seed=step))
            disturb()
            sequences = sampled.result(TIMEOUT).sequences
            data = [rl_datum(one, advantage) for one, advantage in zip(sequences, (1.0, -1.0), strict=True)]
            waiting = [client.forward_backward(data, "importance_sampling")]
            waiting.append(client.forward_backward([supervised(step)], "cross_entropy"))
            disturb()
            waiting.append(client.optim_step(types.AdamParams(learning_rate=0.02)))
            disturb()
            first, second, _ = (one.result(TIMEOUT) for one in waiting)
            assert first.metrics["routes/recorded:mean"] == 1.0
            assert first.metrics["staleness:max"] == 0.0
            shown += [output["logprobs"].to_numpy() for output in (*first.loss_fn_outputs, *second.loss_fn_outputs)]
        path = client.save_state("end").result(TIMEOUT).path
        disturb()
        client.load_state_with_optimizer(path).result(TIMEOUT)
        last = client.forward([supervised(5)], "cross_entropy").result(TIMEOUT)
        return [*shown, last.loss_fn_outputs[0]["logprobs"].to_numpy()]


def assert_equal(one, other):
    assert len(one) == len(other)
    for values, expected in zip(one, other, strict=True):
        assert np.array_equal(values, expected)


def test_a_learner_and_an_engine_that_end_are_given_what_they_had(backend, alone, tmp_path):
    with serve(backend, tmp_path) as server:
        assert_equal(run_loop(server.base_url, backend.lose), alone)


def test_a_call_that_fails_leaves_nothing_of_itself(backend, alone, tmp_path, monkeypatch):
    train = backend.train
    fails = iter([False, True, False, True])

    def fail_after_half(*args, **kwargs):
        result = train(*args, **kwargs)
        if next(fails, False):
            raise RuntimeError("out of memory")
        return result

    with (
        serve(backend, tmp_path) as server,
        tinker.ServiceClient(base_url=server.base_url, api_key=KEY) as service,
    ):
        clients = [service.create_lora_training_client("tiny/moe", rank=4, seed=3).result() for _ in range(2)]
        norms = []
        for client, function in zip(clients, (train, fail_after_half), strict=True):
            monkeypatch.setattr(backend, "train", function)
            client.forward_backward([supervised(0)], "cross_entropy").result()
            if function is not train:
                for _ in range(2):
                    with pytest.raises(tinker.RequestFailedError, match="out of memory"):
                        client.forward_backward([supervised(1)], "cross_entropy").result()
            client.forward_backward([supervised(2)], "cross_entropy").result()
            norms.append(client.optim_step(types.AdamParams()).result().metrics["grad_norm"])
        assert norms[0] == norms[1]


def test_a_server_that_stops_is_continued_by_the_next(backend, tmp_path):
    with serve(backend, tmp_path) as server:
        service = tinker.ServiceClient(base_url=server.base_url, api_key=KEY)
        client = service.create_lora_training_client("tiny/moe", rank=4, seed=3).result()
        client.forward_backward([supervised(0)], "cross_entropy").result()
        model_id = client.model_id
    backend.lose()
    with serve(backend, tmp_path, port=urlsplit(server.base_url).port) as server, service:
        (model,) = server.service.training.models.values()
        assert model.model_id == model_id
        assert model.lora.rank == 4
        assert model.sequence.next_number == 2


@pytest.mark.long
def test_a_server_that_is_killed_is_continued_by_the_next(model, alone, tmp_path):
    server = ServerProcess(model, tmp_path)
    server.start()
    kills = iter([False, False, True, False, True, False, True, False, True])

    def kill_and_start() -> None:
        if next(kills, False):
            server.kill()
            server.start()

    try:
        assert_equal(run_loop(server.base_url, kill_and_start), alone)
    finally:
        server.kill()
