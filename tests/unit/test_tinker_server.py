"""The server over HTTP without an SDK: the JSON dialect of older ones, keys, and malformed requests."""

import asyncio
import itertools
import json

import aiohttp
import numpy as np
import pytest

from r3async.config import ConfigError
from r3async.tinker.protocol import MAX_TENSOR_ELEMENTS, ApiError, build_tensor
from r3async.tinker.request_files import RequestFiles
from r3async.tinker.server import MODEL_PATHS, TinkerServer
from r3async.tinker.service import TinkerService
from r3async.world.real import REAL_WORLD
from tests.helpers.models import VOCAB, make_hf_model
from tests.helpers.tinker import KEY, MAX_TOKENS, SingleProcessBackend


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model"), std=0.3)


class JsonClient:
    """A client of the dialect of SDK 0.15."""

    def __init__(self, http, server):
        self.http = http
        self.root = server.base_url + "/api/v1/"
        self.session_id = self.model_id = ""

    async def post(self, path, body=None, *, raw=None, key=KEY, headers=None):
        data = json.dumps(body) if raw is None else raw
        sent = {"x-api-key": key, "content-type": "application/json", **(headers or {})}
        async with self.http.post(self.root + path, data=data, headers=sent) as answer:
            return answer.status, await answer.json()

    async def get(self, path):
        async with self.http.get(self.root + path, headers={"x-api-key": KEY}) as answer:
            return answer.status, await answer.json()

    async def finish(self, path, body):
        """Make a request, and return its result."""
        status, promise = await self.post(path, body)
        assert status == 200, promise
        return await self.read(promise)

    async def read(self, promise):
        while True:
            _, result = await self.post("retrieve_future", {"request_id": promise["request_id"]})
            if result.get("type") != "try_again":
                return result

    async def open(self, rank=4):
        _, session = await self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.15.0"})
        self.session_id = session["session_id"]
        body = {
            "session_id": self.session_id,
            "model_seq_id": 0,
            "base_model": "tiny/moe",
            "lora_config": {"rank": rank},
        }
        self.model_id = (await self.finish("create_model", body))["model_id"]


@pytest.fixture
async def client(model, tmp_path):
    backend = SingleProcessBackend(model)
    server = TinkerServer(TinkerService(backend, tmp_path, REAL_WORLD), key=KEY)
    await server.start()
    async with aiohttp.ClientSession() as http:
        made = JsonClient(http, server)
        made.server, made.backend = server, backend
        await made.open()
        yield made
    await made.server.stop()
    await backend.close()


def tensor(values, dtype="float32", shape=None):
    return {"data": values, "dtype": dtype, "shape": shape}


def datum(tokens=(1, 2, 3), **changes):
    inputs = {"target_tokens": tensor([*tokens[1:], 4], "int64"), "weights": tensor([1.0] * len(tokens))}
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
        "loss_fn_inputs": {name: value for name, value in (inputs | changes).items() if value is not None},
    }


def training(client, seq_id, data=None, loss="cross_entropy", config=None, key="forward_backward_input"):
    inner = {"data": [datum()] if data is None else data, "loss_fn": loss, "loss_fn_config": config}
    return {"model_id": client.model_id, "seq_id": seq_id, key: inner}


async def test_a_loop_in_json(client):
    forward = await client.finish("forward", training(client, 1, key="forward_input"))
    trained = await client.finish("forward_backward", training(client, 2))
    assert forward["loss_fn_outputs"] == trained["loss_fn_outputs"]
    (output,) = trained["loss_fn_outputs"]
    assert output["logprobs"]["shape"] == [3]
    assert trained["metrics"]["loss:sum"] == pytest.approx(-sum(output["logprobs"]["data"]))
    # Only what was set is sent.
    stepped = await client.finish(
        "optim_step", {"model_id": client.model_id, "seq_id": 3, "adam_params": {"learning_rate": 0.1}}
    )
    assert stepped["metrics"]["grad_norm"] > 0
    saved = await client.finish("save_weights_for_sampler", {"model_id": client.model_id, "seq_id": 4, "path": "s"})
    body = {"session_id": client.session_id, "sampling_session_seq_id": 0, "model_path": saved["path"]}
    _, made = await client.post("create_sampling_session", body)
    body = {
        "sampling_session_id": made["sampling_session_id"],
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3, "seed": None, "stop": None, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 1,
        "base_model": None,
        "model_path": None,
    }
    answer = await client.finish("asample", body)
    assert [len(one["tokens"]) for one in answer["sequences"]] == [3, 3]
    assert {one["stop_reason"] for one in answer["sequences"]} == {"length"}
    assert answer["prompt_logprobs"][0] is None
    assert answer["topk_prompt_logprobs"][0] is None
    assert len(answer["topk_prompt_logprobs"][1]) == 1
    assert len(client.server.service.parts.kept) == 2


async def test_requests_that_come_out_of_order_or_twice(client):
    _, second = await client.post("forward_backward", training(client, 2))
    _, third = await client.post("optim_step", {"model_id": client.model_id, "seq_id": 3, "adam_params": {}})
    _, again = await client.post("forward_backward", training(client, 2))
    assert again == second
    await asyncio.sleep(0.05)
    assert "forward_backward" not in client.backend.calls
    await client.finish("forward_backward", training(client, 1))
    for promise in (second, third):
        await client.post("retrieve_future", {"request_id": promise["request_id"]})
    assert client.backend.changes[-3:] == ["forward_backward", "forward_backward", "optim_step"]
    _, late = await client.post("forward_backward", training(client, 2))
    assert late == second


async def test_a_request_that_cannot_be_read_has_used_up_its_number(client):
    model = client.model_id
    for number, (path, body) in enumerate(
        [
            ("forward_backward", training(client, 0, [datum(weights=tensor(["x"]))])),
            ("forward_backward", training(client, 0, [datum(weights=tensor([1.0], shape=[2]))])),
            ("optim_step", {"model_id": model, "adam_params": {"learning_rate": "much"}}),
            ("save_weights", {"model_id": model, "path": 5}),
        ],
        start=1,
    ):
        assert (await client.finish(path, body | {"seq_id": number}))["category"] == "user"
    assert (await client.finish("forward_backward", training(client, 5)))["metrics"]


async def open_model(client, number):
    """Return a client of another model of the same session."""
    other = JsonClient(client.http, client.server)
    other.session_id = client.session_id
    body = {"session_id": client.session_id, "model_seq_id": number, "base_model": "tiny/moe"}
    other.model_id = (await client.finish("create_model", body | {"lora_config": {"rank": 4}}))["model_id"]
    return other


async def test_the_batches_of_one_client_do_not_make_another_wait(client):
    other = await open_model(client, 1)
    for number in range(1, 9):
        await client.post("forward_backward", training(client, number, [datum()] * 20))
    assert (await other.finish("forward_backward", training(other, 1)))["metrics"]
    assert client.backend.calls.count("forward_backward") <= 4


async def restart(client, tmp_path):
    """End the server at once, with its learner and engine, and let the client speak to the next one."""
    await client.server.stop()
    client.backend.lose()
    client.server = TinkerServer(TinkerService(client.backend, tmp_path, REAL_WORLD), key=KEY)
    await client.server.start()
    client.root = client.server.base_url + "/api/v1/"


async def test_what_was_acknowledged_is_there_after_a_restart_and_applied_once(client, tmp_path):
    alone = await open_model(client, 1)
    promises = []
    for one in (alone, client):
        requests = [
            ("forward_backward", training(one, 1)),
            ("optim_step", {"model_id": one.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.05}}),
            ("forward_backward", training(one, 3, [datum((4, 5, 6))])),
            ("optim_step", {"model_id": one.model_id, "seq_id": 4, "adam_params": {"learning_rate": 0.05}}),
            ("forward", training(one, 5, key="forward_input")),
        ]
        for path, body in requests:
            promises.append((await one.post(path, body))[1])
            if one is client:
                await restart(client, tmp_path)
                assert (await one.post(path, body))[1] == promises[-1]
    results = [await client.read(promise) for promise in promises]
    assert results[:5] == results[5:]
    assert results[1]["metrics"]["grad_norm"] > 0


