"""The pipeline's parts alone, for `bench e2e`: a bare `AsyncLLM` that plays a run's tasks, and a bare training loop.

The training loop does forward, backward and optimizer steps on what the engine played. Each part is a separate job.
Both use the run's settings and nothing but the model: no environment, chat template, validation, transport, publication
or metrics. Whatever they need of these is prepared before the measurement or done after it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil

from dev.bench.jobs import progress
from r3async.config import Config, config_from_dict
from r3async.data.models import read_moe_layers
from r3async.data.tokens import Sample, Trajectory, Turn, format_trajectory_id
from r3async.data.versions import VersionSpan
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.learner.batch import MicroBatch, build_cost_model
from r3async.rollout.engine import Generation
from r3async.rollout.samples import SampleBuilder

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend
    from r3async.learner.trainer import Trainer

WARM_UP = 2
"""Number of leading batches that are not measured."""
EPISODES = "episodes.bin"


class Job(msgspec.Struct, frozen=True):
    """The input of both jobs: the run's configuration `config`, with the model's path, and the number of steps' worth
    of episodes to measure, `batches`."""

    config: dict[str, Any]
    batches: int


class Engine(msgspec.Struct, frozen=True):
    """CPU and wall seconds of the measured episodes, and the number of `tokens` sampled in them."""

    tokens: int
    cpu_seconds: float
    seconds: float


class Learner(msgspec.Struct, frozen=True):
    """CPU seconds that the bare loop and the trainer took for the same batches.

    Attributes:
        tokens: trained tokens of these batches.
        bare_cpu_seconds: forward with replay, backward and optimizer of packed micro-batches alone.
        trainer_cpu_seconds: the trainer's whole step, including planning, packing and metrics.
    """

    tokens: int
    bare_cpu_seconds: float
    trainer_cpu_seconds: float


def write(path: Path, trajectories: Iterable[Trajectory]) -> None:
    path.write_bytes(msgspec.msgpack.encode([[bytes(frame) for frame in encode_trajectory(t)] for t in trajectories]))


# -- the engine --------------------------------------------------------------------------------------------------------

Task = list[list[int]]
"""Token ids before each answer: the first prompt, then the environment's messages between two answers."""
Answers = list[Any]
"""The vLLM outputs of an episode, one per turn."""


def play(job: Job, directory: Path) -> Engine:
    """Run the engine's job, and write its episodes for `train`."""
    config = config_from_dict(job.config)
    group, step = config.schedule.group_size, config.schedule.prompts_per_step
    tasks = asyncio.run(read_tasks(config, (job.batches + WARM_UP) * step))
    progress(directory, "bare engine: starting vLLM")
    engine, episodes = asyncio.run(play_all(config, tasks, WARM_UP * step * group))
    write(directory / EPISODES, recorded(config, episodes))
    return engine


async def read_tasks(config: Config, groups: int) -> list[Task]:
    """Return the encoded environment messages of each task. Environments' messages must not depend on the answers."""
    from r3async.envs import Action
    from r3async.envs.factory import build_environment_factory

    tokenizer, factory = tokenizer_of(config), build_environment_factory(config.env)

    def encoded(messages: Sequence[Any]) -> list[int]:
        plain = [{"role": m.role, "content": m.content} for m in messages]
        return list(tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False))

    tasks = []
    for seed in range(groups):
        env: Any = factory()
        said = [encoded(await env.reset(config.seed * 1_000_003 + seed))]
        while not (result := await env.step(Action(""))).done:
            said.append(encoded(result.messages))
        tasks.append(said)
    return tasks


async def play_all(config: Config, tasks: Sequence[Task], warm_up: int) -> tuple[Engine, list[tuple[Task, Answers]]]:
    """Play all episodes of all groups, as many at once as the run has places. The first `warm_up` are not measured."""
    llm, params, end = bare_llm(config)
    places = asyncio.Semaphore(config.generator.concurrency)
    players = [(task, f"{n}-{k}") for n, task in enumerate(tasks) for k in range(config.schedule.group_size)]

    async def one(task: Task, name: str) -> tuple[Task, Answers]:
        async with places:
            fed: list[int] = []
            known, outputs = 0, list[Any]()
            for turn, said in enumerate(task):
                fed = fed + ([end] if turn and fed[-1] != end else []) + said
                answers = llm.generate({"prompt_token_ids": fed}, params(known), f"{name}-{turn}")
                outputs += [output async for output in answers]  # one: the final output
                fed = fed + list(outputs[-1].outputs[0].token_ids)
                known = len(fed) - 1  # the last token has not been fed
            return task, outputs

    try:
        await asyncio.gather(*(one(*player) for player in players[:warm_up]))
        began, cpu = time.perf_counter(), cpu_seconds()
        played = await asyncio.gather(*(one(*player) for player in players[warm_up:]))
        seconds, spent = time.perf_counter() - began, cpu_seconds() - cpu
    finally:
        llm.shutdown()
    tokens = sum(len(output.outputs[0].token_ids) for _, outputs in played for output in outputs)
    return Engine(tokens, spent, seconds), list(played)


def bare_llm(config: Config) -> tuple[Any, Any, int]:
    """Return an `AsyncLLM` with the arguments of the run's engine, a function that makes sampling parameters from the
    first position whose routes are wanted, and the id of the token that ends an answer."""
    from r3async.rollout import build_engine

    ours: Any = build_engine(config, config.model.path, config.seed)
    os.environ |= {
        "OMP_NUM_THREADS": str(config.generator.threads),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from r3async.rollout.vllm.client import is_cpu_vllm
    from r3async.rollout.vllm.core import CPU_BLOCK_TOKENS

    arguments = {k: v for k, v in ours._args.items() if k != "worker_extension_cls"}
    arguments["disable_log_stats"] = True
    arguments.setdefault("kv_cache_memory_bytes", int(config.generator.kv_cache_gib * 2**30))
    if is_cpu_vllm():
        arguments.setdefault("block_size", CPU_BLOCK_TOKENS)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    end = tokenizer_of(config).eos_token_id

    def params(known: int) -> Any:
        return vllm.SamplingParams(
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=[end],
            max_tokens=config.episode.max_new_tokens,
            temperature=config.episode.temperature,
            logprobs=0,
            flat_logprobs=True,
            routed_experts_prompt_start=known,
        )

    return llm, params, end


def tokenizer_of(config: Config) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model.path)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(p.cpu_times().user + p.cpu_times().system for p in processes)


def recorded(config: Config, episodes: Sequence[tuple[Task, Answers]]) -> Iterator[Trajectory]:
    """Yield the episodes as trajectories with random rewards, so that every one of them gives something to learn."""
    shape, _ = read_moe_layers(msgspec.json.decode((Path(config.model.path) / "config.json").read_bytes()))
    group, rng = config.schedule.group_size, np.random.default_rng(config.seed)
    end = tokenizer_of(config).eos_token_id
    for number, (task, outputs) in enumerate(episodes):
        builder, turns = SampleBuilder(shape), []
        for index, (said, output) in enumerate(zip(task, outputs, strict=True)):
            ended = not len(builder) or builder.token_ids[-1] == end
            builder.append_context(([] if ended else [end]) + said)
            answer = output.outputs[0]
            generation = Generation(
                token_ids=np.asarray(answer.token_ids, np.int32),
                logprobs=np.asarray(answer.logprobs.logprobs, np.float32),
                version_spans=[VersionSpan(0, 0, len(answer.token_ids))],
                routed_experts=None if shape is None else answer.routed_experts,
                routes_from=builder.routes_from,
                stop_reason=answer.finish_reason,
            )
            start, stop = builder.append_answer(index, generation)
            turns.append(Turn(index, 0, start, stop, float(rng.random()), answer.finish_reason))
            builder.add_reward(stop - 1, turns[-1].reward)
        name = format_trajectory_id(number // group, number % group)
        yield Trajectory(
            trajectory_id=name,
            group_index=number // group,
            episode_index=number % group,
            task_seed=number // group,
            generator_id="bench",
            stop_reason="env_done",
            turns=turns,
            samples=[Sample(f"{name}s0", builder.build_table())],
        )


# -- the learner -------------------------------------------------------------------------------------------------------


class _NoTrace:
    """A `RouteTracer` that traces nothing."""

    def should_trace(self, samples: Sequence[Sample], /) -> bool:
        return False

    def write_trace(self, step: int, samples: Sequence[Sample], result: Any, /) -> None:
        pass


def train(job: Job, directory: Path) -> Learner:
    """Run the learner's job on what `play` wrote: train each batch with the bare loop and with the trainer, in
    turns."""
    from r3async.actors.ranks import LocalRank
    from r3async.learner import build_learner
    from r3async.learner.trainer import Trainer

    config = config_from_dict(job.config)
    model = Path(config.model.path)
    cost = build_cost_model(msgspec.json.decode((model / "config.json").read_bytes()))
    batches = list(batches_of(config, directory / EPISODES))
    backend = build_learner(config, model)
    trainer = Trainer(config, cost, LocalRank(config, backend), _NoTrace(), None, lambda t: t)
    spent: dict[str, list[float]] = {"bare": [], "trainer": []}
    tokens = 0
    for number, groups in enumerate(batches):
        progress(directory, f"bare learner: batch {number + 1} of {len(batches)}")
        packed = trainer.prepare_step(groups).micro_batches
        steps: dict[str, partial[Any]] = {
            "bare": partial(bare_step, backend, packed),
            "trainer": partial(whole_step, trainer, number, groups),
        }
        for name in sorted(steps, reverse=number % 2 == 0):
            gc.collect()
            began = time.process_time()
            steps[name]()
            spent[name].append(time.process_time() - began)
        if number >= WARM_UP:
            tokens += sum(int(m.table["loss_mask"].sum()) for ranks in packed for ms in ranks for m in ms)
    measured = {name: sum(seconds[WARM_UP:]) for name, seconds in spent.items()}
    backend.close()
    return Learner(tokens, measured["bare"], measured["trainer"])


def batches_of(config: Config, path: Path) -> Iterator[list[list[Trajectory]]]:
    """Yield the groups of each step."""
    encoded = msgspec.msgpack.decode(path.read_bytes(), type=list[list[bytes]])
    played = [decode_trajectory(frames) for frames in encoded]
    size, count = config.schedule.group_size, config.schedule.prompts_per_step
    groups = [played[i : i + size] for i in range(0, len(played), size)]
    return (groups[i : i + count] for i in range(0, len(groups) - count + 1, count))


def whole_step(trainer: Trainer, number: int, groups: Sequence[Sequence[Trajectory]]) -> None:
    """Run everything that a run's learner does for one step, one part after the other."""
    trainer.train_step(number + 1, number, trainer.prepare_step(groups))


def bare_step(backend: LearnerBackend, packed: Sequence[Sequence[Sequence[MicroBatch]]]) -> None:
    """Run, for each minibatch, a forward pass with the recorded routes, the simplest loss, backward and an optimizer
    step."""
    import torch

    for (micro_batches,) in packed:
        rows = [np.flatnonzero(m.table["loss_mask"]) for m in micro_batches]

        def loss(index: int, logprobs: Any, _: Any, rows: Any = rows, micro_batches: Any = micro_batches) -> Any:
            table, at = micro_batches[index].table, rows[index]
            weights = torch.from_numpy(table["advantages"][at] * table["loss_weights"][at])
            return -(weights * (logprobs - torch.from_numpy(table["rollout_logprobs"][at])).exp()).sum()

        backend.run_micro_batches(micro_batches, rows, loss, backward=True)
        backend.optimizer.step()
        backend.replay.pop_counts()
