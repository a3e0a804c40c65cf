"""The engine's part of `bench replay`'s branches: two turns with an update between them, of which the second branches off.

`python -m r3async.tools.bench.replay_branch_rollouts DIRECTORY` reads `rollouts.json` (a `RolloutJob` with `random`) there. It
makes the model and a moved one (`directory/moved`), and writes `first.bin` (turns of the first weights), `own.bin` (branches
with the routes of their own call) and `inherited.bin` (the same branches with what the first turn recorded of the common prefix).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from r3async.data.records import Sample, Trajectory
from r3async.rollout.engines.base import GenerationRequest
from r3async.rollout.engines.vllm import VllmEngine
from r3async.rollout.samples import EpisodeSamples
from r3async.tools.bench.jobs import job_main, progress
from r3async.tools.bench.replay_records import RolloutJob
from r3async.tools.bench.replay_rollouts import make_random_model, model_config

if TYPE_CHECKING:
    import torch
from r3async.transport.wire import encode_trajectory

MOVED = 0.02
"""Standard deviation of what is added to each weight, as a share of its matrix's own: about one version's drift."""
SUFFIX = 8
"""Tokens of the second prompt that the first turn has not seen."""


def make_moved_model(source: Path, target: Path, seed: int) -> None:
    """What an update might make of the model: every matrix a little moved."""
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


async def play(job: RolloutJob, directory: Path) -> list[tuple[Sample, Sample, int]]:
    """By prompt: the first turn's row, the branch's, and how many tokens they share."""
    import torch

    from r3async.weights.publish import Publisher

    rng = np.random.default_rng(job.seed)
    vocabulary, shared = model_config(job.model)["vocab_size"], job.prompt_tokens + job.new_tokens // 2
    prompts = rng.integers(0, vocabulary, (job.samples, job.prompt_tokens)).tolist()
    suffixes = rng.integers(0, vocabulary, (job.samples, SUFFIX)).tolist()
    engine = VllmEngine(
        job.model,
        dtype=job.dtype,
        concurrency=job.concurrency,
        max_model_len=shared + SUFFIX + job.new_tokens,
        engine_args={"seed": job.seed},
    )
    rows = [EpisodeSamples(engine.routing) for _ in prompts]

    async def turn(index: int, prompt: list[int]) -> list[int]:
        call = rows[index].begin(prompt)
        request = GenerationRequest(
            f"b{index}t{rows[index].turns}",
            np.asarray(prompt, np.int32),
            job.new_tokens,
            routes_from=call.routes_from,
            routes_version=call.routes_version,
        )
        generation = await engine.generate(request)
        rows[index].end(call, generation)
        return [*prompt, *generation.token_ids.tolist()]

    progress(directory, f"starting vLLM in {job.dtype}")
    await engine.start()
    try:
        with Publisher(directory) as publisher:
            await engine.install(publisher.publish(0, tensors(Path(job.model)), torch.float32), 60)
            progress(directory, f"{job.samples} first turns")
            seen = await asyncio.gather(*(turn(i, prompt) for i, prompt in enumerate(prompts)))
            await engine.install(publisher.publish(1, tensors(directory / "moved"), torch.float32), 60)
            progress(directory, f"{job.samples} branches under moved weights")
            await asyncio.gather(*(turn(i, [*s[:shared], *suffixes[i]]) for i, s in enumerate(seen)))
    finally:
        await engine.stop()
    built = [one.build(f"b{i}", 1.0)[0] for i, one in enumerate(rows)]
    return [(first, branch, shared) for first, branch in built]


def inheriting(first: Sample, branch: Sample, shared: int) -> Sample:
    """The branch as if the first turn's routes were its own, as far as the two have the same tokens."""
    routes, recorded = (branch.table[name].copy() for name in ("routed_experts", "routing_recorded"))
    routes[:shared], recorded[:shared] = (
        first.table["routed_experts"][:shared],
        first.table["routing_recorded"][:shared],
    )
    table = branch.table.with_columns(routed_experts=routes, routing_recorded=recorded)
    return Sample(branch.sample_id, table, branch.temperature)


def write(path: Path, samples: list[Sample]) -> None:
    """To be read by `replay_rollouts.read_samples`."""
    trajectories = [
        Trajectory(
            trajectory_id=s.sample_id,
            group_index=i,
            episode_index=0,
            task_seed=0,
            generator_id="bench",
            stop_reason="length",
            turns=[],
            samples=[s],
        )
        for i, s in enumerate(samples)
    ]
    path.write_bytes(msgspec.msgpack.encode([[bytes(f) for f in encode_trajectory(t)] for t in trajectories]))


def main(directory: Path) -> None:
    job = msgspec.json.decode((directory / "rollouts.json").read_bytes(), type=RolloutJob)
    assert job.random is not None
    progress(directory, "making the model, and a moved one")
    make_random_model(Path(job.model), job.random)
    make_moved_model(Path(job.model), directory / "moved", job.seed)
    played = asyncio.run(play(job, directory))
    write(directory / "first.bin", [first for first, _, _ in played])
    write(directory / "own.bin", [branch for _, branch, _ in played])
    write(directory / "inherited.bin", [inheriting(*one) for one in played])


if __name__ == "__main__":
    job_main(main)
