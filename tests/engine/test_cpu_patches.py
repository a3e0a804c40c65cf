"""What is patched in vLLM for the CPU computes what vLLM computes without it."""

import pytest
import torch
from vllm import ir
from vllm.model_executor.layers import layernorm  # noqa: F401

from r3async.rollout.vllm import cpu_patches
from r3async.rollout.vllm.cpu_patches import NORM_KERNELS, norm_kernels_equal_native, register_norm_kernels

pytestmark = pytest.mark.engine
NORM, ADD_AND_NORM = ir.ops.rms_norm, ir.ops.fused_add_rms_norm


@pytest.fixture
def kernels():
    """The norms of vLLM, its kernels first."""
    register_norm_kernels()
    register_norm_kernels()
    norm_kernels_equal_native.cache_clear()
    with NORM.set_priority([NORM_KERNELS, "native"]), ADD_AND_NORM.set_priority([NORM_KERNELS, "native"]):
        yield
    norm_kernels_equal_native.cache_clear()


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).mul(3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x", [(7, 64), (1, 2048), (5, 3, 32)])
def test_norms_are_computed_by_vllms_kernels_as_by_its_native_forms(kernels, x, dtype):
    if dtype == torch.bfloat16 and not norm_kernels_equal_native(dtype):
        pytest.skip("without AVX-512 the kernels cut numbers off")
    x = rows(*x, dtype=dtype)
    for given in (x, rows(*x.shape[:-1], 2 * x.shape[-1], dtype=dtype)[..., : x.shape[-1]]):
        weight, residual = rows(x.shape[-1], dtype=dtype), rows(*x.shape[:-1], x.shape[-1], dtype=dtype) * 2
        assert NORM.dispatch(given, weight, 1e-5).provider == NORM_KERNELS
        close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 0}
        whole = given.clone()
        torch.testing.assert_close(
            NORM(given, weight, 1e-5), NORM.impls["native"].impl_fn(whole, weight, 1e-5), **close
        )
        native = ADD_AND_NORM.impls["native"].impl_fn(whole, residual.clone(), weight, 1e-5)
        ours = ADD_AND_NORM.maybe_inplace(given.clone(), residual, weight, 1e-5)
        torch.testing.assert_close(ours[0], native[0], **close)
        assert torch.equal(ours[1], native[1])


def test_what_the_kernels_cannot_compute_stays_in_the_native_form(kernels):
    x, weight = rows(3, 32), rows(32)
    for given in (
        (x, None, 1e-5),
        (x, weight, 1e-5, 16),
        (x, weight.bfloat16(), 1e-5),
        (rows(3, 12), rows(12), 1e-5),
        (x.double(), weight.double(), 1e-5),
    ):
        assert NORM.dispatch(*given).provider == "native"
        assert ADD_AND_NORM.dispatch(given[0], *given).provider == "native"
    assert ADD_AND_NORM.dispatch(x, x.bfloat16(), weight, 1e-5).provider == "native"
    assert ADD_AND_NORM.dispatch(x, rows(3, 64)[:, :32], weight, 1e-5).provider == "native"


def test_kernels_that_compute_something_else_are_not_used(kernels, monkeypatch, caplog):
    def off(x, weight, epsilon, variance_size=None):
        return NORM.impls["native"].impl_fn(x, weight, epsilon + 1e-3)

    assert NORM.dispatch(rows(3, 32), rows(32), 1e-5).provider == NORM_KERNELS
    norm_kernels_equal_native.cache_clear()
    caplog.set_level("INFO", cpu_patches.logger.name)
    monkeypatch.setattr(NORM.impls[NORM_KERNELS], "impl_fn", off)
    assert NORM.dispatch(rows(3, 32), rows(32), 1e-5).provider == "native"
    assert "stay in their native forms for torch.float32, " in caplog.text


def test_kernels_that_cut_off_what_they_should_round_are_not_used(kernels, monkeypatch):
    def cut(x, x_residual, weight, epsilon, variance_size=None):
        whole = x.float() + x_residual.float()
        total = (whole.view(torch.int32) & -(1 << 16)).view(torch.float32).to(x.dtype)
        return NORM.impls["native"].impl_fn(total, weight, epsilon), total

    monkeypatch.setattr(NORM.impls[NORM_KERNELS], "impl_fn", NORM.impls["native"].impl_fn)
    monkeypatch.setattr(ADD_AND_NORM.impls[NORM_KERNELS], "impl_fn", ADD_AND_NORM.impls["native"].impl_fn)
    assert norm_kernels_equal_native(torch.bfloat16)
    norm_kernels_equal_native.cache_clear()
    monkeypatch.setattr(ADD_AND_NORM.impls[NORM_KERNELS], "impl_fn", cut)
    assert not norm_kernels_equal_native(torch.bfloat16)
