"""The convolution of packed samples is torch's own of each sample, and so are its gradients."""

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.learner import packed_convolution
from r3async.learner.packed_convolution import causal_convolution
from r3async.learner.recurrent_layout import RecurrentLayout

CHANNELS = 6


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    width=st.integers(1, 5),
    biased=st.booleans(),
    block_rows=st.sampled_from([1, 2, 5, 1000]),
    seed=st.integers(0, 99),
)
def test_no_sample_sees_another(lengths, width, biased, block_rows, seed):
    rng = torch.Generator().manual_seed(seed)
    sizes = [(sum(lengths), CHANNELS), (CHANNELS, width), (CHANNELS,)]
    leaves = [torch.randn(size, generator=rng, dtype=torch.float64, requires_grad=True) for size in sizes]
    x, weight, bias = leaves
    used = leaves if biased else leaves[:2]
    bias = bias if biased else None
    layout = RecurrentLayout(np.cumsum([0, *lengths]), torch.device("cpu"))
    whole = packed_convolution.CPU_BLOCK_ELEMENTS
    packed_convolution.CPU_BLOCK_ELEMENTS = block_rows * CHANNELS
    try:
        ours = causal_convolution(x, weight, bias, layout)
        grad = torch.randn(ours.shape, generator=rng, dtype=torch.float64)
        mine = torch.autograd.grad(ours, used, grad)
    finally:
        packed_convolution.CPU_BLOCK_ELEMENTS = whole
    theirs = torch.cat(
        [
            F.conv1d(F.pad(part.mT, (width - 1, 0)), weight[:, None], bias, groups=CHANNELS).mT
            for part in x.split(lengths)
        ]
    )
    assert (ours - theirs).abs().max() < 1e-12
    for a, b in zip(mine, torch.autograd.grad(theirs, used, grad), strict=True):
        assert (a - b).abs().max() < 1e-12
