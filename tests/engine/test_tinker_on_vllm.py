"""The Tinker API served by a learner and vLLM, spoken to by its SDK."""

import os
import signal

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason='the SDK is not installed: pip install "r3async[tinker]"')
from tinker import types  # noqa: E402

from r3async.config import config_from_dict  # noqa: E402
from r3async.tinker.engine_backend import EngineBackend  # noqa: E402
from tests.helpers.tinker import KEY, serve  # noqa: E402

pytestmark = pytest.mark.engine
SP = types.SamplingParams
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MAX_TOKENS = 256


def settings(rank: int, dtype: str = "float32"):
    lora = {"rank": rank, "deliver": "adapter", "targets": ["self_attn", "layers.1.mlp"]} if rank else {}
    learner = {"backend": "torch", "dtype": dtype, "max_tokens_per_micro_batch": 512, "lora": lora}
    return config_from_dict(
        {
            "learner": learner,
            "generator": {"dtype": dtype, "concurrency": 16, "kv_cache_gib": 0.25},
            "episode": {"max_total_tokens": MAX_TOKENS, "max_prompt_tokens": 128},
        }
    )


def make_backend(model, directory, rank, dtype="float32", **options):
    return EngineBackend(settings(rank, dtype), model, "tiny/moe", (257,), directory, **options)


@pytest.fixture(scope="module")
def backend(tiny_model, tmp_path_factory):
    return make_backend(tiny_model, tmp_path_factory.mktemp("run"), 8)


@pytest.fixture(scope="module")
def served(backend, tmp_path_factory):
    with serve(backend, tmp_path_factory.mktemp("tinker")) as server:
        yield server


@pytest.fixture(scope="module")
def service(served):
    with tinker.ServiceClient(base_url=served.base_url, api_key=KEY) as service:
        yield service


@pytest.fixture
def client(service):
    return service.create_lora_training_client("tiny/moe", rank=4, seed=3).result()


def ask(sampler, count=1, tokens=12, *, prompt=None, **params):
    asked = types.ModelInput.from_ints(PROMPT if prompt is None else prompt)
    return sampler.sample(asked, count, SP(max_tokens=tokens, **params)).result().sequences


def to_datum(sequence, advantage, prompt=PROMPT):
    whole = [*prompt, *sequence.tokens]
    lead = len(prompt) - 1
    inputs = {
        "target_tokens": whole[1:],
        "logprobs": [0.0] * lead + list(sequence.logprobs),
        "advantages": [0.0] * lead + [advantage] * len(sequence.tokens),
    }
    return types.Datum(types.ModelInput.from_ints(whole[:-1]), inputs)


def train(client, data, loss="importance_sampling", rate=3e-2):
    trained = client.forward_backward(data, loss)
    stepped = client.optim_step(types.AdamParams(learning_rate=rate))
    return trained.result(), stepped.result().metrics


def test_a_loop_of_importance_sampling_learns_with_the_routes_of_its_samples(client):
    """A token below 128 is a reward: its share rises from a half."""
    shares = []
    for step in range(10):
        sampler = client.save_weights_and_get_sampling_client().result()
        sequences = ask(sampler, 32, 6, seed=100 * step, stop=[])
        rewards = np.array([np.mean([token < 128 for token in one.tokens]) for one in sequences])
        shares.append(rewards.mean())
        data = [to_datum(one, r) for one, r in zip(sequences, rewards - rewards.mean(), strict=True)]
        result, stepped = train(client, data, rate=0.1)
        metrics = result.metrics
        assert stepped["grad_norm"] > 0
        assert metrics["routes/recorded:mean"] == 1.0
        assert metrics["routes/agreement:mean"] > 0.99
        assert metrics["k3:mean"] < 1e-6
        assert (metrics["staleness:mean"], metrics["staleness:max"]) == (0.0, 0.0)
    assert np.mean(shares[-2:]) > np.mean(shares[:2]) + 0.15


