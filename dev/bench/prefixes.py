"""The benchmark `bench prefixes`: what sharing prefixes saves a learner, in rows fed forward and CPU time, by share of
the prompt.

It uses a random model of the size that a run makes, on CPU, with one thread. Each batch is trained with and without
sharing, in turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dev.bench.jobs import Say, table
from r3async.config import Config, InitConfig, load_config
from r3async.data.routes import route_dtype
from r3async.data.tokens import Sample, TokenTable

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend
    from r3async.learner.batch import MicroBatch

TOKENS = 100
"""Number of tokens of a sample."""


class Case(msgspec.Struct, frozen=True):
    """Cost of `groups` of `size` samples, of whose `tokens` tokens the first `prompt` are shared by their group, with
    and without sharing. CPU times are medians in milliseconds.

    Attributes:
        saved: rows not fed forward, as a share of all tokens.
        pack_ms: packing without sharing.
        pack_shared_ms: packing with sharing.
        plain_ms: forward and backward without sharing.
        shared_ms: forward and backward with sharing.
        ratio: total time with sharing over that without.
    """

    groups: int
    size: int
    prompt: int
    tokens: int
    saved: float
    pack_ms: float
    pack_shared_ms: float
    plain_ms: float
    shared_ms: float
    ratio: float


class Report(msgspec.Struct, frozen=True):
    benchmark: str
    repeats: int
    cases: list[Case]


def run(quick: bool, say: Say) -> Report:
    """Measure prompts of 10 to 90 % in groups of 8 and 16, and the batch of a one-turn step: 16 groups of 8, 10 of 19
    tokens."""
    shapes = [(16, 8, 10, 19)]
    shapes += [(32 // size, size, TOKENS * part // 10, TOKENS) for size in (8, 16) for part in (1, 3, 5, 7, 9)]
    shapes, repeats = (shapes[1:3], 2) if quick else (shapes, 9)
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        learner = made(Path(scratch))
        cases = []
        for shape in shapes:
            cases.append(measure(learner, shape, repeats))
            say(f"{shape[0]} groups of {shape[1]}, prompt {shape[2]} of {shape[3]}: {cases[-1].ratio:.2f}")
    return Report("prefixes", repeats, cases)


def made(directory: Path) -> LearnerBackend:
    from r3async.learner import build_learner
    from r3async.tools.init_model import build_byte_tokenizer, build_random_model

    config: Config = load_config("quickstart", ["learner.threads=1", "learner.recompute=none", "learner.dtype=float32"])
    build_random_model(InitConfig(), build_byte_tokenizer()).save_pretrained(directory)
    return build_learner(config, directory)


def measure(learner: LearnerBackend, shape: tuple[int, int, int, int], repeats: int) -> Case:
    from r3async.learner.batch import pack_samples

    samples = list(groups_of(learner, *shape))
    spent: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    packed: dict[bool, list[MicroBatch]] = {}
    for _ in range(repeats + 1):  # the first warms up
        for share in spent:
            began = time.process_time()
            packed[share] = pack_samples(samples, 2**14, share_prefixes=share)
            between = time.process_time()
            train(learner, packed[share])
            spent[share].append((between - began, time.process_time() - between))
    ms = {share: [1e3 * median(part) for part in zip(*of[1:], strict=True)] for share, of in spent.items()}
    return Case(
        *shape,
        saved=sum(m.num_shared_tokens for m in packed[True]) / sum(len(s.table) for s in samples),
        pack_ms=ms[False][0],
        pack_shared_ms=ms[True][0],
        plain_ms=ms[False][1],
        shared_ms=ms[True][1],
        ratio=sum(ms[True]) / sum(ms[False]),
    )


def groups_of(learner: LearnerBackend, groups: int, size: int, prompt: int, tokens: int) -> Iterator[Sample]:
    """Yield samples with random tokens and routes; everything after the prompt is trained."""
    rng, replay = np.random.default_rng(0), learner.replay

    def routes(rows: int) -> np.ndarray:
        order = np.argsort(rng.random((rows, replay.num_moe_layers, replay.num_experts)), axis=-1)
        return order[..., : replay.top_k].astype(route_dtype(replay.num_experts))

    for group in range(groups):
        start, chosen = rng.integers(0, learner.vocab_size, prompt), routes(prompt)
        for member in range(size):
            ids = np.concatenate([start, rng.integers(0, learner.vocab_size, tokens - prompt)])
            rows = TokenTable.from_tokens(ids).with_columns(
                loss_mask=np.arange(tokens) >= prompt,
                routed_experts=np.concatenate([chosen, routes(tokens - prompt)]),
                routing_recorded=np.ones(tokens, bool),
            )
            yield Sample(f"g{group}e{member}", rows)


def train(learner: LearnerBackend, micro_batches: Sequence[MicroBatch]) -> None:
    """Run forward and backward of all micro-batches, without an update."""
    rows = [np.flatnonzero(m.table["loss_mask"]) for m in micro_batches]
    learner.run_micro_batches(micro_batches, rows, lambda _, logprobs, entropies: -logprobs.mean(), backward=True)
    learner.abort_step()


def render(report: Report) -> str:
    """Format the report as a table for people."""
    rows = [
        (
            f"{c.groups} x {c.size}",
            f"{c.prompt} of {c.tokens}",
            f"{c.saved:.0%}",
            f"{c.pack_ms:.1f} / {c.pack_shared_ms:.1f}",
            f"{c.plain_ms:.0f} / {c.shared_ms:.0f}",
            f"{c.ratio:.2f}",
        )
        for c in report.cases
    ]
    heads = ("groups", "prompt", "rows saved", "CPU ms to pack", "CPU ms forward and backward", "shared / plain")
    return "\n".join(table(heads, rows))
