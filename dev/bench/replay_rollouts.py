"""The engine's part of `bench replay`: make the model if necessary, and sample from it with vLLM.

It is a separate job because the learner replaces parts of `torch.cuda`.

`sample` writes `samples.bin`. `branch` plays two turns with an update between them, of which the second branches off.
It makes a moved model (`moved`), and writes `first.bin` (turns of the first weights), `own.bin` (branches with the
routes of their own call) and `inherited.bin` (the same branches with the routes that the first turn recorded for the
common prefix).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dev.bench.jobs import progress
from dev.bench.replay_report import RandomModel, RolloutJob, Rollouts
from r3async.config import EpisodeConfig, InitConfig, load_config
from r3async.data.models import RoutingShape, read_moe_layers
from r3async.data.tokens import Sample, Trajectory, Turn
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.rollout.engine import Engine, GenerationRequest
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.rollout.samples import EpisodeSamples, SampleBuilder

if TYPE_CHECKING:
    import torch

MOVED = 0.02
"""Standard deviation of the noise added to each weight, as a share of its matrix's standard deviation: about one
version's drift."""
SUFFIX = 8
"""Number of tokens of the second prompt that the first turn has not seen."""


def make_random_model(path: Path, shape: RandomModel) -> None:
    """Write the model and a byte-level tokenizer to `path`; equal shapes give equal weights."""
    import torch

    from r3async.tools.init_model import build_byte_tokenizer, build_random_model

    init = InitConfig(
        seed=shape.seed,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        expert_hidden_size=shape.expert_hidden_size,
        gate_std=shape.gate_std,
    )
    tokenizer = build_byte_tokenizer()
    model = build_random_model(init, tokenizer)
    generator = torch.Generator().manual_seed(shape.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and not name.endswith("mlp.gate.weight"):
                weight.normal_(0, shape.weight_std, generator=generator)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def trajectory_of(sample: Sample, index: int, task_seed: int, turns: Sequence[Turn] = ()) -> Trajectory:
    """Return a trajectory with this sample alone, in a separate group."""
    return Trajectory(
        trajectory_id=sample.sample_id,
        group_index=index,
        episode_index=0,
        task_seed=task_seed,
        generator_id="bench",
        stop_reason=turns[-1].stop_reason if turns else "length",
        turns=list(turns),
        samples=[sample],
    )


@asynccontextmanager
async def engine_of(job: RolloutJob, directory: Path, max_model_len: int) -> AsyncIterator[Engine]:
    """Start vLLM with the job's model for the time of the block."""
    from r3async.rollout.vllm.engine import VllmEngine

    engine = VllmEngine(
        job.model,
        dtype=job.dtype,
        concurrency=job.concurrency,
        max_model_len=max_model_len,
        engine_args={"seed": job.seed},
    )
    progress(directory, f"starting vLLM in {job.dtype}")
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def continue_random_prompts(engine: Engine, job: RolloutJob, vocab_size: int) -> list[Trajectory]:
    """Return one single-turn trajectory per prompt, recorded as the episode loop records it."""
    rng = np.random.default_rng(job.seed)
    prompts = rng.integers(0, vocab_size, (job.samples, job.prompt_tokens)).astype(np.int32)

    async def one(index: int) -> Trajectory:
        name = f"s{index:05d}"
        builder = SampleBuilder(engine.routing)
        builder.append_context(prompts[index].tolist())
        request = GenerationRequest(name, prompts[index], job.new_tokens, routes_from=builder.routes_from)
        generation = await engine.generate(request)
        start, stop = builder.append_answer(0, generation)
        turn = Turn(0, 0, start, stop, 0.0, generation.stop_reason)
        return trajectory_of(Sample(name, builder.build_table()), index, job.seed, [turn])

    return await asyncio.gather(*map(one, range(job.samples)))


async def play_episodes(engine: Engine, job: RolloutJob, settings: EpisodeConfig) -> list[Trajectory]:
    """Play episodes of the run's environment, each with a different task."""
    from transformers import AutoTokenizer

    from r3async.envs.factory import build_environment_factory
    from r3async.rollout.chat import ChatRenderer

    factory = build_environment_factory(load_config(job.episodes).env)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(job.model))
    slots = asyncio.Semaphore(job.concurrency)

    async def one(index: int) -> Trajectory:
        async with slots:
            task = EpisodeTask(index, 0, task_seed=job.seed * 1_000_000 + index)
            return await EpisodePlayer(task, factory(), engine, renderer, settings).play_episode()

    return await asyncio.gather(*map(one, range(job.samples)))


async def play(job: RolloutJob, directory: Path) -> list[Trajectory]:
    settings = load_config(job.episodes).episode if job.episodes else None
    longest = settings.max_total_tokens if settings else job.prompt_tokens + job.new_tokens
    async with engine_of(job, directory, longest) as engine:
        if settings:
            progress(directory, f"playing {job.samples} episodes")
            return await play_episodes(engine, job, settings)
        progress(directory, f"sampling {job.samples} x {job.new_tokens} tokens")
        return await continue_random_prompts(engine, job, model_config(job.model)["vocab_size"])


def model_config(model: str) -> dict[str, Any]:
    return msgspec.json.decode((Path(model) / "config.json").read_bytes())


def router_std(model: Path) -> float:
    """Return the root mean square of all router weights."""
    from safetensors import safe_open

    squares = count = 0.0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("mlp.gate.weight"):
                    weight = file.get_tensor(name).double()
                    squares, count = squares + float(weight.square().sum()), count + weight.numel()
    return (squares / count) ** 0.5 if count else 0.0


