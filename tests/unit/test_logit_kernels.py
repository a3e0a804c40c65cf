"""Kernels of log-probs, run by Triton's interpreter, against torch's operations."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from r3async.data.supports import SupportSets
from r3async.learner import token_logprobs as head

TOKENS, WIDTH, IDS = 11, 16, 200
CASES = ["float32", "float32 entropy", "bfloat16", "bfloat16 float32_head entropy", "float32 bias entropy"]
CASES += [f"{case} supports" for case in CASES]
COMPARISON = """
import sys
from tests.unit import test_logit_kernels as here
here.compare_with_kernels(sys.argv[1:])
"""


def score(case):
    """Return log-probs and entropies, and the gradients of hidden states, matrix and bias."""
    generator = torch.Generator().manual_seed(7)
    dtype = torch.bfloat16 if "bfloat16" in case else torch.float32
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    matrix = torch.randn(IDS, WIDTH, generator=generator).to(dtype)
    leaves = [hidden, matrix]
    if "bias" in case:
        leaves.append(torch.randn(IDS, generator=generator).to(dtype))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    found = head.token_logprobs(
        matrix,
        hidden,
        torch.arange(TOKENS) * 17 % IDS,
        torch.linspace(0.6, 1.4, TOKENS),
        bias=leaves[2] if len(leaves) > 2 else None,
        chunk_elements=4 * IDS,
        entropy_gradient="entropy" in case,
        float32_head="float32_head" in case,
        supports=make_supports() if "supports" in case else None,
    )
    weights = torch.linspace(-1, 2, TOKENS)
    goal = (found[0] * weights).sum()
    if "entropy" in case:
        goal = goal + (found[1] * weights.flip(0)).sum()
    return [*(each.detach() for each in found), *torch.autograd.grad(goal, leaves)]


def make_supports():
    """Return sets with each token's target: of one token, of a few, of most, and one that nobody recorded."""
    chosen = np.random.default_rng(5).random((TOKENS, IDS)) < np.linspace(0, 1, TOKENS)[:, None]
    chosen[np.arange(TOKENS), np.arange(TOKENS) * 17 % IDS] = True
    sets = SupportSets.from_bitmaps(np.packbits(chosen, axis=1, bitorder="little"), IDS)
    return SupportSets.from_parts(TOKENS, [(0, sets[:5]), (6, sets[6:])])


def compare_with_kernels(cases):
    """Compare each case with and without kernels. In a process that has Triton's interpreter from its start."""
    from r3async.learner import logit_kernels

    logit_kernels.BLOCK_COLUMNS = 64  # of 200 ids: three blocks, and one in part
    launches = []

    def can_run(logits):
        launches.append(logits.shape)
        return head._has_triton_driver()

    for case in cases:
        expected = score(case)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head, "_can_run_kernels", can_run)
            found = score(case)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype, case
            tolerance = 1e-6 if ours.dtype == torch.float32 else 2**-6  # roundings of bfloat16
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
    assert len(launches) == 2 * 3 * len(cases)  # three chunks, in both passes
    print("compared", len(cases))


@pytest.mark.long
def test_they_give_what_torch_gives():
    done = subprocess.run(
        [sys.executable, "-c", COMPARISON, *CASES],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == f"compared {len(CASES)}", done.stderr


def test_without_a_driver_torch_is_used():
    assert not head._has_triton_driver()


@pytest.mark.parametrize(("gib", "rows"), [(80, 981), (141, 1729), (1000, 7067)])
def test_rows_follow_the_memory_of_the_gpu(monkeypatch, gib, rows):
    class Properties:
        total_memory = gib * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert head.choose_chunk_elements(torch.device("cuda", 0)) // 151_936 == rows
    assert head.choose_chunk_elements(torch.device("cpu")) == head.LOGIT_CHUNK_ELEMENTS
