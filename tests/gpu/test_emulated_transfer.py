"""Weights from the learner's GPU to an engine's, between two processes with a device each."""

import asyncio

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from dev.gpu.transfer import start_emulated_sender, start_receiver
from r3async.config.supervise import TimeLimits
from r3async.config.weights import WeightsConfig
from r3async.weights.nccl import NcclReceiver, NcclSender
from tests.helpers.emulated import need_emulated_device

BUCKET_BYTES = 4096
"""Less than some of the tensors take, and more than others."""


def make_tensors(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    shapes = {"embed": (64, 48), "experts": (4, 24, 40), "norm": (48,), "empty": (0, 3)}
    return {name: torch.randn(*shape, dtype=torch.bfloat16) for name, shape in shapes.items()} | {
        "bias.e_score_correction_bias": torch.randn(7)
    }


@pytest.mark.timeout(300)
def test_versions_arrive_on_the_other_device_bit_by_bit(tmp_path):
    need_emulated_device()
    settings = WeightsConfig(bucket_bytes=BUCKET_BYTES)
    sender = NcclSender(tmp_path / "published", "127.0.0.1", settings, TimeLimits(), start_emulated_sender)
    receiver, manifests = NcclReceiver("generator-0"), []
    try:
        for version in (1, 2):
            offer = sender.publish_tensors(version, make_tensors(version), torch.bfloat16)
            manifest = asyncio.run(receiver.fetch_version(offer.manifest, offer.transport_data, 120.0))
            manifests.append(tmp_path / f"{version}.json")
            manifests[-1].write_bytes(msgspec.json.encode(manifest))
        assert start_receiver(manifests).wait(timeout=240) == 0
    finally:
        sender.close()
    for version in (1, 2):
        sent, received = make_tensors(version), load_file(tmp_path / f"{version}.safetensors")
        assert sorted(received) == sorted(sent)
        assert all(torch.equal(received[name], sent[name]) for name in sent)
        assert {name: t.dtype for name, t in received.items()} == {name: t.dtype for name, t in sent.items()}