async def test_samplers_and_sequences_are_there_after_a_restart(client, tmp_path):
    body = {"model_id": client.model_id, "seq_id": 1, "sampling_session_seq_id": 0}
    sampler = (await client.finish("save_weights_for_sampler", body))["sampling_session_id"]
    draw = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "seed": 5},
    }
    first = (await client.finish("asample", draw | {"seq_id": 0}))["sequences"][0]
    await restart(client, tmp_path)
    status, gone = await client.post("retrieve_future", {"request_id": f"{sampler}:0"})
    assert (status, gone["category"]) == (410, "user")  # then an SDK sends it anew
    assert (await client.finish("asample", draw | {"seq_id": 1}))["sequences"][0] == first
    whole = [1, 2, 3, *first["tokens"]]
    data = [datum(whole[:-1], target_tokens=tensor(whole[1:], "int64"))]
    trained = await client.finish("forward_backward", training(client, 2, data))
    assert trained["metrics"]["routes/recorded:mean"] == 1.0
    assert trained["metrics"]["staleness:max"] == 0.0


async def test_a_session_that_ended_leaves_nothing_but_what_was_saved(client, tmp_path):
    await client.finish("save_weights", {"model_id": client.model_id, "seq_id": 1, "path": "mine"})
    await client.finish("save_weights_for_sampler", {"model_id": client.model_id, "seq_id": 2})
    saved = {path.parent.name for path in tmp_path.rglob("tinker.json")}
    assert saved >= {"mine", "2"}
    await client.post(f"sessions/{client.session_id}/finish", {})
    assert {path.parent.name for path in tmp_path.rglob("tinker.json")} == {"mine"}
    assert not list((tmp_path / "sessions").iterdir())
    assert not list((tmp_path / "requests").iterdir())
    assert (await client.post("get_info", {"model_id": client.model_id}))[0] == 404


async def test_a_disk_that_takes_nothing_is_an_error_that_clients_try_again(client, monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(RequestFiles, "write", refuse)
        status, answer = await client.post("forward_backward", training(client, 1))
        assert (status, answer["category"]) == (503, "server")
    assert (await client.finish("forward_backward", training(client, 1)))["metrics"]


async def test_an_error_of_the_backend_is_a_result_and_the_next_request_runs(client, monkeypatch):
    train = client.backend.train

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(client.backend, "train", fail)
    failed = await client.finish("forward_backward", training(client, 1))
    assert failed == {"error": "RuntimeError: out of memory", "category": "server"}
    monkeypatch.setattr(client.backend, "train", train)
    assert (await client.finish("forward_backward", training(client, 2)))["metrics"]


async def test_a_failure_while_a_model_is_restored_is_not_the_next_requests(client, monkeypatch):
    assert (await client.finish("forward_backward", training(client, 1)))["metrics"]
    train = client.backend.train
    failures = ["out of memory"]

    def fail_once(*args, **kwargs):
        if failures:
            raise RuntimeError(failures.pop())
        return train(*args, **kwargs)

    monkeypatch.setattr(client.backend, "train", fail_once)
    client.backend.lose()
    step = {"model_id": client.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.05}}
    assert (await client.finish("optim_step", step))["metrics"]["grad_norm"] > 0
    assert not failures


