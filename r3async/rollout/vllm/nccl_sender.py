"""The process that sends weights from the learner's GPU to a generator's workers (`weights.nccl`).

vLLM's own trainer engine does the sending, in the wire format that vLLM's workers receive. It could
also drive the workers, but here the generator does that, between pause and resume.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import zmq

from r3async.weights.manifest import WeightError
from r3async.weights.nccl import (
    Send,
    Sent,
    Up,
    decode_nccl_message,
    encode_nccl_message,
    listen_at,
    open_nccl_socket,
)
from r3async.world.kept_programs import exit_with_owner

POLL_MILLISECONDS = 60_000

SendVersion = Callable[[Send], None]
"""Function that sends one version and returns when all workers have it."""


def main() -> None:
    """Run a sending process.

    Its arguments after `sys.path` are the endpoint that gives work, the link's name, and the
    owner's process id.
    """
    endpoint, link, owner = sys.argv[2:]
    exit_with_owner(int(owner))
    serve_sends(endpoint, link, make_nccl_sender())


def serve_sends(
    endpoint: str, link: str, send_version: SendVersion, stop: Callable[[], bool] = lambda: False
) -> None:
    """Send the requested versions until `stop` returns True, or until an error.

    A failed operation leaves no group that could be used again.
    """
    with zmq.Context() as context, open_nccl_socket(context, zmq.DEALER, endpoint) as dealer:
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
    """Return the order in which tensors are sent, as sender and workers know the names in
    different orders.

    `widths` has the bytes per element of each tensor. The widest come first: vLLM packs tensors one
    behind the other, and each must begin at an offset that its elements allow.
    """
    return sorted(widths, key=lambda name: (-widths[name], name))


def make_nccl_sender() -> SendVersion:
    """Return a function that sends over vLLM's NCCL group, on this process's first GPU.

    The first `Send` creates the group and waits for all workers to join. Raises
    `RuntimeError` without CUDA.
    """
    if not torch.cuda.is_available():
        raise RuntimeError('weights.backend="nccl" needs CUDA where the learner is')
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerInitInfo,
        NCCLTrainerWeightTransferEngine,
    )

    class MappedWeights(WeightSource):
        """A file of published weights."""

        def __init__(self) -> None:
            self.tensors: dict[str, torch.Tensor] = {}

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.tensors.items():
                yield name, tensor.to("cuda")

    source = MappedWeights()
    trainers = list[NCCLTrainerWeightTransferEngine]()

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
            with listen_for_workers(job.host, job.port):
                trainers.append(
                    NCCLTrainerWeightTransferEngine.trainer_init(
                        info, client=_PassiveWorkerClient(), source=source
                    )
                )
            check_nccl_group(trainers[0])
        trainers[0].send_weights()
        source.tensors = {}

    return send_version


@contextlib.contextmanager
def listen_for_workers(host: str, port: int) -> Iterator[None]:
    """Have the group that is created inside this block listen at `host`, of IPv4 or IPv6.

    vLLM 0.30 listens on IPv4 alone, unless it is handed a socket.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    create = StatelessProcessGroup.create
    listening = partial(create, listen_socket=listen_at(host, port))
    StatelessProcessGroup.create = staticmethod(listening)
    try:
        yield
    finally:
        StatelessProcessGroup.create = staticmethod(create)


def check_nccl_group(engine: Any) -> None:
    """Raise `WeightError` if vLLM could not load NCCL: its broadcasts would do nothing,
    without an error."""
    if getattr(engine.model_update_group, "disabled", True):
        raise WeightError(
            'weights.backend="nccl": vLLM cannot use NCCL here (is VLLM_DISABLE_PYNCCL set?)'
        )


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a file, memory-mapped, in the order in which they are sent."""
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {
        name: tensors[name]
        for name in order_tensor_names({name: t.itemsize for name, t in tensors.items()})
    }


class _PassiveWorkerClient:
    """A client that does nothing, because the generator drives its workers and not this process."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass
