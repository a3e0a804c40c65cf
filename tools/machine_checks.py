"""Checks before a start of the machine or cluster that makes a run: devices, memory, engines
on CPU, addresses."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from r3async.config import Config, ConfigError, strip_brackets
from r3async.data.model_shape import ModelShape
from r3async.rollout.agents import is_agent

from .memory import estimate_engine_memory, estimate_rank_memory

CONNECT_SECONDS = 10.0
CPU_EXPERT_WIDTH = 32
"""Multiple to which vLLM pads experts on CPU (0.30); it reloads unpadded ones only."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention supports on CPU (0.30)."""


def has_gpu() -> bool:
    """Return whether processes started here may see a GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/dev").glob("nvidia[0-9]*"))


def check_cluster_address(address: str) -> None:
    """Check that something listens at HOST:PORT, because Ray itself tries for minutes and then
    ends this process.

    Other forms of an address are left to Ray.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((strip_brackets(host), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"`cluster.address` = {address!r} (or RAY_ADDRESS): nobody answers there ({error}). Is "
            "the cluster running (`ray start --head`)? Leave it out to start one on this machine"
        ) from error


def check_devices(config: Config, shape: ModelShape) -> None:
    """Check that learner and engines fit this machine, if it has no GPU."""
    if has_gpu() or config.generator.engine == "scripted":
        return
    if config.weights.backend == "nccl":
        raise ConfigError(
            '`weights.backend` = "nccl" sends from GPU to GPU, and this machine has none: set '
            "weights.backend=auto, or `cluster.address` to a cluster with GPUs"
        )
    import psutil

    check_cpu_experts(config, shape)
    ranks = config.learner.parallel.world_size
    count = config.generator.count
    rank = estimate_rank_memory(shape, config)
    needed = (
        ranks * (rank.weights + rank.teacher)
        + count * estimate_engine_memory(shape, config).weights
    )
    here = psutil.virtual_memory().total
    if needed > here:
        gib = 2**30
        raise ConfigError(
            f"the weights of {shape.name} take {needed / gib:.0f} GiB in {ranks} rank(s) and "
            f"{count} engine(s), and this machine has no GPU and {here / gib:.0f} GiB of memory: "
            "set `cluster.address` to a cluster with GPUs, or take a smaller model"
        )


def check_cpu_experts(config: Config, shape: ModelShape) -> None:
    """Refuse settings with which vLLM's CPU engine would start and then fail.

    Its workers would crash at the first request, or the first new weights would not fit into
    experts that it has padded.
    """
    args = config.generator.engine_args
    if args.get("enable_expert_parallel"):
        raise ConfigError(
            "`generator.engine_args.enable_expert_parallel`: vLLM has no expert parallelism on "
            "CPU, and this machine has no GPU: leave it out, or set `cluster.address` to a "
            "cluster with GPUs"
        )
    workers = int(args.get("tensor_parallel_size", 1))
    if shape.moe_layers and shape.expert_width % (CPU_EXPERT_WIDTH * workers):
        raise ConfigError(
            f"{shape.name}: this machine has no GPU, and an engine on CPU pads experts of width "
            f"{shape.expert_width}"
            f"{f' / {workers} workers' if workers > 1 else ''} to a multiple of "
            f"{CPU_EXPERT_WIDTH}, and cannot take new weights then: take a model whose experts' "
            f"width is a multiple of {CPU_EXPERT_WIDTH * workers}"
            + (", or `generator.engine_args.tensor_parallel_size` = 1" if workers > 1 else "")
        )


def check_head_size(config: Config, shape: ModelShape, *, on_cpu: bool) -> None:
    """Refuse heads of a size that vLLM's attention has not, with which it would fail at
    the first request.

    Args:
        on_cpu: The engines certainly have no GPU.
    """
    if config.generator.engine != "vllm" or shape.kv_rank or shape.head_dim in CPU_HEAD_DIMS:
        return
    if on_cpu or shape.head_dim < CPU_HEAD_DIMS[0]:
        raise ConfigError(
            f"heads of {shape.head_dim} values, which vLLM on CPU refuses with the first request: "
            f"it takes {', '.join(map(str, CPU_HEAD_DIMS))} (hidden_size / heads): "
            'set `model.init.size` = "small", or `generator.engine` = "scripted"'
        )


def check_addresses(config: Config) -> None:
    """Check that the addresses on which the run listens belong to this machine and are free."""
    serving = config.serving
    if serving.enabled or is_agent(config.env):
        if serving.port and config.generator.count > 1:
            raise ConfigError(
                f"`serving.port` = {serving.port} fits one generator a host, and `generator.count` "
                f"= {config.generator.count}: set serving.port=0, and each takes a free one"
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
                f"`{section}.port` = {port} on {host} cannot be used: {error.strerror}. Choose "
                "another, or 0 for a free one"
            ) from error
        raise ConfigError(
            f"`{section}.{key}` = {host!r} is no address of this machine ({error.strerror}): "
            "127.0.0.1 is, or leave it out"
        ) from error


def _is_local_host(host: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.getaddrinfo(host, 0)[0][0]) as probe:
        probe.bind((host, 0))
        return True
    return False
