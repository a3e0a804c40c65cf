"""The benchmark `bench sampling`: how far the learner's log-probs are from vLLM's, with sampling from all tokens and by
top-p.

With top-p, they are compared with and without the mask of what could be sampled. Engine and learner have one model,
with random weights, a vocabulary as large as real ones, and logits as spread as those of a trained model. A remaining
difference comes from arithmetic or from the mask.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from dev.bench.jobs import BenchError, Say, progress, run_job, table
from dev.bench.replay_report import LearnerJob, k3
from r3async.data.supports import SupportSets
from r3async.data.tokens import Sample, Trajectory, Turn

TIMEOUT = 1200.0
LOGIT_STD = 8.0
"""Standard deviation of a random model's logits."""


class SamplingJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that continues `samples` random prompts by `new_tokens` tokens each, sampled from all tokens and by
    `top_p`, in `dtype`."""

    model: str = ""
    seed: int = 0
    vocab_size: int = 32_768
    hidden_size: int = 128
    layers: int = 8
    experts: int = 16
    top_k: int = 4
    samples: int = 32
    prompt_tokens: int = 32
    new_tokens: int = 96
    top_p: float = 0.95
    dtype: str = "bfloat16"


class Sampled(msgspec.Struct, frozen=True):
    """The size of the recorded supports per sampled token: `support_tokens`, and `support_bytes` on the wire."""

    support_tokens: float
    support_bytes: float


class Difference(msgspec.Struct, frozen=True):
    """Differences of the log-probs of sampled tokens, learner less engine. `k3` estimates KL(engine ‖ learner), in nats
    per token."""

    k3: float
    mean: float
    mean_abs: float
    p99_abs: float
    tokens: int


class Scored(msgspec.Struct, frozen=True):
    """The differences of one seed.

    Attributes:
        whole: all tokens could be sampled.
        masked: top-p, with log-probs over the recorded supports.
        unmasked: the same tokens without supports.
    """

    whole: Difference
    masked: Difference
    unmasked: Difference


class Seed(msgspec.Struct, frozen=True):
    seed: int
    sampled: Sampled
    scored: Scored


class Report(msgspec.Struct, frozen=True):
    """The report of `bench sampling`. Means are over seeds."""

    benchmark: str
    job: SamplingJob
    seeds: list[Seed]
    k3_whole: float
    k3_masked: float
    k3_unmasked: float
    support_bytes: float
    support_tokens: float


def plan(quick: bool) -> SamplingJob:
    return SamplingJob(samples=4, new_tokens=12, vocab_size=2048, layers=2) if quick else SamplingJob()


def run(seeds: Sequence[int], quick: bool, say: Say) -> Report:
    """Sample and score for each seed, which is that of model, prompts and sampling."""
    done = []
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        for seed in seeds:
            directory = Path(scratch) / f"seed{seed}"
            job = msgspec.structs.replace(plan(quick), seed=seed, model=str(directory / "model"))
            sampled = run_job(f"{__name__}:sample", job, Sampled, directory, timeout=TIMEOUT, say=say)
            scored = run_job(f"{__name__}:score", job, Scored, directory, timeout=TIMEOUT, say=say)
            done.append(Seed(seed, sampled, scored))
    return Report(
        "sampling",
        plan(quick),
        done,
        k3_whole=float(np.mean([d.scored.whole.k3 for d in done])),
        k3_masked=float(np.mean([d.scored.masked.k3 for d in done])),
        k3_unmasked=float(np.mean([d.scored.unmasked.k3 for d in done])),
        support_bytes=float(np.mean([d.sampled.support_bytes for d in done])),
        support_tokens=float(np.mean([d.sampled.support_tokens for d in done])),
    )


def render(report: Report) -> str:
    job, rows = report.job, []
    for done in report.seeds:
        for name, d in (
            ("all tokens", done.scored.whole),
            (f"top-p {job.top_p:g}, mask", done.scored.masked),
            (f"top-p {job.top_p:g}, no mask", done.scored.unmasked),
        ):
            rows.append(
                (f"{done.seed}: {name}", f"{d.k3:.3g}", f"{d.mean:.3g}", f"{d.mean_abs:.3g}", f"{d.p99_abs:.3g}")
            )
    return "\n".join(
        [
            f"vLLM and Megatron in {job.dtype}, {job.samples} x {job.new_tokens} tokens of {job.vocab_size:,}",
            *table(("seed: sampled from", "k3", "mean", "mean abs", "p99 abs"), rows),
            f"mean k3: {report.k3_whole:.3g} all tokens, {report.k3_masked:.3g} with the mask, "
            f"{report.k3_unmasked:.3g} without",
            f"a support has {report.support_tokens:.1f} tokens and takes {report.support_bytes:.1f} bytes",
        ]
    )


# -- jobs --------------------------------------------------------------------------------------------------------------


def make_model(job: SamplingJob) -> None:
    """Write a Qwen3-MoE. Its hidden states have length sqrt(hidden_size); that and the output matrix spread the
    logits."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(job.seed)
    config = Qwen3MoeConfig(
        vocab_size=job.vocab_size,
        hidden_size=job.hidden_size,
        intermediate_size=2 * job.hidden_size,
        moe_intermediate_size=job.hidden_size // 2,
        num_hidden_layers=job.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=job.hidden_size // 4,
        num_experts=job.experts,
        num_experts_per_tok=job.top_k,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.1 if name.endswith("mlp.gate.weight") else 0.08)
        model.lm_head.weight.normal_(0, LOGIT_STD / job.hidden_size**0.5)
    model.save_pretrained(job.model)