def test_log_probs_of_samples_and_of_forward_and_of_prompts_are_the_same(client):
    train(client, [to_datum(one, 1.0) for one in ask(client.save_weights_and_get_sampling_client().result(), 4)])
    sampler = client.save_weights_and_get_sampling_client().result()
    (sequence,) = ask(sampler, seed=1)
    forward = client.forward([to_datum(sequence, 1.0)], "importance_sampling").result()
    lead = len(PROMPT) - 1
    found = forward.loss_fn_outputs[0]["logprobs"].tolist()[lead:]
    assert np.abs(np.subtract(found, sequence.logprobs)).max() < 1e-4
    whole = types.ModelInput.from_ints([*PROMPT, *sequence.tokens])
    scored = sampler.compute_logprobs(whole).result()
    assert scored[0] is None
    assert np.abs(np.subtract(scored[lead + 1 :], sequence.logprobs)).max() < 1e-4
    answer = sampler.sample(whole, 1, SP(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    assert answer.prompt_logprobs == pytest.approx(scored, abs=1e-5)
    for place, token, logprob in list(zip(answer.topk_prompt_logprobs, whole.to_ints(), scored, strict=True))[1:]:
        assert len(place) == 3
        assert [value for _, value in place] == sorted((value for _, value in place), reverse=True)
        for other, value in place:
            if other == token:
                assert value == pytest.approx(logprob, abs=1e-5)


def test_samples_obey_their_parameters(service):
    sampler = service.create_sampling_client(base_model="tiny/moe").result()
    first, second, third = (ask(sampler, 2, seed=seed) for seed in (7, 7, 8))
    assert [one.tokens for one in first] == [one.tokens for one in second]
    assert first[0].tokens != first[1].tokens
    assert [one.tokens for one in first] != [one.tokens for one in third]
    (greedy,) = ask(sampler, temperature=0.0)
    assert ask(sampler, top_k=1)[0].tokens == greedy.tokens
    assert ask(sampler, top_p=1e-6)[0].tokens == greedy.tokens
    assert greedy.stop_reason == "length"
    stop = greedy.tokens[4]
    (cut,) = ask(sampler, temperature=0.0, stop=[stop])
    assert cut.tokens == greedy.tokens[: greedy.tokens.index(stop) + 1]
    assert cut.stop_reason == "stop"
    with pytest.raises(tinker.RequestFailedError, match="temperature must be at most 2"):
        ask(sampler, temperature=3.0)


def test_clients_have_their_own_weights_beside_each_other(service, backend):
    """In turns or alone: bit by bit the same."""

    def begin(seed):
        return service.create_lora_training_client("tiny/moe", rank=seed, seed=seed).result()

    def step(client, number):
        tokens = [(11 * number + 7 * i) % 256 for i in range(20)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 19}
        datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)
        result, _ = train(client, [datum], "cross_entropy")
        return result.metrics["loss:sum"], result.loss_fn_outputs[0]["logprobs"].tolist()

    beside = [begin(2), begin(5)]
    turns = [[step(client, number) for client in beside] for number in range(4)]
    alone = [[step(client, number) for number in range(4)] for client in (begin(2), begin(5))]
    assert [list(column) for column in zip(*turns, strict=True)] == alone
    assert alone[0][-1] != alone[1][-1]
    samplers = [client.save_weights_and_get_sampling_client().result() for client in beside]
    texts = [ask(sampler, temperature=0.0)[0].tokens for sampler in samplers]
    samplers.append(service.create_sampling_client(base_model="tiny/moe").result())
    base = ask(samplers[-1], temperature=0.0)[0].tokens
    texts.append(base)
    assert len({tuple(tokens) for tokens in texts}) == 3
    asked = types.ModelInput.from_ints(PROMPT)
    together = [sampler.sample(asked, 1, SP(max_tokens=12, temperature=0.0)) for sampler in samplers]
    assert [call.result().sequences[0].tokens for call in together] == texts


def test_saved_weights_come_back(service, client):
    train(client, [to_datum(one, 1.0) for one in ask(client.save_weights_and_get_sampling_client().result(), 4)])
    state = client.save_state("kept").result().path
    path = client.save_weights_for_sampler("kept").result().path
    now = ask(client.save_weights_and_get_sampling_client().result(), temperature=0.0)[0].tokens
    other = service.create_training_client_from_state_with_optimizer(state).result()
    # Sampled once: requests that vLLM batches in another way differ in the last bit of their log-probs.
    samples = ask(service.create_sampling_client(base_model="tiny/moe").result(), 2, seed=5)
    for each in (client, other):
        train(each, [to_datum(one, 1.0) for one in samples])
    after = [ask(each.save_weights_and_get_sampling_client().result(), seed=2)[0] for each in (client, other)]
    assert after[0].tokens == after[1].tokens
    data = [to_datum(after[0], 1.0)]
    outputs = [each.forward(data, "importance_sampling").result().loss_fn_outputs[0] for each in (client, other)]
    assert outputs[0]["logprobs"].tolist() == outputs[1]["logprobs"].tolist()
    assert ask(service.create_sampling_client(model_path=path).result(), temperature=0.0)[0].tokens == now


def test_a_lost_engine_is_replaced_and_samples_are_there(client, backend):
    """Requests that were running are made again, and the snapshot is loaded from its file."""
    train(client, [to_datum(one, 1.0) for one in ask(client.save_weights_and_get_sampling_client().result(), 4)])
    sampler = client.save_weights_and_get_sampling_client().result()
    before = ask(sampler, temperature=0.0, stop=[])[0]
    waiting = sampler.sample(types.ModelInput.from_ints(PROMPT), 4, SP(max_tokens=200, temperature=0.0, stop=[]))
    lost = backend._engine
    os.kill(lost.process_ids[0], signal.SIGKILL)
    assert [one.tokens[:12] for one in waiting.result().sequences] == [before.tokens] * 4
    assert backend._engine is not lost
    metrics = train(client, [to_datum(before, 1.0)])[0].metrics
    assert metrics["routes/recorded:mean"] == 1.0


def test_more_snapshots_than_the_engine_holds_are_loaded_again(client, backend, monkeypatch):
    monkeypatch.setattr("r3async.tinker.engine_backend.LOADED_SNAPSHOTS", 2)
    samplers, texts = [], []
    for _ in range(4):
        samplers.append(client.save_weights_and_get_sampling_client().result())
        texts.append(ask(samplers[-1], temperature=0.0)[0].tokens)
        train(client, [to_datum(one, 1.0) for one in ask(samplers[-1], 4)])
    assert len({tuple(text) for text in texts}) > 1
    assert [ask(sampler, temperature=0.0)[0].tokens for sampler in samplers] == texts
    assert len(backend._engine.installer.kept_versions) == 2


def test_what_the_server_has_no_room_for_is_refused(service):
    with pytest.raises(tinker.RequestFailedError, match=r"learner\.lora\.rank = 8"):
        service.create_lora_training_client("tiny/moe", rank=9).result()
    with pytest.raises(tinker.RequestFailedError, match="no adapter is left to train"):
        service.create_lora_training_client("tiny/moe", rank=2, train_attn=False, train_mlp=False).result()


@pytest.mark.long
def test_all_weights_are_trained_for_one_client(tiny_model, tmp_path):
    """The engine has the newest version alone, and the next client begins with the start model."""
    with (
        serve(make_backend(tiny_model, tmp_path, 0), tmp_path / "served") as server,
        tinker.ServiceClient(base_url=server.base_url, api_key=KEY) as service,
    ):
        base = service.create_sampling_client(base_model="tiny/moe").result()
        start = ask(base, temperature=0.0)[0]
        client = service.create_lora_training_client("tiny/moe").result()
        with pytest.raises(tinker.RequestFailedError, match="for one client at a time"):
            service.create_lora_training_client("tiny/moe").result()
        samplers = [client.save_weights_and_get_sampling_client().result()]
        first = ask(samplers[0], 8, seed=1)
        metrics = train(client, [to_datum(one, 1.0) for one in first], rate=3e-3)[0].metrics
        assert metrics["routes/recorded:mean"] == 1.0
        assert metrics["k3:mean"] < 1e-6
        samplers.append(client.save_weights_and_get_sampling_client().result())
        (sequence,) = ask(samplers[1], seed=2)
        found = client.forward([to_datum(sequence, 1.0)], "importance_sampling").result()
        logprobs = found.loss_fn_outputs[0]["logprobs"].tolist()[len(PROMPT) - 1 :]
        assert np.abs(np.subtract(logprobs, sequence.logprobs)).max() < 1e-4
        with pytest.raises(tinker.RequestFailedError, match="the newest version alone"):
            ask(samplers[0])
        with tinker.ServiceClient(base_url=server.base_url, api_key=KEY) as other:
            service.close("success").result()
            again = other.create_lora_training_client("tiny/moe").result()
            sampler = again.save_weights_and_get_sampling_client().result()
            assert ask(sampler, temperature=0.0)[0].tokens == start.tokens
