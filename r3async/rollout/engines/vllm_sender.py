"""The process that sends weights from the learner's GPU to one generator's workers; see `weights.nccl`.

vLLM's own trainer engine does the sending: its wire format is the one that vLLM's workers receive. It would also drive the
workers, but here the generator does that, between pause and resume.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import zmq

from r3async.weights.manifest import WeightError
from r3async.weights.nccl import Send, Sent, Up, decode_nccl_message, encode_nccl_message

POLL_MILLISECONDS = 60_000

SendVersion = Callable[[Send], None]
"""Sends one version; returns when all workers have it."""


def main() -> None:
    """Arguments, after `sys.path`: where to ask for work, the link's name, the owner's process id."""
    from r3async.rollout.engines.vllm_owner import exit_with_owner

    endpoint, link, owner = sys.argv[2:]
    exit_with_owner(int(owner))
    serve_sends(endpoint, link, make_nccl_sender())


def serve_sends(endpoint: str, link: str, send_version: SendVersion, stop: Callable[[], bool] = lambda: False) -> None:
    """Send what is asked for, until `stop` or an error; a failed operation leaves no group that could be used again."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(endpoint)
        dealer.send(encode_nccl_message(Up(link)))
        while not stop():
            if dealer.poll(POLL_MILLISECONDS):
                job = decode_nccl_message(dealer.recv())
                assert isinstance(job, Send)
                send_version(job)
                dealer.send(encode_nccl_message(Sent(link, job.version)))


def order_tensor_names(widths: Mapping[str, int]) -> list[str]:
    """The order in which tensors travel: sender and workers know the names, but not in one order. `widths`: bytes of an element.

    The widest come first: vLLM packs tensors one behind the other, and none may begin where its elements cannot.
    """
    return sorted(widths, key=lambda name: (-widths[name], name))


def make_nccl_sender() -> SendVersion:
    """Over vLLM's NCCL group, on this process's first GPU. The group is made by the first `Send`, and meets all workers then.

    Raises `RuntimeError` without CUDA."""
    if not torch.cuda.is_available():
        raise RuntimeError('weights.backend="nccl" needs CUDA where the learner is')
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    class MappedWeights(WeightSource):
        """A file of published weights."""

        def __init__(self) -> None:
            self.tensors: dict[str, torch.Tensor] = {}

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.tensors.items():
                yield name, tensor.to("cuda")

    source, trainers = MappedWeights(), list[NCCLTrainerWeightTransferEngine]()

    def send_version(job: Send) -> None:
        source.tensors = read_tensors(job.path)
        if not trainers:
            info = NCCLTrainerInitInfo(
                rank=0,
                master_address=job.host,
                master_port=job.port,
                world_size=job.workers + 1,
                packed_buffer_size_bytes=job.bucket_bytes,
            )
            trainers.append(
                NCCLTrainerWeightTransferEngine.trainer_init(info, client=_PassiveWorkerClient(), source=source)
            )
            check_nccl_group(trainers[0])
        trainers[0].send_weights()
        source.tensors = {}

    return send_version


def check_nccl_group(engine: Any) -> None:
    """vLLM's broadcasts do nothing at all, and raise nothing, if it could not load NCCL: `WeightError` then."""
    if getattr(engine.model_update_group, "disabled", True):
        raise WeightError('weights.backend="nccl": vLLM cannot use NCCL here (is VLLM_DISABLE_PYNCCL set?)')


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    """All tensors of a file, mapped, in the order in which they travel."""
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: tensors[name] for name in order_tensor_names({name: t.itemsize for name, t in tensors.items()})}


class _PassiveWorkerClient:
    """The workers are driven by their generator, and not by this process."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass
