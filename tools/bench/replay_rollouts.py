"""The engine's part of `bench replay`: make the model if need be, and sample from it with vLLM.

`python -m r3async.tools.bench.replay_rollouts DIRECTORY` reads `rollouts.json` (a `RolloutJob`) there and writes `samples.bin`
and `rollouts-done.json` (a `Rollouts`). A process of its own, because the learner replaces parts of `torch.cuda`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.config import EpisodeConfig, InitConfig, load_config
from r3async.data.model_shape import RoutingShape, moe_geometry
from r3async.data.records import Sample, Trajectory, Turn
from r3async.rollout.engines.base import Engine, GenerationRequest
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.rollout.samples import SampleBuilder
from r3async.tools.bench.jobs import job_main, progress
from r3async.tools.bench.replay_records import RandomModel, RolloutJob, Rollouts
from r3async.transport.wire import decode_trajectory, encode_trajectory


def make_random_model(path: Path, shape: RandomModel) -> None:
    """Write the model and a byte-level tokenizer to `path`; equal shapes give equal weights."""
    import torch

    from r3async.tools.init_model import byte_tokenizer, random_model

    init = InitConfig(
        seed=shape.seed,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        expert_hidden_size=shape.expert_hidden_size,
        gate_std=shape.gate_std,
    )
    tokenizer = byte_tokenizer()
    model = random_model(init, tokenizer)
    generator = torch.Generator().manual_seed(shape.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and not name.endswith("mlp.gate.weight"):
                weight.normal_(0, shape.weight_std, generator=generator)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


async def continue_random_prompts(engine: Engine, job: RolloutJob, vocab_size: int) -> list[Trajectory]:
    """One trajectory of one turn for each prompt, recorded as the episode loop records it."""
    rng = np.random.default_rng(job.seed)
    prompts = rng.integers(0, vocab_size, (job.samples, job.prompt_tokens)).astype(np.int32)

    async def one(index: int) -> Trajectory:
        name = f"s{index:05d}"
        builder = SampleBuilder(engine.routing)
        builder.observe(prompts[index].tolist())
        request = GenerationRequest(name, prompts[index], job.new_tokens, routes_from=builder.routes_from)
        generation = await engine.generate(request)
        start, stop = builder.answer(0, generation)
        return Trajectory(
            trajectory_id=name,
            group_index=index,
            episode_index=0,
            task_seed=job.seed,
            generator_id="bench",
            stop_reason=generation.stop_reason,
            turns=[Turn(0, 0, start, stop, 0.0, generation.stop_reason)],
            samples=[Sample(name, builder.build())],
        )

    return await asyncio.gather(*map(one, range(job.samples)))


async def play_episodes(engine: Engine, job: RolloutJob, settings: EpisodeConfig) -> list[Trajectory]:
    """Episodes of the run's environment, each of another task."""
    from transformers import AutoTokenizer

    from r3async.envs.factory import environment_factory
    from r3async.rollout.chat import ChatRenderer

    factory = environment_factory(load_config(job.episodes).env)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(job.model))
    slots = asyncio.Semaphore(job.concurrency)

    async def one(index: int) -> Trajectory:
        async with slots:
            task = EpisodeTask(index, 0, task_seed=job.seed * 1_000_000 + index)
            return await EpisodePlayer(task, factory(), engine, renderer, settings).play()

    return await asyncio.gather(*map(one, range(job.samples)))


async def sample(job: RolloutJob, directory: Path) -> list[Trajectory]:
    from r3async.rollout.engines.vllm import VllmEngine

    settings = load_config(job.episodes).episode if job.episodes else None
    engine = VllmEngine(
        job.model,
        dtype=job.dtype,
        concurrency=job.concurrency,
        max_model_len=settings.max_total_tokens if settings else job.prompt_tokens + job.new_tokens,
        engine_args={"seed": job.seed},
    )
    progress(directory, f"starting vLLM in {job.dtype}")
    await engine.start()
    try:
        if settings:
            progress(directory, f"playing {job.samples} episodes")
            return await play_episodes(engine, job, settings)
        progress(directory, f"sampling {job.samples} x {job.new_tokens} tokens")
        return await continue_random_prompts(engine, job, model_config(job.model)["vocab_size"])
    finally:
        await engine.stop()


def model_config(model: str) -> dict[str, Any]:
    return msgspec.json.decode((Path(model) / "config.json").read_bytes())


def router_std(model: Path) -> float:
    """Root mean square of all router weights."""
    from safetensors import safe_open

    squares = count = 0.0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("mlp.gate.weight"):
                    weight = file.get_tensor(name).double()
                    squares, count = squares + float(weight.square().sum()), count + weight.numel()
    return (squares / count) ** 0.5 if count else 0.0


def measure(
    trajectories: Sequence[Trajectory],
    encoded: Sequence[Sequence[bytes]],
    shape: RoutingShape,
    *,
    gate_std: float,
    seconds: float,
) -> Rollouts:
    """`encoded[i]`: the wire frames of trajectory i."""
    samples = [s for t in trajectories for s in t.samples]
    tables = [s.table for s in samples]
    tokens = sum(map(len, tables))
    bare = sum(len(f) for t in trajectories for f in encode_trajectory(without_routes(t)))
    return Rollouts(
        tokens=tokens,
        sampled_tokens=sum(int(np.count_nonzero(t["loss_mask"])) for t in tables),
        seconds=seconds,
        gate_std=gate_std,
        layers=shape.layers,
        experts=shape.num_experts,
        top_k=shape.top_k,
        route_bytes_per_token=sum(t["routed_experts"].nbytes for t in tables) / tokens,
        wire_bytes_per_token=sum(len(f) for frames in encoded for f in frames) / tokens,
        wire_bytes_per_token_without_routes=bare / tokens,
    )


def without_routes(trajectory: Trajectory) -> Trajectory:
    """The same trajectory as if the engine recorded no routes."""
    samples = [
        Sample(s.sample_id, s.table.without("routed_experts", "routing_recorded"), s.temperature)
        for s in trajectory.samples
    ]
    return msgspec.structs.replace(trajectory, samples=samples)


def read_samples(path: Path) -> list[Sample]:
    """All samples in a `samples.bin`, in order."""
    encoded = msgspec.msgpack.decode(path.read_bytes(), type=list[list[bytes]])
    return [sample for frames in encoded for sample in decode_trajectory(frames).samples]


def main(directory: Path) -> None:
    job = msgspec.json.decode((directory / "rollouts.json").read_bytes(), type=RolloutJob)
    if job.random is not None:
        progress(directory, "making the model")
        make_random_model(Path(job.model), job.random)
    started = time.perf_counter()
    trajectories = asyncio.run(sample(job, directory))
    encoded = [[bytes(frame) for frame in encode_trajectory(t)] for t in trajectories]
    (directory / "samples.bin").write_bytes(msgspec.msgpack.encode(encoded))
    shape, _ = moe_geometry(model_config(job.model))
    if shape is None:
        raise SystemExit(f"{job.model} is not a mixture-of-experts model: it has no routes to replay")
    seconds = time.perf_counter() - started
    done = measure(trajectories, encoded, shape, gate_std=router_std(Path(job.model)), seconds=seconds)
    (directory / "rollouts-done.json").write_bytes(msgspec.json.encode(done))


if __name__ == "__main__":
    job_main(main)
