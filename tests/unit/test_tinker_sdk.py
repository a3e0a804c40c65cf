"""The SDK of the Tinker API against a server of a tiny mixture: loops, retries, chunks, provenance, saved weights."""

import time

import numpy as np
import pytest
import torch

tinker = pytest.importorskip("tinker", reason='the SDK is not installed: pip install "r3async[tinker]"')
from tinker import types  # noqa: E402

from r3async.tinker import server as server_module  # noqa: E402
from r3async.tinker.protocol import ApiError, ProvenanceSpan, load_protobuf, parse_proto_training  # noqa: E402
from tests.helpers.models import VOCAB, make_hf_model  # noqa: E402
from tests.helpers.tinker import KEY, FaultyServer, SingleProcessBackend, serve  # noqa: E402

SP = types.SamplingParams
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    return SingleProcessBackend(make_hf_model(tmp_path_factory.mktemp("model"), std=0.3))


@pytest.fixture(scope="module")
def served(backend, tmp_path_factory):
    with serve(backend, tmp_path_factory.mktemp("tinker"), kind=FaultyServer) as server:
        yield server


@pytest.fixture(scope="module")
def service(served):
    return tinker.ServiceClient(base_url=served.base_url, api_key=KEY)


@pytest.fixture
def client(service, backend, served):
    made = service.create_lora_training_client("tiny/moe", rank=4, seed=3).result()
    backend.calls.clear()
    served.seen.clear()
    return made


def supervised(length=6, start=0):
    tokens = [(start + 7 * i) % VOCAB for i in range(length + 1)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)


def rl_datum(prompt, sequence, advantage, *, spans=True):
    whole = [*prompt, *sequence.tokens]
    lead = len(prompt) - 1
    inputs = {
        "target_tokens": whole[1:],
        "logprobs": [0.0] * lead + list(sequence.logprobs),
        "advantages": [0.0] * lead + [advantage] * len(sequence.tokens),
    }
    datum = types.Datum(types.ModelInput.from_ints(whole[:-1]), inputs)
    if not spans:
        return datum
    name, count = sequence.sequence_id, len(sequence.tokens)
    return datum.with_provenance(
        [
            types.PromptProvenanceSpan(sequence_id=name, length=len(prompt)),
            types.SampledProvenanceSpan(sequence_id=name, length=count - 1),
        ],
        [
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=lead),
            types.SampledProvenanceSpan(sequence_id=name, length=count),
        ],
    )


def sample(sampler, *, count=1, tokens=5, seed=1):
    prompt = types.ModelInput.from_ints(PROMPT)
    return sampler.sample(prompt, count, SP(max_tokens=tokens, seed=seed)).result().sequences


# -- loops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spans", [True, pytest.param(False, marks=pytest.mark.long)], ids=["spans", "content"])
def test_a_loop_of_importance_sampling_learns_with_the_routes_of_its_samples(client, spans):
    """A token below 48 is a reward: its share rises from a half."""
    shares = []
    for step in range(6):
        sampler = client.save_weights_and_get_sampling_client().result()
        sequences = sample(sampler, count=8, tokens=4, seed=step)
        rewards = np.array([np.mean([token < 48 for token in one.tokens]) for one in sequences])
        shares.append(rewards.mean())
        data = [
            rl_datum(PROMPT, one, r, spans=spans) for one, r in zip(sequences, rewards - rewards.mean(), strict=True)
        ]
        trained = client.forward_backward(data, "importance_sampling")
        stepped = client.optim_step(types.AdamParams(learning_rate=0.005))
        metrics = trained.result().metrics
        assert (stepped.result().metrics["grad_norm"] > 0) == (rewards.std() > 0)
        assert metrics["routes/recorded:mean"] == 1.0
        assert metrics["routes/agreement:mean"] == 1.0
        assert metrics["k3:mean"] < 1e-9
        assert (metrics["staleness:mean"], metrics["staleness:max"]) == (0.0, 0.0)
    assert np.mean(shares[-2:]) > np.mean(shares[:2]) + 0.2


def test_samples_of_older_weights_show_their_age_and_keep_their_routes(client):
    sampler = client.save_weights_and_get_sampling_client().result()
    (sequence,) = sample(sampler)
    for _ in range(3):
        client.forward_backward([supervised()], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.05)).result()
    metrics = client.forward_backward([rl_datum(PROMPT, sequence, 1.0)], "ppo").result().metrics
    assert metrics["staleness:mean"] == 3.0
    assert metrics["routes/recorded:mean"] == 1.0
    assert metrics["routes/agreement:mean"] < 1.0
    assert metrics["k3:mean"] > 1e-4
    loose = types.Datum(types.ModelInput.from_ints([9] * 4), {"target_tokens": [8] * 4, "weights": [1.0] * 4})
    unknown = client.forward_backward([loose], "cross_entropy").result().metrics
    assert unknown["routes/recorded:mean"] == 0.0
    assert "staleness:mean" not in unknown


def test_a_false_claim_is_refused_and_the_client_goes_on(client):
    sampler = client.save_weights_and_get_sampling_client().result()
    one, other = sample(sampler, count=2)
    assert one.tokens != other.tokens
    datum = rl_datum(PROMPT, one, 1.0)
    claimed = rl_datum(PROMPT, other, 1.0)
    datum = datum.with_provenance(claimed.model_input_spans, claimed.loss_fn_input_spans)
    with pytest.raises(tinker.RequestFailedError, match="which are other tokens"):
        client.forward_backward([datum], "importance_sampling").result()
    assert client.forward_backward([rl_datum(PROMPT, one, 1.0)], "importance_sampling").result()
    assert client.optim_step(types.AdamParams()).result().metrics["grad_norm"] > 0


def test_clients_at_once_are_each_as_alone_and_the_nan_of_one_is_its_own(service):
    def make():
        return service.create_lora_training_client("tiny/moe", rank=4, seed=3).result()

    def step(one, start, rate=0.02):
        trained = one.forward_backward([supervised(start=start)], "cross_entropy")
        return trained, one.optim_step(types.AdamParams(learning_rate=rate))

    def train(clients):
        waiting = [step(one, start) for start in range(3) for one in clients]
        return [trained.result().metrics["loss:sum"] for trained, _ in waiting]

    alone = train([make()])
    first, second, broken = make(), make(), make()
    for future in step(broken, 0, rate=1e30):
        future.result()
    together = [step(broken, 0), train([first, second])]
    assert together[1][::2] == alone
    assert together[1][1::2] == alone
    trained, stepped = (future.result() for future in together[0])
    assert not np.isfinite(trained.metrics["loss:sum"])
    assert stepped.metrics["optimizer/skipped"] == 1.0


# -- order -----------------------------------------------------------------------------------------------


def test_chunks_that_come_later_first_are_applied_in_order(backend, monkeypatch, tmp_path):
    monkeypatch.setitem(server_module.CLIENT_CONFIG, "fwdbwd_max_chunk_len", 2)
    with serve(backend, tmp_path) as other:
        owner = tinker.ServiceClient(base_url=other.base_url, api_key=KEY)
        client = owner.create_lora_training_client("tiny/moe", rank=4, seed=3).result()
        backend.calls.clear()
        data = [supervised(3 + i, start=i) for i in range(5)]
        results = [
            client.forward_backward(data, "cross_entropy"),
            client.optim_step(types.AdamParams(learning_rate=0.1)),
        ]
        results.append(client.forward(data[:1], "cross_entropy"))
        chunked, _, after = [result.result() for result in results]
        assert backend.changes == ["forward_backward"] * 3 + ["optim_step", "forward"]
        lengths = [len(output["logprobs"].data) for output in chunked.loss_fn_outputs]
        assert lengths == [3, 4, 5, 6, 7]
        before = chunked.loss_fn_outputs[0]["logprobs"].to_numpy()
        assert not np.allclose(after.loss_fn_outputs[0]["logprobs"].to_numpy(), before, atol=1e-4)


def test_a_request_that_this_server_refuses_has_used_up_its_number(client, backend):
    for loss, message in (("no_such_loss", "is not supported"), ("ppo", "takes target_tokens, logprobs, advantages")):
        with pytest.raises(tinker.RequestFailedError, match=message):
            client.forward_backward([supervised()], loss).result()
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    datum = types.Datum(image, {"target_tokens": [1], "weights": [1.0]})
    with pytest.raises(tinker.RequestFailedError, match="not supported"):
        client.forward_backward([datum], "cross_entropy").result()
    assert client.forward_backward([supervised()], "cross_entropy").result(timeout=120)
    assert backend.changes == ["forward_backward"]


