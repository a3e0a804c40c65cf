"""Weights over the NCCL transport between processes on emulated devices: gloo in the place of NCCL,
and all else as it is.

`python -m dev.gpu.transfer send` is the process that sends from the learner's GPU, and `receive`
a worker of vLLM.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from r3async.weights.manifest import WeightManifest

SECONDS = 120.0


def main() -> None:
    action, *rest = sys.argv[1:]
    from dev.gpu.library import load_library

    load_library()
    from dev.gpu.device import install_device

    install_device()
    _replace_nccl()
    if action == "send":
        from r3async.rollout.vllm import nccl_sender

        sys.argv[1:] = ["", *rest]
        nccl_sender.main()
    else:
        _receive_versions([Path(path) for path in rest])


def start_emulated_sender(endpoint: str, link: str) -> subprocess.Popen[bytes]:
    """Start a sending process as `weights.nccl.start_sender_process` does, on an
    emulated device."""
    command = [sys.executable, "-m", "dev.gpu.transfer", "send", endpoint, link, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def start_receiver(manifests: Iterable[Path]) -> subprocess.Popen[bytes]:
    """Start a worker that receives one version after the other, and writes each beside its
    manifest as safetensors."""
    return subprocess.Popen(
        [sys.executable, "-m", "dev.gpu.transfer", "receive", *map(str, manifests)]
    )


def _replace_nccl() -> None:
    import torch.distributed as dist
    from vllm.distributed.device_communicators import pynccl

    from dev.gpu.device import EmulatedTensor

    class GlooCommunicator:
        """`PyNcclCommunicator` over gloo, on tensors of emulated devices."""

        disabled = False

        def __init__(self, group: Any, device: Any):
            self._gloo = dist.ProcessGroupGloo(
                dist.PrefixStore("gloo", group.store),
                group.rank,
                group.world_size,
                datetime.timedelta(seconds=SECONDS),
            )

        def broadcast(self, tensor: EmulatedTensor, src: int, stream: Any = None) -> None:
            options = dist.BroadcastOptions()
            options.rootRank = src
            options.rootTensor = 0
            self._gloo.broadcast([tensor.inner], options).wait()

    pynccl.PyNcclCommunicator = GlooCommunicator


def _receive_versions(manifests: Iterable[Path]) -> None:
    import torch
    from safetensors.torch import save_file
    from torch import Tensor
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from dev.gpu.device import DEVICE
    from r3async.rollout.vllm.worker import WorkerExtension

    class Model(torch.nn.Module):
        """Keeps the tensors that it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, Tensor] = {}

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                assert tensor.device == DEVICE, "it was received on the device"
                self.kept[name] = tensor.cpu().clone()

    class Worker(WorkerExtension):
        """vLLM's worker at its end of a transfer. It does not load layer by layer."""

        def __init__(self) -> None:
            parallel = SimpleNamespace(
                world_size=1, data_parallel_size=1, data_parallel_index=0, rank=0
            )
            config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
            self.weight_transfer_engine = NCCLWeightTransferEngine(
                WeightTransferConfig(backend="nccl"), config, DEVICE, Model()
            )

        def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
            engine = self.weight_transfer_engine
            engine.init_transfer_engine(engine.parse_init_info(info))

        def update_weights(self, info: dict[str, Any]) -> None:
            engine = self.weight_transfer_engine
            engine.receive_weights(engine.parse_update_info(info))

        def start_weight_update(self) -> None: ...

        def finish_weight_update(self) -> None: ...

    worker = Worker()
    for path in manifests:
        worker.r3_receive_tensors(msgspec.json.decode(path.read_bytes(), type=WeightManifest))
        save_file(worker.weight_transfer_engine.model.kept, path.with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
