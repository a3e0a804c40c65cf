"""Checks before a run starts, so that it is refused in a second and not by a process that loads for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from r3async.actors.placement import ResourceDemand, find_smallest_layout
from r3async.config import Config, ConfigError, EnvConfig, resolve_envs, strip_brackets
from r3async.data.models import ModelShape, ModelShapeError, find_architecture, parse_model_shape, read_moe_layers
from r3async.envs import (
    Action,
    EnvironmentProtocolError,
    HasOracle,
    refuse_repeated_messages,
)
from r3async.envs.dataset import is_dataset
from r3async.envs.errors import summarize_error
from r3async.envs.factory import build_environment_factory
from r3async.envs.returned import coerce_messages, require_step_result
from r3async.rollout.agents import is_agent
from r3async.rollout.episode import close_environment
from r3async.untrusted import decode_python_json
from r3async.world.processes import run_on_shared_loop

from .memory import (
    GPU_PARAMETERS,
    check_model_type,
    check_router_settings,
    check_trainable,
    estimate_engine_memory,
    estimate_rank_memory,
    find_model_shape,
)

ENVIRONMENT_TRY_SECONDS = 10.0
"""Seconds for the trial of an environment. One that takes longer is not judged."""
CONNECT_SECONDS = 10.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
WEIGHT_INDEX_FILE = "model.safetensors.index.json"
CPU_EXPERT_WIDTH = 32
"""Multiple to which vLLM pads experts on CPU (0.30); it reloads unpadded ones only."""


def check_start(config: Config) -> None:
    """Check all requirements of a start on this machine. Raises `ConfigError` with the setting and the fix."""
    if config.resume not in ("auto", "none") and not Path(config.resume).exists():
        raise ConfigError(f"`resume` = {config.resume!r}: there is no such checkpoint, and no run with checkpoints")
    if config.model.path:
        check_model_directory(config.model.path)
        check_model_supported(config)
    check_teacher(config)
    check_custom_loss(config)
    if address := config.cluster.address or os.environ.get("RAY_ADDRESS"):
        check_cluster_address(address)
    else:
        check_devices(config)
        check_addresses(config)
    run_on_shared_loop(try_environments(config))


# -- the model -----------------------------------------------------------------------------------------------------


def check_teacher(config: Config) -> None:
    """Check that `algorithm.distillation.teacher`, if set, is a model that reads the same tokens."""
    if not (name := config.algorithm.distillation.teacher):
        return
    check_model_files(name, "algorithm.distillation.teacher")
    if Path(config.model.path or "-").is_dir():
        from r3async.learner import LearnerError
        from r3async.learner.distillation import check_same_vocabulary

        try:
            check_same_vocabulary(Path(config.model.path), Path(name))
        except LearnerError as error:
            raise ConfigError(str(error)) from error


def check_model_directory(name: str) -> None:
    """Check that `model.path` is a model with weights, a tokenizer and a chat template. Reads small files only."""
    path, said = Path(name), check_model_files(name, "model.path")
    settings = _read_json(path / "tokenizer_config.json", said) if (path / "tokenizer_config.json").is_file() else {}
    if not settings.get("chat_template") and not any((path / file).exists() for file in CHAT_TEMPLATE_FILES):
        raise ConfigError(
            f"{said} has no chat template, so messages cannot be shown to it: add chat_template.jinja, or take the model's "
            "instruction-tuned version"
        )


def check_model_files(name: str, setting: str) -> str:
    """Check that `setting` is a model with weights and a tokenizer. Returns its label for messages."""
    path, said = Path(name), f"`{setting}` = {name!r}"
    if not path.exists():
        raise ConfigError(f"{said} is not a model directory (no config.json in it)")
    if not path.is_dir():
        raise ConfigError(f"{said} is a file, not a model directory: name the directory with config.json in it")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{said} is not a model directory (no config.json in it)")
    if "model_type" not in _read_json(path / "config.json", said):
        raise ConfigError(f"{said}: its config.json has no `model_type`, so it is no Hugging Face model")
    if not any(file for pattern in WEIGHT_PATTERNS for file in path.glob(pattern)):
        raise ConfigError(f"{said} has no weights: no *.safetensors in it")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{said} has no *.safetensors, and its .bin files are not read: `AutoModelForCausalLM.from_pretrained(…)"
            ".save_pretrained(…)` writes them"
        )
    _check_shards(path, said)
    if not any((path / file).exists() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"{said} has no tokenizer: copy tokenizer.json and tokenizer_config.json of the model into it"
        )
    return said


def _check_shards(path: Path, label: str) -> None:
    """Check that all shards of a model are there, with the index of their contents."""
    index, shards = path / WEIGHT_INDEX_FILE, sorted(file.name for file in path.glob("*-of-*.safetensors"))
    if index.is_file():
        named = _read_json(index, label).get("weight_map", {})
        if lacking := sorted({str(name) for name in named.values() if not (path / str(name)).is_file()}):
            raise ConfigError(
                f"{label} lacks {len(lacking)} of its files of weights, such as {lacking[0]}: copy them into it"
            )
    elif shards and not (path / "model.safetensors").is_file():
        raise ConfigError(
            f"{label} has its weights in {len(shards)} files ({shards[0]}, …) and no {WEIGHT_INDEX_FILE}, which says what is "
            "in which: copy it into the directory"
        )


def _read_json(path: Path, label: str) -> dict[str, Any]:
    try:
        data = decode_python_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{label}: {path.name} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}


def check_model_supported(config: Config) -> None:
    """Check that the backend trains this kind of model on the given ranks.

    A dense model whose numbers are unknown is not judged.
    """
    name, described = Path(config.model.path).name, _read_json(Path(config.model.path) / "config.json", "`model.path`")
    check_model_type(described, name)
    try:
        read_moe_layers(described)
    except ModelShapeError as error:
        raise ConfigError(f"{name} cannot be trained: {error}") from error
    with contextlib.suppress(ModelShapeError):
        shape = parse_model_shape(described, name)
        check_trainable(shape, config.learner)
        check_router_settings(shape, config)
        if shape.num_parameters > GPU_PARAMETERS:
            find_smallest_layout(ResourceDemand.from_config(config), config.cluster.gpus_per_node)
        check_engine_config(config)


def check_engine_config(config: Config) -> None:
    """Check for the entries of `config.json` that vLLM reads and transformers does not.

    Without them vLLM would compute another model.
    """
    found = _read_json(Path(config.model.path) / "config.json", "`model.path`")
    known = find_architecture(found.get("model_type", ""))
    if known is None or config.generator.engine != "vllm":
        return
    if known.engine_unsupported_reason:
        raise ConfigError(
            f"`model.path` = {config.model.path!r}: a run cannot update {known.title} in the engine: "
            f"{known.engine_unsupported_reason}. `r3async sft` trains it"
        )
    for key, needed in known.engine_config.items():
        if found.get(key) != needed:
            raise ConfigError(
                f"`model.path` = {config.model.path!r}: its config.json has `{key}` = {json.dumps(found.get(key))}, and vLLM "
                f"computes {known.title} with {json.dumps(needed)} only: add it to that file"
            )


def check_custom_loss(config: Config) -> None:
    """Check that a custom policy loss returns what a step needs."""
    if ":" not in config.algorithm.policy_loss:
        return
    from r3async.learner.policy_loss import check_custom_loss

    check_custom_loss(config.algorithm)


# -- engines and devices -------------------------------------------------------------------------------------------


def has_gpu() -> bool:
    """Return whether processes started here may see a GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/dev").glob("nvidia[0-9]*"))


