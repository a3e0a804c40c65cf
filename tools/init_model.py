"""Make a tiny Qwen3-MoE as a start model, with a byte-level tokenizer, warmed up on the
environment's oracle.

The warm-up is supervised, and short on purpose: it teaches the format of the game and little of the
skill, so that reinforcement learning has rewards to learn from and most of the way still to go.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

import r3async.learner
from r3async.actors.process import RunFailed
from r3async.config import (
    Config,
    ConfigError,
    InitConfig,
    InitShape,
    LearnerConfig,
    config_from_dict,
    config_to_dict,
    resolve_envs,
)
from r3async.config.learner import RoutingConfig
from r3async.data.tokens import Sample
from r3async.envs import Action, Environment, EnvironmentFactory, HasOracle
from r3async.envs.builtin import ReverseText
from r3async.envs.errors import summarize_error
from r3async.envs.factory import BUILTIN_ENVIRONMENTS, build_environment_factory
from r3async.envs.passed_objects import get_registered_objects, register_objects
from r3async.envs.returned import coerce_messages
from r3async.envs.seeding import seed_global_generators
from r3async.envs.task_splits import is_dataset
from r3async.rollout.conversation import Conversation
from r3async.rollout.demonstrations import Demonstration
from r3async.rollout.renderer import ChatRenderer
from r3async.world.files import replace_directory
from r3async.world.kept_programs import exit_with_owner
from r3async.world.processes import add_user_module_path, hide_main_module, run_on_shared_loop

from .local_cache import find_cache_directory, list_package_versions

if TYPE_CHECKING:
    from r3async.learner.torch.backend import TorchLearner

# Only answers have an end token. With one after every message, a model of this size takes four
# times as many steps to learn.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' "
    "%}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
ROUTER_STD = 0.1
"""Standard deviation of the router weights: five times that of others, so that routers have a
preference from the start."""
WARMUP_LR = 1e-3
WARMUP_BATCH_EPISODES = 64
"""Episodes per supervised step."""
WARMUP_MICRO_BATCH_TOKENS = 16384
"""Maximum tokens of a micro-batch."""
MAX_CONSECUTIVE_FAILURES = 8
EVALUATION_EPISODES = 64
"""Episodes per evaluation."""
DIGEST_FILE = "digest"
EVALUATE_EVERY = 10
EVALUATION_INTERVALS = ((0.75, 2), (0.5, 4), (0.0, EVALUATE_EVERY))
"""Steps until the next evaluation, from a share of the target reward on; an evaluation costs as
much as two steps."""

ShowProgress = Callable[[str], object]
MakeModel = Callable[[Path, Config, ShowProgress], object]


def build_byte_tokenizer() -> Any:
    """Build a transformers tokenizer of 256 byte symbols and the special tokens, without merges:
    one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS[2:],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_random_model(init: InitConfig, tokenizer: Any, shape: InitShape | None = None) -> Any:
    """Build a `Qwen3MoeForCausalLM` in float32 with random weights, by default of the shape of
    `init`; equal seeds give equal weights."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(init.seed)
    config = Qwen3MoeConfig(
        **(shape or init.shape).build_model_config(-(-len(tokenizer) // 8) * 8, init.rope_theta),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.normal_(0, ROUTER_STD)
    return model


class OracleDemonstrations:
    """A source of episodes played by the environment's own oracle."""

    def __init__(
        self,
        factory: EnvironmentFactory,
        renderer: ChatRenderer,
        seed: int,
        progress: ShowProgress = lambda line: None,
    ):
        env = factory()
        if not isinstance(env, HasOracle):
            raise ConfigError(
                f"{type(env).__name__} has no oracle() to warm a new model up with: give a trained "
                "one with model.path"
            )
        self._factory = factory
        self._renderer = renderer
        self._rng = random.Random(f"warm-up {seed}")
        self._progress = progress
        self._reported = set[str]()

    async def _play_episode(self) -> tuple[Demonstration, list[tuple[list[int], Environment, int]]]:
        """Play an episode to its end.

        The user's code may raise on some tasks, as in training; another task is played then. Raises
        the error with which `MAX_CONSECUTIVE_FAILURES` tasks failed.
        """
        for failed in range(1, MAX_CONSECUTIVE_FAILURES + 1):
            try:
                return await self._try_episode()
            except ConfigError:
                raise
            except Exception as error:
                self._report_error(error)
                if failed == MAX_CONSECUTIVE_FAILURES:
                    raise RunFailed(
                        f"{failed} tasks in a row failed while the new model was warmed up: "
                        f"{summarize_error(error).line}"
                    ) from error
        raise AssertionError

    def _report_error(self, error: Exception) -> None:
        """Report each distinct error once."""
        line = summarize_error(error).line
        if line not in self._reported:
            self._reported.add(line)
            self._progress(f"the warm-up leaves a task out: {line}")

    async def _try_episode(self) -> tuple[Demonstration, list[tuple[list[int], Environment, int]]]:
        task_seed = self._rng.getrandbits(63)
        seed_global_generators(task_seed)
        env: Any = self._factory()
        messages = coerce_messages(await env.reset(task_seed), "reset()")
        conversation = Conversation(self._renderer, messages, getattr(env, "tools", ()))
        demonstration = Demonstration()
        turns = []
        while True:
            prompt = conversation.build_prompt().token_ids.tolist()
            answer = env.oracle()
            encoded = [*self._renderer.encode(answer), self._renderer.eos_token_id]
            demonstration.add_turn(prompt, encoded)
            turns.append(
                (demonstration.rows[-1][0][: -len(encoded)], copy.deepcopy(env), len(encoded))
            )
            conversation.add_answer(encoded)
            result = await env.step(Action(answer))
            if result.done:
                return demonstration, turns
            messages = coerce_messages(result.messages, "StepResult.messages")
            (conversation.replace_messages if result.rewrites else conversation.add_messages)(
                messages
            )

    def make_batch(self, size: int) -> list[Sample]:
        """Play `size` episodes; each gives one sample, or more where history was rewritten."""

        async def play() -> list[Sample]:
            return [
                s
                for i in range(size)
                for s in (await self._play_episode())[0].build_samples(str(i))
            ]

        return run_on_shared_loop(play())

    def measure_reward(self, model: Any, episodes: int) -> float:
        """Return the mean reward of answers *sampled* at temperature 1 in every turn.

        In the turns before, the answers are the oracle's.
        """
        import torch

        async def prompts() -> list[tuple[list[int], Environment, int]]:
            return [turn for _ in range(episodes) for turn in (await self._play_episode())[1]]

        turns = run_on_shared_loop(prompts())
        pad = self._renderer.tokenizer.pad_token_id
        width = max(len(ids) for ids, _, _ in turns)
        tokens = torch.full((len(turns), width), pad)
        attention = torch.zeros((len(turns), width), dtype=torch.long)
        for row, (ids, _, _) in enumerate(turns):
            tokens[row, width - len(ids) :] = torch.tensor(ids)
            attention[row, width - len(ids) :] = 1
        with torch.no_grad():
            out = model.generate(
                tokens,
                attention_mask=attention,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=2 * max(length for _, _, length in turns),
                pad_token_id=pad,
                eos_token_id=self._renderer.eos_token_id,
            )

        async def score() -> list[float]:
            rewards = []
            for (_, env, _), row in zip(turns, out[:, width:].tolist(), strict=True):
                ended = self._renderer.eos_token_id in row
                answer = row[: row.index(self._renderer.eos_token_id)] if ended else row
                text = self._renderer.decode_answer(answer)
                try:
                    rewards.append(
                        (await env.step(Action(text, "stop" if ended else "length"))).reward
                    )
                except Exception as error:
                    # Raised by the user's environment for the model's answer.
                    self._report_error(error)
            return rewards

        return sum(run_on_shared_loop(score())) / episodes


