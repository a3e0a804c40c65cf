"""Learners on the emulated CUDA device compute what they compute on the CPU, bit by bit, in every call and in every layout."""

import pytest

from dev.gpu.runs import Case, compare_facts, read_counts
from tests.helpers.emulated import run_on_both

CASES = [
    Case("megatron", {"backend": "megatron"}),
    Case("megatron-selective", {"recompute": "selective"}),
    Case("megatron-full", {"recompute": "full"}),
    Case("megatron-float32", {"dtype": "float32"}),
    Case("megatron-lora", {"lora": {"rank": 4}}),
    Case("megatron-deterministic-offload", {"deterministic": True, "offload_moments": True}),
    Case("torch", {"backend": "torch"}),
    Case("torch-selective", {"backend": "torch", "recompute": "selective"}),
    Case("torch-full", {"backend": "torch", "recompute": "full"}),
    Case("torch-float32", {"backend": "torch", "dtype": "float32"}),
    Case("torch-lora", {"backend": "torch", "lora": {"rank": 4}}),
    Case("torch-deterministic-offload", {"backend": "torch", "deterministic": True, "offload_moments": True}),
    Case("dp2", {"parallel": {"dp": 2}}),
    Case("cp2", {"parallel": {"cp": 2}}),
    Case("pp2", {"parallel": {"pp": 2}}),
    Case("tp2-ep2", {"parallel": {"tp": 2, "ep": 2}}),
    Case("dp2-ep2-sharded", {"parallel": {"dp": 2, "ep": 2}, "shard_optimizer": True}),
    Case("dp2-ep2-gradients", {"parallel": {"dp": 2, "ep": 2}, "shard_optimizer": True, "shard_gradients": True}),
    Case("tp2-pp2-ep2", {"parallel": {"tp": 2, "pp": 2, "ep": 2}, "recompute": "full"}),
    Case("fsdp2", {"backend": "torch", "parallel": {"dp": 2}}),
    Case("fsdp2-lora-full", {"backend": "torch", "parallel": {"dp": 2}, "lora": {"rank": 4}, "recompute": "full"}),
]
IN_EVERY_CHECK = {
    "megatron",
    "megatron-full",
    "megatron-lora",
    "megatron-deterministic-offload",
    "torch",
    "torch-full",
    "cp2",
    "dp2-ep2-sharded",
    "tp2-pp2-ep2",
    "fsdp2",
}
"""Cases that have each part of the learners once; the others, which combine them, are tested nightly."""
PARTS = ("logprobs", "step-1", "export", "capture", "step-3")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    params = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    cases = [each.params["case"] for each in params if each]
    return run_on_both(cases, tmp_path_factory.mktemp("emulated"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[] if c.name in IN_EVERY_CHECK else pytest.mark.nightly) for c in CASES],
)
def test_a_learner_has_the_same_bits_on_both_devices(found, case):
    assert not compare_facts(case, found.cpu, found.emulated)
    for part in PARTS:
        # Otherwise it was not on the device.
        assert read_counts(case, found.emulated, part), part
        assert not read_counts(case, found.cpu, part), part