def test_protobuf_that_no_client_may_send_is_refused():
    pb = load_protobuf()

    def request(change):
        message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(2, dtype=np.int32).tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dense, tensor.dtype = np.arange(2).tobytes(), pb.DTYPE_INT64
        tensor.shape.append(2)
        change(datum, tensor)
        return message.SerializeToString()

    def span(datum, tensor, offset, length):
        datum.model_input_spans.add().sampled_tokens.MergeFrom(
            pb.SampledProvenanceSpan(sequence_id="s", offset=offset, length=length)
        )

    good = parse_proto_training(request(lambda datum, tensor: span(datum, tensor, 1, 2)))
    assert good.data[0].token_spans == [ProvenanceSpan("s", 1, 2, True)]
    for change, message in (
        (lambda d, t: setattr(d.model_input[0].encoded_text, "tokens", b"abc"), "no whole number of int32"),
        (lambda d, t: setattr(d.model_input.add().image, "data", b"abc"), "not supported"),
        (lambda d, t: d.model_input.add(), "no encoded_text"),
        (lambda d, t: setattr(t, "dense", b"abc"), "no whole number of int64"),
        (lambda d, t: setattr(t, "dtype", pb.DTYPE_BFLOAT16), "send float32 or int64"),
        (lambda d, t: t.shape.append(2), "do not have the shape"),
        (lambda d, t: setattr(t.sparse_csr, "values", b"abcdefgh"), "the parts of the sparse tensor"),
        (lambda d, t: span(d, t, -1, 2), "negative"),
        (lambda d, t: span(d, t, 0, -2), "negative"),
    ):
        with pytest.raises(ApiError, match=message):
            parse_proto_training(request(change))
    for data in (b"\xff" * 20, b"\x0a\x05ab", request(lambda d, t: None)[:-3]):
        with pytest.raises(ApiError, match="no ForwardBackwardRequest"):
            parse_proto_training(data)


def test_a_wrong_key_is_refused(served):
    owner = tinker.ServiceClient(base_url=served.base_url, api_key="tml-wrong")
    with pytest.raises(tinker.AuthenticationError):
        owner.create_lora_training_client("tiny/moe", rank=4).result()


# -- what else the SDK sends -------------------------------------------------------------------------------------------


def test_sample_and_forward_agree_and_prompts_have_logprobs(client):
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(PROMPT)
    answer = sampler.sample(
        prompt, 1, SP(max_tokens=6, seed=2), include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    (sequence,) = answer.sequences
    whole = [*PROMPT, *sequence.tokens]
    datum = types.Datum(
        types.ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)}
    )
    output = client.forward([datum], "cross_entropy").result()
    learner = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert np.abs(learner[4:] - sequence.logprobs).max() < 1e-4
    assert answer.prompt_logprobs[0] is None
    assert np.abs(learner[:4] - np.array(answer.prompt_logprobs[1:])).max() < 1e-4
    alone = sampler.compute_logprobs(prompt).result()
    assert alone == pytest.approx(answer.prompt_logprobs)
    last = sampler.compute_logprobs(prompt, 2).result()
    assert last[:3] == [None] * 3
    assert last[3:] == pytest.approx(alone[3:])
    assert answer.topk_prompt_logprobs[0] is None
    assert all(len(row) == 2 for row in answer.topk_prompt_logprobs[1:])


def test_stops_and_seeds(client):
    sampler = client.save_weights_and_get_sampling_client().result()
    first, again = (sample(sampler, tokens=6, seed=4)[0].tokens for _ in range(2))
    assert first == again
    stop = first[2]
    prompt = types.ModelInput.from_ints(PROMPT)
    (stopped,) = sampler.sample(prompt, 1, SP(max_tokens=6, seed=4, stop=[stop])).result().sequences
    assert stopped.tokens == first[: first.index(stop) + 1]
    assert stopped.stop_reason == "stop"
    (greedy,) = sampler.sample(prompt, 1, SP(max_tokens=3, temperature=0.0)).result().sequences
    (top_one,) = sampler.sample(prompt, 1, SP(max_tokens=3, top_k=1)).result().sequences
    assert greedy.tokens == top_one.tokens


