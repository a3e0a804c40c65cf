"""What the Tinker server costs beside its parts: loops of a real SDK, polls and kept sequences.

    python -m dev.bench.tinker_server [--steps 30] [--rounds 3]

A random Qwen3-MoE of the quickstart's size, adapters of rank 8, one vLLM engine, float32. A step of
the loop samples 64 sequences of 64 tokens from the newest snapshot, trains on them with
`importance_sampling`, and makes the next snapshot. Ways take turns in every round:

* `verbs`: the loop calls the backend's verbs in this process;
* `served`: the SDK's loop, over the server;
* `together`: two such loops at once, which are compared with two times `served`.

Each line of JSON has the seconds of a way, or another cost:

* `polls`: share of a core that the server's thread takes while 200 futures are polled;
* `kept`: memory and disk of 10,000 sequences of 1,000 tokens, of 48 layers and 8 of 128 experts.

It is no part of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import aiohttp
import numpy as np
import psutil

from r3async.config import InitConfig, config_from_dict
from r3async.data.tokens import UNSAMPLED_VERSION
from r3async.tinker.backend import LossBatch
from r3async.tinker.engine_backend import EngineBackend
from r3async.tinker.kept_sequences import KeptSequence, KeptSequences, RoutedDatum
from r3async.tinker.protocol import AdamParams, Datum, LoraConfig, SamplingParams
from r3async.tinker.server import TinkerServer
from r3async.tinker.service import TinkerService
from r3async.tinker.sessions import Snapshot
from r3async.tools.init_model import build_byte_tokenizer, build_random_model
from r3async.world.real import REAL_WORLD

NAME = "tiny/moe"
PROMPTS = [[3 + i, 1, 4, 1, 5, 9, 2, 6] for i in range(8)]
SAMPLES = 8
"""Of each prompt."""
TOKENS = 64
RATE = 1e-3
POLLS = 200
POLLED_SECONDS = 30.0

T = TypeVar("T")


def build_backend(directory: Path) -> EngineBackend:
    model = directory / "model"
    tokenizer = build_byte_tokenizer()
    build_random_model(InitConfig(), tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    config = config_from_dict(
        {
            "learner": {
                "dtype": "float32",
                "max_tokens_per_micro_batch": 8192,
                "lora": {"rank": 8, "deliver": "adapter", "targets": ["self_attn"]},
            },
            "generator": {"dtype": "float32", "concurrency": 128, "kv_cache_gib": 1.0},
            "episode": {"max_total_tokens": 128, "max_prompt_tokens": 64},
        }
    )
    return EngineBackend(config, model, NAME, (), directory)


def build_loss_inputs(
    prompt: list[int], tokens: Any, logprobs: Any, advantage: float
) -> dict[str, Any]:
    """Return what the loss takes of a sampled sequence."""
    lead = len(prompt) - 1
    return {
        "target_tokens": [*prompt[1:], *tokens],
        "logprobs": [0.0] * lead + list(logprobs),
        "advantages": [0.0] * lead + [advantage] * len(tokens),
    }


def compute_reward(tokens: Any) -> float:
    """A token below 128 is a reward."""
    return float(np.mean([token < 128 for token in tokens])) - 0.5


async def loop_over_verbs(backend: EngineBackend, model_id: str, steps: int, at: Path) -> None:
    await backend.create_model(model_id, LoraConfig(8, seed=0))
    params = SamplingParams(max_tokens=TOKENS, stop=[])
    for step in range(steps):
        snapshot = Snapshot(f"{model_id}/{step}", model_id, step)
        directory = at / f"{model_id}-{step}"
        directory.mkdir()
        await backend.publish(snapshot, directory)
        await backend.open_snapshot(snapshot, directory)
        calls = [
            backend.sample(
                snapshot, np.asarray(prompt, np.int32), params, num_samples=SAMPLES, top_k=0
            )
            for prompt in PROMPTS
        ]
        data = []
        for prompt, answers in zip(PROMPTS, await asyncio.gather(*calls), strict=True):
            for one in answers:
                inputs = build_loss_inputs(
                    prompt, one.tokens, one.logprobs, compute_reward(one.tokens)
                )
                arrays = {name: np.asarray(x, np.float32) for name, x in inputs.items()}
                arrays["target_tokens"] = np.asarray(inputs["target_tokens"], np.int64)
                tokens = np.asarray([*prompt, *one.tokens[:-1]], np.int32)
                versions = np.full(len(tokens), UNSAMPLED_VERSION, np.int32)
                versions[len(prompt) - 1 :] = step
                assert one.recorded is not None
                datum = Datum(tokens, arrays, [], [])
                data.append(RoutedDatum(datum, one.routes, one.recorded, versions))
        await backend.forward_backward(model_id, LossBatch("importance_sampling", {}, data, step))
        await backend.optim_step(model_id, AdamParams(RATE))
        await backend.close_snapshot(snapshot)
    await backend.close_model(model_id)


def loop_over_sdk(url: str, key: str, steps: int) -> dict[str, float]:
    """Return the metrics of the last step."""
    import tinker
    from tinker import types

    metrics: dict[str, float] = {}
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        client = service.create_lora_training_client(NAME, rank=8, seed=0).result()
        params = types.SamplingParams(max_tokens=TOKENS, stop=[])
        for _ in range(steps):
            sampler = client.save_weights_and_get_sampling_client().result()
            calls = [
                sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params)
                for prompt in PROMPTS
            ]
            data = [
                types.Datum(
                    types.ModelInput.from_ints([*prompt, *one.tokens[:-1]]),
                    build_loss_inputs(prompt, one.tokens, one.logprobs, compute_reward(one.tokens)),
                )
                for prompt, call in zip(PROMPTS, calls, strict=True)
                for one in call.result().sequences
            ]
            trained = client.forward_backward(data, "importance_sampling")
            client.optim_step(types.AdamParams(learning_rate=RATE)).result()
            metrics = dict(trained.result().metrics)
    return metrics


async def poll_futures(url: str, key: str, count: int) -> None:
    """Ask for the results of `count` requests that wait for an earlier one."""
    headers = {"X-API-Key": key}
    async with aiohttp.ClientSession(
        url, headers=headers, connector=aiohttp.TCPConnector(limit=0)
    ) as http:

        async def post_json(path: str, body: dict[str, Any]) -> dict[str, Any]:
            async with http.post(f"/api/v1/{path}", json=body) as answer:
                assert answer.status < 500, await answer.text()
                return dict(await answer.json())

        async def poll_future(request_id: str) -> None:
            while True:
                await post_json("retrieve_future", {"request_id": request_id})

        opened = await post_json("create_session", {"tags": [], "sdk_version": "bench"})
        lora = {"rank": 8, "seed": 0}
        body = {"session_id": opened["session_id"], "model_seq_id": 0, "base_model": NAME}
        made = await post_json("create_model", body | {"lora_config": lora})
        model_id = made["model_id"]
        taken = [
            await post_json("optim_step", {"model_id": model_id, "seq_id": number})
            for number in range(2, count + 2)  # 1 never comes
        ]
        waits = [asyncio.create_task(poll_future(one["request_id"])) for one in taken]
        await asyncio.wait(waits, timeout=POLLED_SECONDS)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


class ServerThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(3600)

    def read_cpu_seconds(self) -> float:
        async def read() -> float:
            return time.thread_time()

        return self.run(read())


def measure_seconds(call: Any, *args: Any) -> float:
    began = time.perf_counter()
    call(*args)
    return time.perf_counter() - began


def compare_loops(
    thread: ServerThread, backend: EngineBackend, server: TinkerServer, args: Any, at: Path
) -> None:
    url, key = server.base_url, server.key

    def run_verbs(name: str, steps: int) -> None:
        thread.run(loop_over_verbs(backend, name, steps, at))

    def run_two_clients(steps: int) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: loop_over_sdk(url, key, steps), range(2)))

    run_verbs("warm", 2)
    print(json.dumps({"metrics": loop_over_sdk(url, key, 2)}), flush=True)
    seconds: dict[str, list[float]] = {"verbs": [], "served": [], "together": []}
    for index in range(args.rounds):
        seconds["verbs"].append(measure_seconds(run_verbs, f"verbs-{index}", args.steps))
        seconds["served"].append(measure_seconds(loop_over_sdk, url, key, args.steps))
        seconds["together"].append(measure_seconds(run_two_clients, args.steps))
        print(
            json.dumps({name: round(values[-1], 2) for name, values in seconds.items()}), flush=True
        )
    rounds = list(zip(*seconds.values(), strict=True))
    ratios = {
        "served/verbs": [served / alone for alone, served, _ in rounds],
        "throughput together": [2 * served / both for _, served, both in rounds],
    }
    for name, values in ratios.items():
        print(
            json.dumps(
                {name: round(median(values), 3), "of": [round(value, 3) for value in values]}
            ),
            flush=True,
        )


def measure_polls(thread: ServerThread, server: TinkerServer) -> None:
    for count in (0, POLLS):
        before = thread.read_cpu_seconds()
        began = time.perf_counter()
        if count:
            asyncio.run(poll_futures(server.base_url, server.key, count))
        else:
            time.sleep(POLLED_SECONDS)
        share = (thread.read_cpu_seconds() - before) / (time.perf_counter() - began)
        print(json.dumps({"polls": count, "share of a core": round(share, 4)}), flush=True)


def measure_kept(at: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    process = psutil.Process()
    kept = KeptSequences(at / "kept", max_bytes=2**40)
    routes = np.argsort(rng.random((999, 48, 128), np.float32), axis=2)[..., :8].astype(np.uint8)
    before = process.memory_info().rss
    began = time.perf_counter()
    for index in range(count):
        tokens = rng.integers(0, 150_000, 1000).astype(np.int32)
        recorded = np.ones(999, bool)
        kept.put(KeptSequence(f"s{index}", "m", 0, 200, tokens, routes, recorded))
    gib = {
        "memory": (process.memory_info().rss - before) / 2**30,
        "disk": kept.nbytes / 2**30,
    }
    rounded = {name: round(value, 3) for name, value in gib.items()}
    spent = round(time.perf_counter() - began, 1)
    print(json.dumps({"kept": count, "gib": rounded, "seconds": spent}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kept", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        measure_kept(at, args.kept)
        thread = ServerThread()
        backend = build_backend(at)
        thread.run(backend.start())
        server = thread.run(start_server(backend, at / "served"))
        compare_loops(thread, backend, server, args, at)
        measure_polls(thread, server)
        thread.run(server.stop())
        thread.run(backend.stop())


async def start_server(backend: EngineBackend, directory: Path) -> TinkerServer:
    server = TinkerServer(TinkerService(backend, directory, REAL_WORLD))
    await server.start()
    return server


if __name__ == "__main__":
    main()