def sample(job: SamplingJob, directory: Path) -> Sampled:
    """Run the engine's job, and write `whole.bin` and `masked.bin`."""
    progress(directory, "making the model")
    make_model(job)
    return asyncio.run(_play(job, directory))


async def _play(job: SamplingJob, directory: Path) -> Sampled:
    from dev.bench.replay_rollouts import trajectory_of, write
    from r3async.rollout.engine import GenerationRequest
    from r3async.rollout.samples import SampleBuilder
    from r3async.rollout.vllm.engine import VllmEngine

    engine = VllmEngine(
        job.model,
        dtype=job.dtype,
        concurrency=job.samples,
        max_model_len=job.prompt_tokens + job.new_tokens,
        kv_cache_gib=0.5,
        record_sampling_masks=True,
        engine_args={"seed": job.seed},
    )
    rng = np.random.default_rng(job.seed)
    prompts = rng.integers(0, job.vocab_size, (job.samples, job.prompt_tokens)).astype(np.int32)

    async def one(index: int, top_p: float) -> tuple[Trajectory, SupportSets | None]:
        name = f"s{index:04d}"
        builder = SampleBuilder(engine.routing, with_supports=top_p < 1)
        builder.append_context(prompts[index])
        request = GenerationRequest(name, prompts[index], job.new_tokens, top_p=top_p, needs_sampling_mask=top_p < 1)
        answer = await engine.generate(request)
        start, stop = builder.append_answer(0, answer)
        turn = Turn(0, 0, start, stop, 0.0, answer.stop_reason)
        return trajectory_of(Sample(name, builder.build_table()), index, job.seed, [turn]), answer.supports

    progress(directory, f"starting vLLM in {job.dtype}")
    try:
        await engine.start()
        progress(directory, "sampling from all tokens")
        whole = await asyncio.gather(*(one(i, 1.0) for i in range(job.samples)))
        progress(directory, f"sampling by top-p {job.top_p:g}")
        masked = await asyncio.gather(*(one(i, job.top_p) for i in range(job.samples)))
    finally:
        await engine.stop()
    write(directory / "whole.bin", [t for t, _ in whole])
    write(directory / "masked.bin", [t for t, _ in masked])
    supports = [s for _, s in masked if s is not None]
    tokens = sum(map(len, supports))
    return Sampled(
        support_tokens=sum(int(s.to_dense_mask(job.vocab_size).sum()) for s in supports) / tokens,
        support_bytes=sum(len(s.encode()) for s in supports) / tokens,
    )


def score(job: SamplingJob, directory: Path) -> Scored:
    """Run the learner's job on what `sample` wrote. Routes are replayed."""
    from dev.bench.replay_learner import deltas, learner_of
    from dev.bench.replay_rollouts import read_samples
    from r3async.learner.batch import pack_samples

    whole, masked = (read_samples(directory / f"{name}.bin") for name in ("whole", "masked"))
    if not all("support" in s.table for s in masked):
        raise BenchError("the engine recorded no supports")
    unmasked = [Sample(s.sample_id, s.table.without_columns("support"), s.temperature) for s in masked]
    asked = LearnerJob(model=job.model, seed=job.seed)
    progress(directory, f"learner in {job.dtype}")
    with learner_of(asked, job.dtype, "rollout") as learner:
        differences = []
        for samples in (whole, masked, unmasked):
            delta = deltas(learner, pack_samples(samples, asked.max_tokens_per_micro_batch), replay=True)
            size = np.abs(delta)
            p99 = float(np.quantile(size, 0.99))
            differences.append(Difference(k3(delta), float(delta.mean()), float(size.mean()), p99, len(delta)))
    return Scored(*differences)
