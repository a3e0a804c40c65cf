"""Learners on the emulated CUDA device compute what they compute on the CPU, bit by bit, in every call and in every layout."""

import pytest

from dev.gpu.runs import Case, compare_facts, read_counts
from tests.helpers.emulated import run_on_both

CASES = [
    Case("megatron", {"backend": "megatron"}),
    Case("megatron-deterministic-offload", {"deterministic": True, "offload_moments": True}),
    Case("torch", {"backend": "torch"}),
    Case("torch-deterministic-offload", {"backend": "torch", "deterministic": True, "offload_moments": True}),
    Case("dp2-lora", {"parallel": {"dp": 2}, "lora": {"rank": 4}}),
    Case("cp2-selective", {"parallel": {"cp": 2}, "recompute": "selective"}),
    Case("dp2-ep2-sharded", {"parallel": {"dp": 2, "ep": 2}, "shard_optimizer": True}),
    Case("tp2-pp2-ep2-full", {"parallel": {"tp": 2, "pp": 2, "ep": 2}, "recompute": "full"}),
    Case("fsdp2-selective", {"backend": "torch", "parallel": {"dp": 2}, "recompute": "selective"}),
    Case("fsdp2-lora-full", {"backend": "torch", "parallel": {"dp": 2}, "lora": {"rank": 4}, "recompute": "full"}),
]
"""Cases that have each layout, and each setting of a learner, with one of the backends or both."""
NIGHTLY = [
    Case("megatron-selective", {"recompute": "selective"}),
    Case("megatron-full", {"recompute": "full"}),
    Case("megatron-float32", {"dtype": "float32"}),
    Case("megatron-lora", {"lora": {"rank": 4}}),
    Case("torch-selective", {"backend": "torch", "recompute": "selective"}),
    Case("torch-full", {"backend": "torch", "recompute": "full"}),
    Case("torch-float32", {"backend": "torch", "dtype": "float32"}),
    Case("torch-lora", {"backend": "torch", "lora": {"rank": 4}}),
    Case("pp2", {"parallel": {"pp": 2}}),
    Case("tp2-ep2", {"parallel": {"tp": 2, "ep": 2}}),
    Case("dp2-ep2-gradients", {"parallel": {"dp": 2, "ep": 2}, "shard_optimizer": True, "shard_gradients": True}),
]
PARTS = ("logprobs", "step-1", "export", "capture", "step-3")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    params = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    cases = [each.params["case"] for each in params if each]
    return run_on_both(cases, tmp_path_factory.mktemp("emulated"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in CASES),
        *(pytest.param(case, id=case.name, marks=pytest.mark.nightly) for case in NIGHTLY),
    ],
)
def test_a_learner_has_the_same_bits_on_both_devices(found, case):
    assert not compare_facts(case, found.cpu, found.emulated)
    for part in PARTS:
        # Otherwise it was not on the device.
        assert read_counts(case, found.emulated, part), part
        assert not read_counts(case, found.cpu, part), part
