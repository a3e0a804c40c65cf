"""What the SDK does when answers are lost, row by row of its rules: everything is applied once."""

import time

import pytest

tinker = pytest.importorskip("tinker", reason='the SDK is not installed: pip install "r3async[tinker]"')
from tinker import types  # noqa: E402

from tests.helpers.models import VOCAB, make_hf_model  # noqa: E402
from tests.helpers.tinker import KEY, FaultyServer, SingleProcessBackend, serve  # noqa: E402

PROMPT = types.ModelInput.from_ints([3, 1, 4])


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


def datum(length=6):
    tokens = [7 * i % VOCAB for i in range(length + 1)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "options", "seconds", "keys"),
    [
        (408, {}, 0.2, 1),
        (409, {}, 0.2, 1),
        (429, {}, 0.2, 1),
        (500, {"times": 2}, 0.5, 1),
        (502, {}, 0.2, 1),
        (503, {}, 0.2, 1),
        (529, {}, 0.2, 1),
        (429, {"headers": {"retry-after": "1"}}, 1.0, 1),
        (429, {"headers": {"retry-after-ms": "700"}}, 0.7, 1),
        (429, {"headers": {"x-should-retry": "false"}}, 0.8, 2),
        (400, {"empty": True}, 0.8, 2),
        pytest.param(402, {}, 4.5, 2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_an_update_whose_answer_was_lost_is_applied_once(client, served, backend, status, options, seconds, keys):
    """`seconds` later, at least, it comes again, under `keys` idempotency keys: so these are no identity."""
    client.forward_backward([datum()], "cross_entropy").result()
    served.lose("optim_step", status, **options)
    assert client.optim_step(types.AdamParams(learning_rate=0.01)).result().metrics["grad_norm"] > 0
    seen = served.seen_at("optim_step")
    assert len(seen) == 1 + options.get("times", 1)
    assert seen[-1].time - seen[0].time > seconds
    assert len({one.key for one in seen}) == keys
    if keys == 1:
        assert [one.headers["x-stainless-retry-count"] for one in seen] == [str(n) for n in range(len(seen))]
    assert backend.changes == ["forward_backward", "optim_step"]
    assert client.forward([datum()], "cross_entropy").result()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (403, "PermissionDeniedError"),
        (404, "NotFoundError"),
        (410, "APIStatusError"),
        (413, "APIStatusError"),
        (422, "UnprocessableEntityError"),
    ],
)
def test_a_refusal_is_raised_at_once_and_later_requests_do_not_wait(client, served, status, error):
    served.lose("forward_backward", status)
    begun = time.monotonic()
    with pytest.raises(getattr(tinker, error)):
        client.forward_backward([datum()], "cross_entropy").result()
    assert client.optim_step(types.AdamParams()).result(timeout=120)
    assert len(served.seen_at("forward_backward")) == 1
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("path", ["save_weights", "save_weights_for_sampler"])
def test_weights_are_saved_once_under_a_new_key_for_each_try(client, served, backend, path):
    served.lose(path, 500, times=2)
    save = client.save_state if path == "save_weights" else client.save_weights_for_sampler
    assert save("name").result().path.endswith("/name")
    seen = served.seen_at(path)
    assert len(seen) == len({one.key for one in seen}) == 3
    if path == "save_weights":
        assert backend.calls.count("save_state") <= 2  # the server's own state may be one
    else:
        assert backend.calls.count("publish") == 1


@pytest.mark.parametrize("status", [429, 500])
def test_a_model_is_created_once(service, served, backend, status):
    backend.calls.clear()
    served.lose("create_model", status, times=2)
    client = service.create_lora_training_client("tiny/moe", rank=4).result()
    assert backend.calls == ["create_model"]
    assert client.get_info().lora_rank == 4


@pytest.mark.parametrize("status", [400, 404])
def test_a_model_that_is_refused_is_raised(service, served, status):
    served.lose("create_model", status)
    with pytest.raises(tinker.APIStatusError):
        service.create_lora_training_client("tiny/moe", rank=4).result()


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_sample_whose_promise_was_lost_is_drawn_once(client, served, backend, status):
    sampler = client.save_weights_and_get_sampling_client().result()
    backend.calls.clear()
    # A sampler heeds no `retry-after`.
    served.lose("asample", status, headers={"retry-after": "30"})
    begun = time.monotonic()
    (sequence,) = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=3)).result().sequences
    assert time.monotonic() - begun < 20
    assert backend.changes == ["sample"]
    seen = served.seen_at("asample")
    assert len(seen) == len({one.key for one in seen}) == 2
    assert seen[1].time - seen[0].time > 0.8
    assert served.service.parts.kept.find(sequence.sequence_id).tokens[3:].tolist() == sequence.tokens


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_sample_that_is_refused_is_raised(client, served, status):
    sampler = client.save_weights_and_get_sampling_client().result()
    served.lose("asample", status)
    with pytest.raises(tinker.APIStatusError):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=3)).result()
    assert len(served.seen_at("asample")) == 1


def test_a_result_whose_answer_was_lost_is_read_again(client, served):
    for status in (408, 429, 500, 503):
        served.lose("retrieve_future", status)
        assert client.forward_backward([datum()], "cross_entropy").result(timeout=120)
    sampler = client.save_weights_and_get_sampling_client().result()
    served.lose("retrieve_future", 410)
    assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=3)).result()
    assert len(served.seen_at("asample")) == 2  # sent anew