def warm_up_model(
    learner: TorchLearner, data: OracleDemonstrations, init: InitConfig, progress: ShowProgress
) -> tuple[int, float]:
    """Train supervised steps until the mean sampled reward is `init.warm_reward`. Returns steps
    and reward reached."""
    from r3async.learner.micro_batches import pack_samples
    from r3async.learner.supervised import run_supervised_step

    def sampled_reward() -> float:
        model = learner.model.causal_lm
        packed = model.config._attn_implementation
        model.set_attn_implementation("sdpa")  # packed attention cannot generate
        try:
            return data.measure_reward(model, EVALUATION_EPISODES)
        finally:
            model.set_attn_implementation(packed)

    step = 0
    reward = 0.0 if init.warm_reward > 0 else sampled_reward()
    look = EVALUATE_EVERY
    while reward < init.warm_reward and step < init.max_warm_steps:
        run_supervised_step(
            learner,
            pack_samples(
                data.make_batch(WARMUP_BATCH_EPISODES),
                learner.config.learner.max_tokens_per_micro_batch,
            ),
        )
        step += 1
        if step == look:
            reward = sampled_reward()
            # The reward rises steeply near the end: evaluate often there, so as not to overshoot.
            share = reward / init.warm_reward
            look += next(steps for least, steps in EVALUATION_INTERVALS if share >= least)
            progress(
                f"warming up the new model: step {step}, sampled reward {reward:.2f} of "
                f"{init.warm_reward:.2f}"
            )
    return step, reward


