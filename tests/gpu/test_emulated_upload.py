"""A published file goes to a GPU's parameters through pinned memory, as it would have gone in plain copies."""

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from dev.gpu.library import load_library
from r3async.rollout.vllm import load_plan
from r3async.rollout.vllm.load_plan import ModuleLoad, TensorCopy, merge_copies, open_copier
from tests.helpers.emulated import need_emulated_device

EXPERTS, ROWS, COLUMNS = 16, 24, 40
BUFFER_BYTES = 8192


def _list_copies() -> list[TensorCopy]:
    """What one of two ranks has of each expert's gate, up and down, and a matrix that it keeps in another dtype."""
    copies, at, half = [], 0, ROWS // 2
    for e in range(EXPERTS):
        for part in range(2):
            offset = (2 * e + part) * half * COLUMNS
            copies.append(
                TensorCopy("w13", torch.bfloat16, 2 * at, offset, ((half, COLUMNS, COLUMNS), (COLUMNS, 1, 1)))
            )
            at += ROWS * COLUMNS
        columns = ((COLUMNS, ROWS, half), (half, 1, 1))
        copies.append(TensorCopy("w2", torch.bfloat16, 2 * at, e * COLUMNS * half, columns))
        at += ROWS * COLUMNS
    return [*copies, TensorCopy("router", torch.float32, 2 * at, 0, ((EXPERTS * COLUMNS, 1, 1),))]


def _load_on_device() -> tuple[bool, Counter[str], list[str]]:
    """Load a module on both devices. Returns whether they are equal, and what the device had to do."""
    from dev.gpu.device import DEVICE, counts, install_device, wait_sites

    install_device()
    load_plan._UPLOAD_BYTES = BUFFER_BYTES
    shapes = {"w13": (EXPERTS, ROWS, COLUMNS), "w2": (EXPERTS, COLUMNS, ROWS // 2), "router": (EXPERTS, COLUMNS)}
    data = torch.cat([torch.randn(EXPERTS * 3 * ROWS * COLUMNS).bfloat16().view(torch.uint8),
                      torch.randn(EXPERTS * COLUMNS).view(torch.uint8)])  # fmt: skip
    load, modules = ModuleLoad(merge_copies(_list_copies())), []
    for device in (torch.device("cpu"), DEVICE):
        module = torch.nn.Module()
        for name, shape in shapes.items():
            values = torch.full(shape, 7.0, dtype=torch.bfloat16, device=device)
            setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
        counts.clear(), wait_sites.clear()
        with torch.no_grad(), open_copier(device) as copy_tensors:
            load.fill_module(module, data, False, copy_tensors)
        modules.append(module)
    counted, sites = Counter(counts), list(wait_sites)
    on_cpu, on_device = (dict(module.named_parameters()) for module in modules)
    return all(torch.equal(on_device[name].cpu(), on_cpu[name]) for name in shapes), counted, sites


@pytest.mark.timeout(300)
def test_a_file_is_uploaded_from_pinned_memory_bit_by_bit():
    need_emulated_device()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), load_library) as process:
        equal, counted, sites = process.submit(_load_on_device).result(timeout=240)
    assert equal
    nbytes = 2 * EXPERTS * (2 * ROWS // 2 * COLUMNS + COLUMNS * ROWS // 2 + COLUMNS)
    assert counted["uploads"] >= nbytes / (BUFFER_BYTES / 4)
    assert counted["waits"] <= nbytes / BUFFER_BYTES + 4, sites  # a wait for each buffer, and none for a copy