def measure(trajectories: Sequence[Trajectory], shape: RoutingShape, *, gate_std: float, seconds: float) -> Rollouts:
    """Return the numbers and bytes of what was sampled."""
    tables = [s.table for t in trajectories for s in t.samples]
    tokens = sum(map(len, tables))

    def wire_bytes(sent: Sequence[Trajectory]) -> float:
        return sum(len(frame) for t in sent for frame in encode_trajectory(t)) / tokens

    unrouted = [msgspec.structs.replace(t, samples=bare(t.samples)) for t in trajectories]
    return Rollouts(
        tokens=tokens,
        sampled_tokens=sum(int(np.count_nonzero(t["loss_mask"])) for t in tables),
        seconds=seconds,
        gate_std=gate_std,
        layers=shape.layers,
        experts=shape.num_experts,
        top_k=shape.top_k,
        route_bytes_per_token=sum(t["routed_experts"].nbytes for t in tables) / tokens,
        wire_bytes_per_token=wire_bytes(trajectories),
        wire_bytes_per_token_without_routes=wire_bytes(unrouted),
    )


def bare(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples as an engine that records no routes would return them."""
    return [
        Sample(s.sample_id, s.table.without_columns("routed_experts", "routing_recorded"), s.temperature)
        for s in samples
    ]


def write(path: Path, trajectories: Sequence[Trajectory]) -> None:
    path.write_bytes(msgspec.msgpack.encode([[bytes(frame) for frame in encode_trajectory(t)] for t in trajectories]))


def read_samples(path: Path) -> list[Sample]:
    """Read all samples of the trajectories that `write` wrote, in order."""
    encoded = msgspec.msgpack.decode(path.read_bytes(), type=list[list[bytes]])
    return [sample for frames in encoded for sample in decode_trajectory(frames).samples]


def sample(job: RolloutJob, directory: Path) -> Rollouts:
    """Run the job that samples, and write `samples.bin`."""
    if job.random is not None:
        progress(directory, "making the model")
        make_random_model(Path(job.model), job.random)
    started = time.perf_counter()
    trajectories = asyncio.run(play(job, directory))
    write(directory / "samples.bin", trajectories)
    shape, _ = read_moe_layers(model_config(job.model))
    if shape is None:
        raise SystemExit(f"{job.model} is not a mixture-of-experts model: it has no routes to replay")
    seconds = time.perf_counter() - started
    return measure(trajectories, shape, gate_std=router_std(Path(job.model)), seconds=seconds)


# -- branches ----------------------------------------------------------------------------------------------------------


def make_moved_model(source: Path, target: Path, seed: int) -> None:
    """Write a model as an update might make it, with every matrix moved a little."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += MOVED * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(target)


def tensors(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}


async def play_branches(job: RolloutJob, directory: Path) -> list[tuple[Sample, Sample, int]]:
    """Return, for each prompt, the sample of the first turn, that of the branch, and the number of tokens that they
    share."""
    import torch

    from r3async.weights.publish import VersionStore

    rng = np.random.default_rng(job.seed)
    vocabulary, shared = model_config(job.model)["vocab_size"], job.prompt_tokens + job.new_tokens // 2
    prompts = rng.integers(0, vocabulary, (job.samples, job.prompt_tokens)).tolist()
    suffixes = rng.integers(0, vocabulary, (job.samples, SUFFIX)).tolist()
    async with engine_of(job, directory, shared + SUFFIX + job.new_tokens) as engine:
        rows = [EpisodeSamples(engine.routing) for _ in prompts]

        async def turn(index: int, prompt: list[int]) -> list[int]:
            call = rows[index].start_call(prompt)
            request = GenerationRequest(
                f"b{index}t{rows[index].turn_count}",
                np.asarray(prompt, np.int32),
                job.new_tokens,
                routes_from=call.routes_from,
                routes_version=call.routes_version,
            )
            generation = await engine.generate(request)
            rows[index].finish_call(call, generation)
            return [*prompt, *generation.token_ids.tolist()]

        with VersionStore(directory) as publisher:
            await engine.install_version(publisher.write_tensors(0, tensors(Path(job.model)), torch.float32), 60)
            progress(directory, f"{job.samples} first turns")
            seen = await asyncio.gather(*(turn(i, prompt) for i, prompt in enumerate(prompts)))
            await engine.install_version(publisher.write_tensors(1, tensors(directory / "moved"), torch.float32), 60)
            progress(directory, f"{job.samples} branches under moved weights")
            await asyncio.gather(*(turn(i, [*s[:shared], *suffixes[i]]) for i, s in enumerate(seen)))
    built = [one.build_samples(f"b{i}", 1.0)[0] for i, one in enumerate(rows)]
    return [(first, branch, shared) for first, branch in built]


def inheriting(first: Sample, branch: Sample, shared: int) -> Sample:
    """Return the branch with the first turn's routes for the tokens that the two share."""
    routes, recorded = (branch.table[name].copy() for name in ("routed_experts", "routing_recorded"))
    routes[:shared], recorded[:shared] = (
        first.table["routed_experts"][:shared],
        first.table["routing_recorded"][:shared],
    )
    table = branch.table.with_columns(routed_experts=routes, routing_recorded=recorded)
    return Sample(branch.sample_id, table, branch.temperature)


def branch(job: RolloutJob, directory: Path) -> None:
    """Run the job that plays branches. `job.random`: the model."""
    assert job.random is not None
    progress(directory, "making the model, and a moved one")
    make_random_model(Path(job.model), job.random)
    make_moved_model(Path(job.model), directory / "moved", job.seed)
    first, own, shared = zip(*asyncio.run(play_branches(job, directory)), strict=True)
    inherited = map(inheriting, first, own, shared)
    for name, samples in (("first", first), ("own", own), ("inherited", inherited)):
        write(directory / f"{name}.bin", [trajectory_of(s, i, 0) for i, s in enumerate(samples)])
