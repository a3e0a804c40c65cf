"""Gated-delta-net layers on packed samples: ours beside the layouts that transformers' rule allows.

Forward and backward pass in float32 on the CPU, of one layer of a tiny Qwen3.5-MoE, and of the
whole model with its optimizer's step. The ways take turns:

* `alone`: the layer is called once for each sample, with transformers' rule;
* `rows`: once for each bucket of samples of similar length, padded on the right (`plan_buckets`);
* `packed`: once, with the rule and the convolution of this package.

All else is packed in every way. It is no part of the tests:

    python -m dev.bench.gated_delta --threads 1,2 --repeats 5 --lengths quickstart

Without `--lengths`, four distributions take turns; `quickstart` has the lengths of the oracle's
episodes in the preset's game, one step of them. Each line of JSON has the median and the least CPU
time of a way in ms, of all threads, and the ratio of its least to that of `alone`. `--profile`
prints instead where the time of `packed` goes.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig

from r3async import load_config
from r3async.envs.factory import build_environment_factory
from r3async.learner.packed_attention import plan_attention, plan_buckets
from r3async.learner.torch.model import ATTENTION_NAME
from r3async.learner.torch.packed_delta_net import use_packed_delta_rule
from r3async.rollout.renderer import ChatRenderer
from r3async.tools.init_model import OracleDemonstrations, build_byte_tokenizer

VOCABULARY = 264
Samples = list[np.ndarray]


def build_model(hidden: int) -> Any:
    """Build a model of the quickstart's size, with the head sizes that vLLM's CPU kernel has."""
    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )


def draw_lengths() -> dict[str, np.ndarray]:
    game = load_config("quickstart", [])
    factory = build_environment_factory(game.env)
    oracle = OracleDemonstrations(factory, ChatRenderer(build_byte_tokenizer()), 0)
    episodes = oracle.make_batch(game.schedule.prompts_per_step * game.schedule.group_size)
    return {
        "quickstart": np.array([len(sample.table) for sample in episodes]),
        "64 of 5..60": np.random.default_rng(2).integers(5, 61, 64),
        "8 of 200..260": np.random.default_rng(1).integers(200, 261, 8),
        "32 of 20..400": np.random.default_rng(0).integers(20, 401, 32),
    }


@contextmanager
def relay_layers(layers: list[nn.Module], lengths: np.ndarray, groups: Samples) -> Iterator[None]:
    """Call the layers on rows, one for each sample of a group, inside this block."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    rows = []
    for group in groups:
        at = np.arange(lengths[group].max())
        rows.append(
            torch.from_numpy(starts[group, None] + np.minimum(at, lengths[group, None] - 1))
        )
    back = np.empty(ends[-1], np.int64)
    base = 0
    for group, index in zip(groups, rows, strict=True):
        for j, sample in enumerate(group):
            first = base + j * index.shape[1]
            back[starts[sample] : ends[sample]] = first + np.arange(lengths[sample])
        base += index.numel()
    slots = torch.from_numpy(back)

    def lay_out_rows(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, **_: Any) -> Tensor:
            outs = [own(hidden_states[0][index]).flatten(0, 1) for index in rows]
            return torch.cat(outs)[slots][None]

        return forward

    for layer in layers:
        layer.forward = lay_out_rows(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def time_ways(
    model: Any, lengths: np.ndarray, repeats: int, run: Callable[..., None]
) -> dict[str, list[float]]:
    """Return the seconds of each way in each repeat, after one that does not count."""
    layers = use_packed_delta_rule(model)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    ways = {
        "alone": [np.array([sample]) for sample in range(len(lengths))],
        "rows": plan_buckets(lengths),
        "packed": None,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, groups in ways.items():
            started = time.process_time()
            # A plan is made once per micro-batch, so its time counts.
            plan = plan_attention(cu_seqlens, torch.device("cpu"))
            if groups is None:
                run(plan)
            else:
                with relay_layers(layers, lengths, groups):
                    run(plan)
            if repeat:
                seconds[name].append(time.process_time() - started)
    return seconds


def build_runs(model: Any, lengths: np.ndarray) -> dict[str, Callable[..., None]]:
    """Return the passes that are timed, by name."""
    total = int(lengths.sum())
    hidden = torch.randn(1, total, model.config.hidden_size, requires_grad=True)
    ids = torch.randint(VOCABULARY, (1, total))
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run_layer(plan: Any) -> None:
        layer = use_packed_delta_rule(model)[0]
        layer(hidden_states=hidden, attention_plan=plan).square().sum().backward()

    def run_step(plan: Any) -> None:
        out = model(ids, position_ids=positions, attention_plan=plan, use_cache=False)
        out.logits[0].log_softmax(-1).gather(1, ids[0, :, None]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"layer": run_layer, "step": run_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--lengths")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    model = build_model(args.hidden)
    use_packed_delta_rule(model)
    for threads in map(int, args.threads.split(",")):
        torch.set_num_threads(threads)
        for name, lengths in draw_lengths().items():
            if args.lengths not in (None, name):
                continue
            for what, run in build_runs(model, lengths).items():
                if args.profile:
                    print_profile(f"{name}, {what}", lengths, run)
                    continue
                seconds = time_ways(model, lengths, args.repeats, run)
                least = {way: min(times) for way, times in seconds.items()}
                row: dict[str, Any] = {"threads": threads, "lengths": name, "what": what}
                for way, times in seconds.items():
                    row[way] = [round(1e3 * median(times), 1), round(1e3 * least[way], 1)]
                row["rows_ratio"] = round(least["rows"] / least["alone"], 3)
                row["packed_ratio"] = round(least["packed"] / least["alone"], 3)
                print(json.dumps(row), flush=True)


def print_profile(title: str, lengths: np.ndarray, run: Callable[..., None]) -> None:
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    run(plan_attention(cu_seqlens, torch.device("cpu")))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(plan_attention(cu_seqlens, torch.device("cpu")))
    print(title)
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


if __name__ == "__main__":
    main()