def _make_warmup_config(config: Config) -> Config:
    """Return the settings of the learner for the warm-up: one rank in float32, whatever trains
    the model later."""
    longest = max(config.episode.max_total_tokens, WARMUP_MICRO_BATCH_TOKENS)
    learner = LearnerConfig(
        backend="torch",
        dtype="float32",
        lr=WARMUP_LR,
        weight_decay=0.01,
        betas=(0.9, 0.999),
        max_grad_norm=1e6,
        max_tokens_per_micro_batch=longest,
    )
    return Config(episode=config.episode, learner=learner, routing=RoutingConfig(replay="off"))


def init_model(
    directory: Path, config: Config, progress: ShowProgress = lambda line: None
) -> dict[str, float]:
    """Make `directory` with safetensors, tokenizer, chat template, and `r3async_init.json`, a
    record of the warm-up.

    The directory is written elsewhere and renamed, so that an interrupted call leaves nothing
    incomplete. Raises `FileExistsError` if the directory exists, `ConfigError` if the environment
    has no oracle, and `RunFailed` if its tasks fail one after the other.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists already")
    init = config.model.init
    factory = build_environment_factory(config.env)
    progress("loading torch and transformers")
    import torch
    from transformers.utils import logging

    from r3async.learner.torch.backend import TorchLearner

    # Progress bars share a lock of all processes, which a killed one (`init_model_in_process`)
    # never releases. Progress is reported here.
    logging.disable_progress_bar()
    tokenizer = build_byte_tokenizer()
    renderer = ChatRenderer(tokenizer)
    data = OracleDemonstrations(factory, renderer, init.seed, progress)
    model = build_random_model(init, tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    progress(
        f"made a random Qwen3-MoE: {parameters / 1e6:.2f} M parameters, "
        f"{init.shape.experts} experts, top-{init.shape.top_k}"
    )
    scratch = directory.with_name(directory.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    model.save_pretrained(scratch, safe_serialization=True)
    tokenizer.save_pretrained(scratch)
    torch.manual_seed(init.seed + 1)
    threads = torch.get_num_threads()  # the learner takes one: as fast for matrices this small
    try:
        if is_dataset(config.env):
            progress(
                "warming it up on the rows' answers: `reward` is called for each, "
                f"{WARMUP_BATCH_EPISODES} a step"
            )
        learner = TorchLearner.from_pretrained(_make_warmup_config(config), scratch)
        steps, reward = warm_up_model(learner, data, init, progress)
    finally:
        torch.set_num_threads(threads)
    made = {"parameters": parameters, "warm_steps": steps, "sampled_reward": reward}
    learner.model.causal_lm.save_pretrained(scratch, safe_serialization=True)
    (scratch / "r3async_init.json").write_text(json.dumps(made))
    scratch.rename(directory)
    progress(f"model is ready: {steps} warm-up steps, sampled reward {reward:.2f}, in {directory}")
    return made


def init_model_in_process(
    directory: Path, config: Config, progress: ShowProgress, meanwhile: Callable[[], None]
) -> None:
    """Run `init_model` in a separate process, and `meanwhile` in this one.

    Raises what either of them raises; by then the process has ended.
    """
    hears, says = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_run_child_process,
        args=(directory, config_to_dict(config), get_registered_objects(), os.getpid(), says),
    )
    with hide_main_module():
        process.start()
    says.close()
    try:
        meanwhile()
        while True:
            news = hears.recv()
            if isinstance(news, Exception):
                raise news
            if news is None:
                return
            progress(news)
    except EOFError:
        process.join()
        raise RuntimeError(
            f"the process that made the start model ended with code {process.exitcode}"
        ) from None
    finally:
        process.kill()
        process.join()
        hears.close()


def _run_child_process(
    directory: Path,
    config: dict[str, Any],
    objects: dict[str, bytes],
    owner: int,
    connection: Connection,
) -> None:
    """Send lines of progress to `connection`, then None or the exception."""
    for stop in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # the owner handles a Ctrl-C or a closed terminal, and ends this process
        signal.signal(stop, signal.SIG_IGN)
    exit_with_owner(owner)
    add_user_module_path()
    register_objects(objects)
    try:
        init_model(directory, config_from_dict(config), connection.send)
    except Exception as error:
        connection.send(error)
    else:
        connection.send(None)


def init_or_copy_model(
    directory: Path,
    config: Config,
    progress: ShowProgress = lambda line: None,
    make: MakeModel = init_model,
) -> None:
    """Make a model with `init_model`, or copy one made before with the same settings.

    Models are cached in `$XDG_CACHE_HOME/r3async` (`~/.cache/r3async`) under a digest of the
    settings and of the code that makes them. Only models of built-in environments are cached,
    because others change under the same name. A copy whose files do not match the noted digest is
    not used. A cache that cannot be written is skipped.

    Args:
        make: Makes the model; calls `init_model`.
    """
    cached = _find_cache_path(config)
    if cached is None:
        make(directory, config, progress)
        return
    if _is_intact(cached):
        progress(f"the model was made before: a copy of {cached}")
        _copy_directory(cached, directory)
        return
    make(directory, config, progress)
    with contextlib.suppress(OSError):
        _copy_directory(directory, cached, with_digest=True)


def _find_cache_path(config: Config) -> Path | None:
    """Return the path at which the model of these settings is cached; None if it is not cached."""
    if any(each.env.name not in BUILTIN_ENVIRONMENTS for each in resolve_envs(config)):
        return None
    settings = config_to_dict(config)
    key = xxhash.xxh3_128(
        msgspec.json.encode((settings["model"]["init"], settings["env"]), order="sorted")
    )
    for package in list_package_versions():
        key.update(package.encode())
    for made_by in (init_model, ReverseText, ChatRenderer, Demonstration):
        key.update(Path(inspect.getfile(made_by)).read_bytes())
    # To import them would import torch.
    for module in ("supervised.py", "optimizer.py", "torch/model.py"):
        key.update((Path(r3async.learner.__file__).parent / module).read_bytes())
    return find_cache_directory() / key.hexdigest()


def _is_intact(cached: Path) -> bool:
    """Return whether the cached model exists and matches its digest; False if it cannot be read."""
    try:
        return (cached / DIGEST_FILE).read_text() == _digest_files(cached)
    except OSError:
        return False


def _copy_directory(source: Path, target: Path, *, with_digest: bool = False) -> None:
    """Copy a directory of files atomically, replacing the target.

    Args:
        with_digest: Add the digest of the files to the copy.
    """
    scratch = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        shutil.copytree(source, scratch, ignore=shutil.ignore_patterns(DIGEST_FILE))
        if with_digest:
            (scratch / DIGEST_FILE).write_text(_digest_files(scratch))
        replace_directory(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _digest_files(directory: Path) -> str:
    """Return a digest of the names and contents of the directory's files."""
    digest = xxhash.xxh3_128()
    for file in sorted(directory.iterdir()):
        if file.name != DIGEST_FILE:
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
