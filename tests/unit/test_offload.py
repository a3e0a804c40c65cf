"""Moments in host memory: the same bits as on the device, also after a resume."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from r3async.config import LearnerConfig
from r3async.learner.optimizer import HostMoments, MasterAdamW

SHAPES = [(5, 7), (3, 4, 6), (11,), (64, 33), (1,)]


def optimizer(dtype, offload, bucket):
    rng = torch.Generator().manual_seed(1)
    parameters = [Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in SHAPES]
    made = MasterAdamW(parameters, LearnerConfig(lr=0.1, weight_decay=0.1, offload_moments=offload), updates_total=9)
    if made._host_moments is not None:
        made._host_moments = HostMoments(made._adam, bucket)
    return parameters, made


def stepped(parameters, made, seeds):
    for seed in seeds:
        rng = torch.Generator().manual_seed(seed)
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=rng)
            if (index + seed) % 4:  # some have none
                (parameter * gradient.to(parameter.dtype)).sum().backward()
        assert made.step().cause == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [1, 100, 10**6])
def test_offloaded_moments_change_no_bit(dtype, bucket):
    plain, on_device = optimizer(dtype, False, bucket)
    other, offloaded = optimizer(dtype, True, bucket)
    stepped(plain, on_device, range(5))
    stepped(other, offloaded, range(3))
    # Another process resumes from what this one saved.
    saved = [{name: t.clone() for name, t in state.items()} for state in offloaded.iter_states()]
    resumed, later = optimizer(dtype, True, bucket)
    later.load_states(saved, offloaded.update_count)
    stepped(resumed, later, range(3, 5))
    for a, b in zip(plain, resumed, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(on_device.iter_states(), later.iter_states(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_shortened_as_on_the_device(dtype):
    plain, on_device = optimizer(dtype, False, 100)
    other, offloaded = optimizer(dtype, True, 100)
    for parameters, made in ((plain, on_device), (other, offloaded)):
        stepped(parameters, made, range(2))
        made.shorten_step(1.0, 0.25)
        stepped(parameters, made, [2])
        whole = [p.detach().clone() for p in parameters]
        made.shorten_step(1.0, 0.25)
        assert sum(not torch.equal(p, before) for p, before in zip(parameters, whole, strict=True)) == 4
    for a, b in zip(plain, other, strict=True):
        assert torch.equal(a, b)


def test_between_steps_the_device_has_no_moments():
    parameters, made = optimizer(torch.float32, True, 100)
    stepped(parameters, made, range(2))
    moments = [state[name] for state in made._adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * len(SHAPES)
    assert all(m.untyped_storage().nbytes() == 0 for m in moments)
    assert all(state["exp_avg"].untyped_storage().nbytes() > 0 for state in made.iter_states())
