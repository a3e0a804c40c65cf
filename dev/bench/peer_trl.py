"""The peer of `bench e2e`: TRL's `GRPOTrainer` on the same model, tasks, rewards and
optimizer settings.

It runs with another Python (`--peer-python`), which has TRL, and imports nothing of r3async but the
environments. TRL is synchronous: a step generates with transformers, and then trains. Single-turn
episodes use TRL's own generation. Several turns use its `rollout_func`: all episodes of a batch
take each turn together, and their environments' answers are awaited together. That suits it better
than its own loop over tools, in which calls of different episodes come one after the other.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SEED_RANGE = 2**31


def main(directory: Path) -> None:
    """Train as `job.json` in the directory says; write `rows.jsonl`, with one line per step,
    and `done.json`."""
    job = json.loads((directory / "job.json").read_text())
    import torch

    if job["threads"]:
        torch.set_num_threads(job["threads"])
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trl = importlib.import_module("trl")
    datasets = importlib.import_module("datasets")
    model = AutoModelForCausalLM.from_pretrained(
        job["model"],
        dtype=torch.float32,
        attn_implementation="sdpa",
        experts_implementation=job["experts_implementation"],
    )
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    play = EpisodePlay(job, tokenizer)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=play.score_completions,
        args=trl_settings(job, directory, trl),
        train_dataset=datasets.Dataset.from_list(draw_tasks(job)),
        processing_class=tokenizer,
        rollout_func=play.play_batch if job["max_turns"] > 1 else None,
        callbacks=[_make_clock(transformers.TrainerCallback, directory / "rows.jsonl", play)],
    )
    trainer.train()
    versions = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (directory / "done.json").write_text(
        json.dumps({"threads": torch.get_num_threads(), "versions": versions})
    )


def trl_settings(job: dict[str, Any], directory: Path, trl: Any) -> Any:
    """Return settings for one on-policy update per step on the whole batch and nothing else: no
    checkpoints, reports, recomputed activations or second forward pass."""
    return trl.GRPOConfig(
        output_dir=str(directory / "trl"),
        max_steps=job["steps"],
        per_device_train_batch_size=job["groups"] * job["samples"],
        gradient_accumulation_steps=1,
        num_generations=job["samples"],
        max_completion_length=job["max_new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=job["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["warmup_steps"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        adam_epsilon=job["eps"],
        weight_decay=job["weight_decay"],
        max_grad_norm=job["max_grad_norm"],
        seed=job["seed"],
        shuffle_dataset=False,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def draw_tasks(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one task per group, no two alike. With several turns the prompt is the task's seed,
    which `rollout` plays."""
    import random

    rng = random.Random(job["seed"])
    seeds = [rng.randrange(SEED_RANGE) for _ in range(job["steps"] * job["groups"])]
    if job["max_turns"] > 1:
        return [
            {"prompt": [{"role": "user", "content": str(seed)}], "task_seed": seed}
            for seed in seeds
        ]

    async def ask_tasks() -> list[dict[str, Any]]:
        return [
            {"prompt": _plain_messages(await make_environment(job).reset(seed)), "task_seed": seed}
            for seed in seeds
        ]

    return asyncio.run(ask_tasks())


def make_environment(job: dict[str, Any]) -> Any:
    module, _, name = job["env"].partition(":")
    return getattr(importlib.import_module(module), name)(**job["env_args"])


class EpisodePlay:
    """The episodes of TRL's batches and their rewards; `mean` is the mean reward
    of the last batch."""

    def __init__(self, job: dict[str, Any], tokenizer: Any):
        self.job = job
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_token_id
        self.mean = 0.0
        self.tokens = 0

    def _make_action(self, ids: list[int]) -> Any:
        from r3async.envs import Action

        ended = bool(ids) and ids[-1] == self.end
        text = self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        return Action(text, "stop" if ended else "length")

    def score_completions(
        self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any
    ) -> list[float]:
        """Return the rewards, as TRL's reward function."""
        if "reward" in columns:  # of `rollout`
            rewards = list(columns["reward"])
        else:
            self.tokens += sum(map(len, completion_ids))
            rewards = asyncio.run(self._score_single_turn(columns["task_seed"], completion_ids))
        self.mean = sum(rewards) / len(rewards)
        return rewards

    async def _score_single_turn(
        self, seeds: list[int], completions: list[list[int]]
    ) -> list[float]:
        async def score_one(seed: int, ids: list[int]) -> float:
            env = make_environment(self.job)
            await env.reset(seed)
            return float((await env.step(self._make_action(ids))).reward)

        return await asyncio.gather(*map(score_one, seeds, completions))

    def play_batch(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play the episodes of a batch turn by turn, as TRL's `rollout_func`."""
        return asyncio.run(
            self._play_turns([int(prompt[-1]["content"]) for prompt in prompts], trainer)
        )

    async def _play_turns(self, seeds: list[int], trainer: Any) -> dict[str, Any]:
        envs = [make_environment(self.job) for _ in seeds]
        opened = await asyncio.gather(
            *(env.reset(seed) for env, seed in zip(envs, seeds, strict=True))
        )
        prompts = [self._encode_messages(messages) for messages in opened]
        answers: list[list[int]] = [[] for _ in seeds]
        masks: list[list[int]] = [[] for _ in seeds]
        rewards = [0.0] * len(seeds)
        playing = list(range(len(seeds)))
        for _ in range(self.job["max_turns"]):
            fed = [prompts[i] + answers[i] for i in playing]
            completions, _ = trainer._generate_single_turn(fed, None, {}, 1)
            for i, ids in zip(playing, completions, strict=True):
                answers[i] += ids
                masks[i] += [1] * len(ids)
                self.tokens += len(ids)
            actions = [self._make_action(ids) for ids in completions]
            results = await asyncio.gather(
                *(envs[i].step(a) for i, a in zip(playing, actions, strict=True))
            )
            unfinished = []
            for i, ids, result in zip(playing, completions, results, strict=True):
                rewards[i] += result.reward
                if not result.done:
                    seen = ([] if ids[-1] == self.end else [self.end]) + self._encode_messages(
                        result.messages
                    )
                    answers[i] += seen
                    masks[i] += [0] * len(seen)
                    unfinished.append(i)
            playing = unfinished
            if not playing:
                break
        return {
            "prompt_ids": prompts,
            "completion_ids": answers,
            "logprobs": None,
            "env_mask": masks,
            "reward": rewards,
        }

    def _encode_messages(self, messages: Any) -> list[int]:
        ids = self.tokenizer.apply_chat_template(
            _plain_messages(messages), add_generation_prompt=True, return_dict=False
        )
        return list(ids)


def _plain_messages(messages: Any) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


def _make_clock(base: Any, path: Path, play: EpisodePlay) -> Any:
    """Return a callback that writes, for each step, the time at which it ended, the CPU time so far
    and the reward of what it trained."""

    file = path.open("w", buffering=1)

    def write_row(_: Any, __: Any, state: Any, ___: Any, **rest: Any) -> None:
        row = {
            "step": state.global_step,
            "time": time.time(),
            "reward": play.mean,
            "tokens": play.tokens,
        }
        file.write(json.dumps(row | {"cpu": time.process_time()}) + "\n")

    return type("Clock", (base,), {"on_train_begin": write_row, "on_step_end": write_row})()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
