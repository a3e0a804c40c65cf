"""How often a step waits for its device. On a CPU nothing waits: what is counted is every call that would on CUDA, as far as
Python and the dispatcher see it. `tests/gpu/test_device_counts.py` counts uploads too, and several ranks. Waits inside of a
kernel, or of the allocator, are counted on a GPU only (`r3async doctor --gpu`, `waits` of a step)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from r3async.learner.micro_batches import MicroBatch, pack_samples
from tests.helpers import models as hm
from tests.helpers.checkpoint import settings
from tests.helpers.steps import train_minibatch

ALWAYS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal")
"""Operators whose result, or its size, has to reach the host."""
METHODS = ("cpu", "tolist")
"""What copies to the host."""


class Syncs(TorchDispatchMode):
    def __init__(self, found: Counter[str]):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in ALWAYS or by_mask or repeats:
            self._found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    whole = {name: getattr(torch.Tensor, name) for name in METHODS}

    def counting(name):
        def call(self, *args, **kwargs):
            found[name] += 1
            return whole[name](self, *args, **kwargs)

        return call

    try:
        for name in METHODS:
            setattr(torch.Tensor, name, counting(name))
        with Syncs(found):
            yield found
    finally:
        for name, method in whole.items():
            setattr(torch.Tensor, name, method)


def micro_batches(count: int) -> list[MicroBatch]:
    made = pack_samples(hm.make_samples(1, [40] * count, temperature=0.8), 48)
    assert len(made) == count
    return made


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_no_micro_batch_waits_for_the_device(learners, tmp_path, backend, recompute):
    config = settings(backend)
    config.learner.recompute = recompute
    learner = learners(config, hm.make_hf_model(tmp_path / "model", hidden_size=64, moe_intermediate_size=32))
    found = []
    for count in (2, 8):
        with counted() as syncs:
            train_minibatch(learner, micro_batches(count))
        found.append(syncs)
    few, many = found
    assert few["_local_scalar_dense"], "a step asks for its norm: what is counted has to be seen"
    each = (many.total() - few.total()) / 6
    assert not each, f"{each:g} a micro-batch: {dict(many - few)}"
    assert few.total() <= 12, f"of a step: {dict(few)}"


def test_what_waits_is_counted():
    x = torch.arange(4.0)
    with counted() as found:
        x[x > 1].sum().item()
        x.nonzero().tolist()
        bool(x.any())
        x.cpu()
    assert found == Counter(index=1, _local_scalar_dense=2, nonzero=1, tolist=1, cpu=1)