def test_targets_of_two_dimensions_dense_and_sparse(client):
    tokens = types.ModelInput.from_ints([5, 6, 7])
    targets, weights = torch.zeros(3, 6, dtype=torch.int64), torch.zeros(3, 6)
    targets[0, :2], weights[0, :2] = torch.tensor([1, 2]), torch.tensor([0.5, 0.5])
    targets[1, 0], weights[1, 0] = 3, 1.0
    targets[2, 0], weights[2, 0] = 5, 0.5
    sparse = types.Datum(tokens, {"target_tokens": targets, "weights": weights})
    assert sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    dense = types.Datum(tokens, {"target_tokens": targets.numpy(), "weights": weights.numpy()})
    results = [client.forward([one], "cross_entropy").result() for one in (dense, sparse)]
    values = [result.loss_fn_outputs[0]["logprobs"].to_numpy() for result in results]
    assert values[0].shape == (3, 6)
    assert np.array_equal(values[0], values[1])
    expected = -(weights.numpy() * values[0]).sum()
    assert results[0].metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_a_custom_loss_has_the_gradient_of_the_named_one(client, service, backend):
    other = service.create_lora_training_client("tiny/moe", rank=4, seed=3).result()
    data = [supervised(), supervised(3, start=2)]

    def loss(data, logprobs):
        return -sum(each.sum() for each in logprobs), {"mine": 1.0}

    custom = client.forward_backward_custom(data, loss).result()
    assert custom.metrics["mine"] == 1.0
    other.forward_backward(data, "cross_entropy").result()
    norms = [each.optim_step(types.AdamParams()).result().metrics["grad_norm"] for each in (client, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_saved_weights_are_loaded_with_and_without_the_optimizer(client, service):
    def step(one, rate=0.02):
        one.forward_backward([supervised()], "cross_entropy").result()
        one.optim_step(types.AdamParams(learning_rate=rate)).result()

    def loss(one):
        return one.forward([supervised()], "cross_entropy").result().metrics["loss:sum"]

    step(client)
    path = client.save_state("first").result().path
    saved = loss(client)
    step(client)
    after = loss(client)
    client.load_state_with_optimizer(path).result()
    assert loss(client) == pytest.approx(saved, rel=1e-6)
    step(client)
    assert loss(client) == pytest.approx(after, rel=1e-6)
    client.load_state(path).result()
    step(client)
    assert loss(client) != pytest.approx(after, rel=1e-4)  # without the moments another step
    same = service.create_training_client_from_state_with_optimizer(path).result()
    assert loss(same) == pytest.approx(saved, rel=1e-6)
    step(same)
    assert loss(same) == pytest.approx(after, rel=1e-6)
    with pytest.raises(tinker.RequestFailedError, match="is there already"):
        client.save_state("first").result()
    assert client.save_state("first", overwrite=True).result().path == path


def test_samplers_by_path_and_listings(client, service, served):
    client.forward_backward([supervised()], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    path = client.save_weights_for_sampler("s1").result().path
    by_path = service.create_sampling_client(model_path=path).result()
    snapshot = client.save_weights_and_get_sampling_client().result()
    base = service.create_sampling_client(base_model="tiny/moe").result()
    prompt = types.ModelInput.from_ints(PROMPT)
    values = [np.array(one.compute_logprobs(prompt).result()[1:]) for one in (by_path, snapshot, base)]
    assert np.allclose(values[0], values[1], atol=1e-6)
    assert not np.allclose(values[0], values[2], atol=1e-3)
    rest = tinker.RestClient(base_url=served.base_url, api_key=KEY)
    model_id = client.model_id
    assert model_id in [run.training_run_id for run in rest.list_training_runs(limit=1000).result().training_runs]
    (checkpoint,) = rest.list_checkpoints(model_id).result().checkpoints
    assert checkpoint.tinker_path == path
    assert rest.get_weights_info_by_tinker_path(client.save_state("x").result().path).result().lora_rank == 4
    rest.delete_checkpoint(model_id, checkpoint.checkpoint_id).result()
    with pytest.raises(tinker.NotFoundError, match="there is nothing at"):
        service.create_sampling_client(model_path=path).result()


def test_only_the_last_snapshots_can_be_sampled_from(client):
    samplers = [client.save_weights_and_get_sampling_client().result() for _ in range(6)]
    assert sample(samplers[-1])
    with pytest.raises(tinker.NotFoundError, match="last 4 snapshots"):
        sample(samplers[0])


def test_a_session_that_is_closed_takes_its_models_along(served, backend):
    with tinker.ServiceClient(base_url=served.base_url, api_key=KEY) as owner:
        client = owner.create_lora_training_client("tiny/moe", rank=4).result()
        client.forward_backward([supervised()], "cross_entropy").result()
        model_id = client.model_id
    deadline = time.monotonic() + 240
    while model_id in backend.learners and time.monotonic() < deadline:
        time.sleep(0.05)
    assert model_id not in backend.learners


def test_a_poll_costs_no_requests_while_it_waits(client, served, backend, monkeypatch):
    train = backend.train
    monkeypatch.setattr(backend, "train", lambda *args, **kw: (time.sleep(1.0), train(*args, **kw))[1])
    client.forward_backward([supervised()], "cross_entropy").result()
    assert len(served.seen_at("retrieve_future")) <= 2
