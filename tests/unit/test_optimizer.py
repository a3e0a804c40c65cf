"""The optimizer: its steps are those of AdamW as it was published, moments in host memory change no bit of them, and shares of a
parameter lie where a checkpoint has its tensors.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from r3async.checkpoint.rank_files import TensorSlice
from r3async.config import LearnerConfig, config_from_dict
from r3async.learner.host_moments import HostMoments
from r3async.learner.optimizer import MasterAdamW
from r3async.learner.row_shares import SHARE_ALIGNMENT, RowShare, view_rows
from r3async.learner.shard_slice import ShardSlice
from r3async.learner.tensor_layout import InterleavedRows

NORMS = (0.3, 5.0, 0.02, 40.0, 0.999, 1.001, 2.0)
"""Of the gradients of each step: below, about and far above the default of `max_grad_norm`."""


class AdamW:
    """arXiv 1711.05101, algorithm 2, behind a clipping of the global norm."""

    def __init__(self, values: list[np.ndarray], config: LearnerConfig):
        self.values, self._config, self._made = [v.astype(np.float64) for v in values], config, 0
        self._first = [np.zeros_like(v) for v in self.values]
        self._second = [np.zeros_like(v) for v in self.values]

    def step(self, gradients: list[np.ndarray]) -> None:
        config, self._made = self._config, self._made + 1
        norm = math.sqrt(sum(float(np.square(g).sum()) for g in gradients))
        beta1, beta2 = config.betas
        for i, gradient in enumerate(gradients):
            gradient = gradient * min(1.0, config.max_grad_norm / norm)
            self._first[i] = beta1 * self._first[i] + (1 - beta1) * gradient
            self._second[i] = beta2 * self._second[i] + (1 - beta2) * gradient**2
            first = self._first[i] / (1 - beta1**self._made)
            second = self._second[i] / (1 - beta2**self._made)
            decay = config.weight_decay if self.values[i].ndim >= 2 else 0.0
            self.values[i] -= config.lr * (first / (np.sqrt(second) + config.eps) + decay * self.values[i])


@pytest.mark.parametrize("scale", [1.0, 1e-8], ids=["usual gradients", "gradients as small as eps"])
@pytest.mark.parametrize(
    "changes", [{}, {"max_grad_norm": 0.25}, {"weight_decay": 0.1}, {"offload_moments": True}], ids=str
)
def test_steps_are_those_of_adamw_of_gradients_that_are_scaled_to_max_grad_norm(changes: dict, scale: float):
    config = LearnerConfig(lr=0.05, **changes)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (5,))]
    expected = AdamW(values, config)
    parameters = [Parameter(torch.from_numpy(v.copy())) for v in values]
    optimizer = MasterAdamW(parameters, config)
    for norm in NORMS:
        gradients = [rng.standard_normal(v.shape) for v in values]
        whole = math.sqrt(sum(float(np.square(g).sum()) for g in gradients))
        gradients = [g * (scale * norm / whole) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient.astype(np.float32))
        update = optimizer.step()
        expected.step(gradients)
        assert update.grad_norm == pytest.approx(scale * norm, rel=1e-5)
        for parameter, value in zip(parameters, expected.values, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=2e-5, atol=2e-6)


SHAPES = [(5, 7), (3, 4, 6), (11,), (64, 33), (1,)]


def make_parameters(dtype):
    rng = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in SHAPES]


@pytest.fixture
def optimizer(monkeypatch):
    """Make parameters and their optimizer, whose offloaded moments come in buckets of that size."""

    def make(dtype, offload, bucket):
        monkeypatch.setattr("r3async.learner.optimizer.HostMoments", lambda adam: HostMoments(adam, bucket))
        parameters, settings = make_parameters(dtype), LearnerConfig(lr=0.1, weight_decay=0.1, offload_moments=offload)
        return parameters, MasterAdamW(parameters, settings, updates_total=9)

    return make


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
def test_offloaded_moments_change_no_bit(optimizer, dtype, bucket):
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
def test_a_step_is_shortened_as_on_the_device(optimizer, dtype):
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
    parameters = make_parameters(torch.float32)
    adam = torch.optim.AdamW(parameters, fused=True)
    moments = HostMoments(adam, 100)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        moments.step(parameters)
    on_device = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(on_device) == 2 * len(SHAPES)
    assert all(m.untyped_storage().nbytes() == 0 for m in on_device)
    assert all(m.untyped_storage().nbytes() > 0 for p in parameters for m in moments.get_moments(p).values())
    with moments.moments_on_device(parameters[0]):
        assert adam.state[parameters[0]]["exp_avg"].untyped_storage().nbytes() > 0
    assert all(m.untyped_storage().nbytes() == 0 for m in on_device)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 9))
def test_shares_have_every_row_once_and_are_almost_alike(shape, ranks):
    tensor = torch.arange(math.prod(shape)).view(shape)
    parts = [view_rows(share.select_rows(tensor)) for share in RowShare(0, ranks).list_shares()]
    assert torch.equal(torch.cat(parts), view_rows(tensor))
    sizes = [p.numel() for p in parts]
    assert max(sizes) - min(sizes) < 16 * (shape[-1] if len(shape) > 1 else 1) + 16
    # What is not a full vector is at the end of the whole, as it is where nothing is divided.
    assert all(p.numel() and p.flatten()[0] % SHARE_ALIGNMENT == 0 for p in parts if len(p))


def interleaved(groups: int, widths: list[int], columns: int):
    """A parameter in which rows of three tensors take turns, as queries, keys and values do; those tensors, and what it is."""

    whole = [torch.rand(groups * width, columns) for width in widths]
    places = tuple(TensorSlice.full_tensor(f"t{i}", tensor.shape) for i, tensor in enumerate(whole))
    layout = InterleavedRows(groups, tuple(widths))
    return layout.join(whole), whole, ShardSlice(places, layout)


@given(
    st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 6), st.sampled_from([4, 16])
)
def test_a_share_is_a_box_of_each_tensor_that_it_has_rows_of(groups, widths, ranks, columns):
    parameter, tensors, held = interleaved(groups, widths, columns)
    filled = [torch.full_like(t, torch.nan) for t in tensors]
    for share in RowShare(0, ranks).list_shares():
        mine = held.narrow_to_share(parameter.shape, share)
        own = share.select_rows(parameter)
        parts = mine.layout.split(own)
        for place, part in zip(mine.places, parts, strict=True):
            assert tuple(part.shape) == place.size
            box = tuple(slice(o, o + n) for o, n in zip(place.offset, place.size, strict=True))
            assert filled[int(place.name[1:])][box].isnan().all(), "no value is of two ranks"
            filled[int(place.name[1:])][box] = part
        if mine.places:
            assert torch.equal(mine.layout.join(list(parts)), own)
    assert all(torch.equal(a, b) for a, b in zip(filled, tensors, strict=True))


def test_rows_that_only_pad_a_part_are_in_no_place():
    # The second of two tensor-parallel ranks: 5 rows are divided, and of its 3 the last is padding.
    held = ShardSlice((TensorSlice("w", (5, 16), (3, 0), (2, 16)),))
    first, second = (held.narrow_to_share((3, 16), share) for share in RowShare(0, 2).list_shares())
    assert first.places == (TensorSlice("w", (5, 16), (3, 0), (1, 16)),)
    assert second.places == (TensorSlice("w", (5, 16), (4, 0), (1, 16)),)
    assert [len(part) for part in second.layout.split(torch.zeros(2, 16))] == [2]
    assert len(second.layout.join([torch.zeros(2, 16)])) == 2


def test_a_backend_that_always_shards_refuses_the_setting():
    with pytest.raises(ValueError, match='`shard_optimizer` is for backend = "megatron"'):
        config_from_dict({"learner": {"backend": "torch", "shard_optimizer": True}})