def malformed(client):
    """(path, body or raw bytes, status) of requests that no client may send."""
    model, big = client.model_id, 2**31
    draws = itertools.count(1)
    step = {"model_id": model, "seq_id": 1}
    sampler = f"{client.session_id}:sample:0"
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}

    def train(data=None, loss="cross_entropy", config=None, **changes):
        return training(client, None, data, loss, config) | changes

    def draw(params=None, **changes):
        limits = {"max_tokens": 2} | (params or {})
        body = {"sampling_session_id": sampler, "seq_id": next(draws), "prompt": prompt, "sampling_params": limits}
        return body | changes

    paths = [
        "create_session",
        "create_model",
        "forward",
        "forward_backward",
        "optim_step",
        "save_weights",
        "load_weights",
    ]
    paths += [
        "save_weights_for_sampler",
        "create_sampling_session",
        "asample",
        "retrieve_future",
        "get_info",
        "weights_info",
    ]
    raws = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"model_id": 5, "session_id": 5, "user_metadata": 3}',
    ]
    yield from ((path, raw, 400) for path in paths for raw in raws)
    for data in (
        [],
        [datum(weights=None)],
        [datum(extra=tensor([1.0]))],
        [datum(tokens=())],
        [datum(tokens=(VOCAB, 1, 2))],
        [datum(tokens=(-1, 1, 2))],
        [datum(tokens=(big, 1, 2))],
        [datum(tokens=[1] * MAX_TOKENS)],
        [datum(weights=tensor([1.0, 2.0]))],
        [datum(weights=tensor([1.0] * 3, shape=[2, 2]))],
        [datum(weights=tensor([1.0] * 3, shape=[-3]))],
        [datum(weights=tensor([1.0] * 3, "bfloat16"))],
        [datum(weights=tensor(["a"]))],
        [datum(weights=tensor([1e300] * 3))],
        [datum(target_tokens=tensor([1.5, 2, 3]))],
        [datum(target_tokens=tensor([1.5, 2, 3], "int64"))],
        [datum(target_tokens=tensor([1e300, 2, 3], "int64"))],
        [datum(target_tokens=tensor([1, 2, VOCAB], "int64"))],
        [datum(weights=tensor([1.0] * 3, shape=[3]) | {"sparse_crow_indices": [0, 1], "sparse_col_indices": [0]})],
        [{"model_input": {"chunks": [{"type": "image", "data": "x"}]}, "loss_fn_inputs": {}}],
        [{"loss_fn_inputs": {}}],
        "text",
    ):
        yield "forward_backward", train(data), 400
    yield "forward_backward", train(loss="gspo"), 400
    yield "forward_backward", train(config={"beta": 1.0}), 400
    yield "forward_backward", train(loss="ppo", config={"clip_low_threshold": "x"}), 400
    yield "forward_backward", {"model_id": model}, 400
    yield "forward_backward", train(model_id="nobody", seq_id=1), 404
    yield "forward_backward", train(seq_id="one"), 400
    for params in ({"learning_rate": -1}, {"beta1": 1.0}, {"eps": -1e-9}, {"lr": 1e-4}, {"beta2": "x"}):
        yield "optim_step", step | {"adam_params": params}, 400
    yield "optim_step", {"model_id": model, "optimizer_params": {"type": "dimuon", "learning_rate": 1.0}}, 400
    for path, status in (("../up", 400), ("a/b", 400), ("", 404), ("..", 404), ("x" * 300, 404), ("a b", 404)):
        yield "load_weights", {"model_id": model, "path": f"tinker://{model}/weights/{path}"}, status
    yield "load_weights", {"path": f"tinker://{model}/weights/x"}, 400
    yield "load_weights", {"model_id": model, "path": "/etc/passwd"}, 400
    yield "load_weights", {"model_id": model, "path": f"tinker://{model}/weights/none"}, 404
    yield "load_weights", {"model_id": model, "path": "tinker://../weights/none"}, 404
    yield "save_weights_for_sampler", {"model_id": model, "kind": "inflight"}, 400
    yield "create_sampling_session", {"session_id": "none", "sampling_session_seq_id": 0}, 410
    session = {"session_id": client.session_id}
    yield "create_sampling_session", session | {"sampling_session_seq_id": 9, "base_model": "other"}, 400
    yield "create_model", session | {"model_seq_id": 1, "base_model": "other"}, 400
    base = session | {"model_seq_id": 1, "base_model": "tiny/moe"}
    yield "create_model", base | {"lora_config": {"rank": 0}}, 400
    yield "create_model", base | {"optimizer_config": {"type": "dimuon"}}, 400
    for params in (
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"max_tokens": 0},
        {"stop": ["a", 1]},
        {"stop": {"a": 1}},
        {"min_p": 0.1},
    ):
        yield "asample", draw(params), 400
    for changes in (
        {"num_samples": 0},
        {"num_samples": 10**6},
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"tokens": [VOCAB]}]}},
        {"prompt": {"chunks": [{"tokens": [-1]}]}},
        {"prompt": {"chunks": [{"tokens": [1] * MAX_TOKENS}]}},
        {"prompt": {"chunks": [{"type": "image"}]}},
        {"topk_prompt_logprobs": 21},
        {"topk_sample_logprobs": -1},
        {"prompt_alt_tokens_k": 2},
        {"prompt_logprobs_last_n": 1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
        {"target_prompt_logprobs": {"data": [1]}},
        {"record_stability_info": True},
        {"sampling_session_id": None},
        {"unknown": 1},
    ):
        yield "asample", draw(**changes), 400
    yield "asample", draw(sampling_session_id="none"), 404
    yield "retrieve_future", {"request_id": "none"}, 410
    yield "get_info", {"model_id": "none"}, 404
    yield "session_heartbeat", {"session_id": "none"}, 410
    yield "retrieve_futures", {}, 404
    yield "no/such/path", {}, 404


async def test_every_malformed_request_is_an_error_of_the_user_and_the_server_lives(client):
    body = {"session_id": client.session_id, "sampling_session_seq_id": 0, "base_model": "tiny/moe"}
    await client.post("create_sampling_session", body)
    cases = list(malformed(client))
    assert len(cases) > 100
    wrong = []
    numbers = itertools.count(1)
    for path, sent, expected in cases:
        raw = sent if isinstance(sent, bytes) else None
        of_model = raw is None and path in MODEL_PATHS and sent.get("model_id") == client.model_id
        if of_model and sent.get("seq_id", 1) in (None, 1):
            sent = sent | {"seq_id": next(numbers)}
        status, answer = await client.post(path, sent if raw is None else None, raw=raw)
        if status == 200 and "request_id" in answer:
            status, answer = expected, await client.read(answer)
        if status != expected or answer.get("category") != "user" or not answer.get("error"):
            wrong.append((path, str(sent)[:200], status, answer))
    assert not wrong
    assert client.backend.changes == ["create_model"]
    trained = await client.finish("forward_backward", training(client, next(numbers)))
    assert trained["metrics"]


async def test_a_save_with_a_bad_name_fails_as_the_users(client):
    for number, name in enumerate(("../up", "a/b", ".hidden"), start=1):
        body = {"model_id": client.model_id, "seq_id": number, "path": name}
        assert (await client.finish("save_weights", body))["category"] == "user"


async def test_without_the_key_nothing_is_answered(client):
    for key in ("", "tml-other", "tml-tes\u00e9".encode().decode("latin-1")):
        status, answer = await client.post("create_session", {}, key=key)
        assert status == 401
        assert "x-api-key" in answer["error"]


async def test_bounds_of_listings(client):
    assert (await client.get("training_runs?limit=1"))[1]["cursor"] == {"offset": 0, "limit": 1, "total_count": 1}
    for query in ("limit=-1", "offset=x"):
        status, answer = await client.get(f"training_runs?{query}")
        assert (status, answer["category"]) == (400, "user")
    assert (await client.get("training_runs/none"))[0] == 404


async def test_a_huge_body_is_refused_and_others_go_on(client, monkeypatch, tmp_path):
    monkeypatch.setattr("r3async.tinker.server.MAX_BODY_BYTES", 1000)
    await restart(client, tmp_path)
    status, answer = await client.post("forward_backward", training(client, 1, [datum()] * 100))
    assert (status, answer["category"]) == (413, "user")
    assert (await client.finish("forward_backward", training(client, 1)))["metrics"]


def test_keys_that_the_sdk_does_not_take_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="must begin with 'tml-'"):
        TinkerServer(None, key="sk-x")


def test_parts_of_tensors_that_do_not_fit_are_refused():
    values = np.ones(2, np.float32)
    good = (np.array([0, 1, 2]), np.array([3, 0]))
    assert build_tensor("w", values, [2, 4], good).tolist() == [[0, 0, 0, 1], [1, 0, 0, 0]]
    for rows, columns in (
        ([0, 1], [3, 0]),
        ([0, 2, 1], [3, 0]),
        ([1, 1, 2], [3, 0]),
        ([0, 1, 3], [3, 0]),
        ([0, 1, 2], [4, 0]),
        ([0, 1, 2], [-1, 0]),
        ([0, 1, 2], [3]),
    ):
        with pytest.raises(ApiError, match="the parts of the sparse tensor"):
            build_tensor("w", values, [2, 4], (np.array(rows), np.array(columns)))
    with pytest.raises(ApiError, match="too large"):
        build_tensor("w", values, [MAX_TENSOR_ELEMENTS, 2], good)