def check_cluster_address(address: str) -> None:
    """Check that something listens at HOST:PORT, because Ray itself tries for minutes and then ends this process.

    Other forms of an address are left to Ray.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((strip_brackets(host), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"`cluster.address` = {address!r} (or RAY_ADDRESS): nobody answers there ({error}). Is the cluster running "
            "(`ray start --head`)? Leave it out to start one on this machine"
        ) from error


def check_devices(config: Config) -> None:
    """Check that learner and engines fit this machine, if it has no GPU."""
    if has_gpu() or config.generator.engine == "scripted":
        return
    if config.weights.backend == "nccl":
        raise ConfigError(
            '`weights.backend` = "nccl" sends from GPU to GPU, and this machine has none: set weights.backend=auto, or '
            "`cluster.address` to a cluster with GPUs"
        )
    import psutil

    shape, _ = find_model_shape(config)
    check_cpu_engine(config, shape)
    ranks, count = config.learner.parallel.world_size, config.generator.count
    rank = estimate_rank_memory(shape, config)
    needed = ranks * (rank.weights + rank.teacher) + count * estimate_engine_memory(shape, config).weights
    here = psutil.virtual_memory().total
    if needed > here:
        gib = 2**30
        raise ConfigError(
            f"the weights of {shape.name} take {needed / gib:.0f} GiB in {ranks} rank(s) and {count} engine(s), and this "
            f"machine has no GPU and {here / gib:.0f} GiB of memory: set `cluster.address` to a cluster with GPUs, or take a "
            "smaller model"
        )


def check_cpu_engine(config: Config, shape: ModelShape) -> None:
    """Refuse settings with which vLLM's CPU engine would start and then fail.

    Its workers would crash at the first request, or the first new weights would not fit into experts that it has
    padded.
    """
    args = config.generator.engine_args
    if args.get("enable_expert_parallel"):
        raise ConfigError(
            "`generator.engine_args.enable_expert_parallel`: vLLM has no expert parallelism on CPU, and this machine has no GPU: "
            "leave it out, or set `cluster.address` to a cluster with GPUs"
        )
    workers = int(args.get("tensor_parallel_size", 1))
    if shape.moe_layers and shape.expert_width % (CPU_EXPERT_WIDTH * workers):
        raise ConfigError(
            f"{shape.name}: this machine has no GPU, and an engine on CPU pads experts of width {shape.expert_width}"
            f"{f' / {workers} workers' * (workers > 1)} to a multiple of {CPU_EXPERT_WIDTH}, and cannot take new weights then: "
            f"take a model whose experts' width is a multiple of {CPU_EXPERT_WIDTH * workers}"
            + ", or `generator.engine_args.tensor_parallel_size` = 1"
            * (workers > 1)
        )


def check_addresses(config: Config) -> None:
    """Check that the addresses on which the run listens belong to this machine and are free."""
    serving = config.serving
    if serving.enabled or is_agent(config.env):
        if serving.port and config.generator.count > 1:
            raise ConfigError(
                f"`serving.port` = {serving.port} fits one generator a host, and `generator.count` = "
                f"{config.generator.count}: set serving.port=0, and each takes a free one"
            )
        _check_bindable("serving", serving.host, serving.port)
    if config.transport.host:
        _check_bindable("transport", config.transport.host, 0)
    if config.observe.prometheus_port is not None:
        _check_bindable("observe", config.observe.prometheus_host, 0, "prometheus_host")


def _check_bindable(section: str, host: str, port: int, key: str = "host") -> None:
    bare = strip_brackets(host)
    try:
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
    except OSError as error:
        if port and not isinstance(error, socket.gaierror) and _is_local_host(bare):
            raise ConfigError(
                f"`{section}.port` = {port} on {host} cannot be used: {error.strerror}. Choose another, or 0 for a free one"
            ) from error
        raise ConfigError(
            f"`{section}.{key}` = {host!r} is no address of this machine ({error.strerror}): 127.0.0.1 is, or leave it out"
        ) from error


def _is_local_host(host: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.getaddrinfo(host, 0)[0][0]) as probe:
        probe.bind((host, 0))
        return True
    return False


# -- the environment -----------------------------------------------------------------------------------------------


async def try_environments(config: Config) -> None:
    """Play one turn of each environment with the best answer it knows, or an empty one if it knows none.

    The best answer to a row is the row's own. Raises `ConfigError` if the environment breaks the protocol (a `step`
    that returns a tuple, a reward that is a text, None or not finite, `sys.exit`), or if it fails with its own best
    answer. Time-outs, connection errors, and errors with an empty answer are not judged: an empty answer may not be
    a valid one.
    """
    for each in resolve_envs(config):
        if not is_agent(each.env):
            await _try_environment(each.env)


async def _try_environment(env: EnvConfig) -> None:
    environment = build_environment_factory(env)()
    answer, said = "", "`reward`" if is_dataset(env) else f"`env.name` = {env.name!r}"
    try:
        async with asyncio.timeout(ENVIRONMENT_TRY_SECONDS):
            told = coerce_messages(await environment.reset(0), "reset()")
            answer = environment.oracle() if isinstance(environment, HasOracle) else ""
            result = require_step_result(await environment.step(Action(answer)))
            if not (result.done or result.rewrites):
                refuse_repeated_messages(told, coerce_messages(result.messages, "StepResult.messages"))
    except (Exception, SystemExit) as error:
        raised = summarize_error(error)
        if isinstance(error, EnvironmentProtocolError | SystemExit):
            where = "on its first row" if is_dataset(env) else "in its first episode"
            raise ConfigError(f"{said} failed {where}: {raised.line}") from error
        if answer and not raised.passing:
            whose = "the first row's own answer" if is_dataset(env) else "its own best answer"
            raise ConfigError(f"{said} fails with {whose}, {answer!r:.80}: {raised.line}") from error
    finally:
        with contextlib.suppress(Exception):
            await close_environment(environment)
