"""Copies that are joined do what they did one by one; a plan does what the loader did that it was made from."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from r3async.rollout.vllm.load_plan import (
    ModuleLoad,
    PinnedBuffer,
    PinnedUploader,
    TensorCopy,
    TensorFill,
    merge_copies,
    split_copy,
)


@st.composite
def experts(draw):
    """How a loader could fill one parameter, `[experts, rows, columns]`, from tensors in a file in some order: an expert's
    rows in one to three tensors, all or a part of their columns. Returns copies, and the sizes of file and parameter."""
    count, parts = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    wide = columns + draw(st.integers(0, 2))
    names = [(e, part) for e in range(count) for part in range(parts)]
    kinds = {
        "by expert": names,
        "by part": sorted(names, key=lambda n: n[::-1]),
        "by name": sorted(names, key=str),
        "any": draw(st.permutations(names)),
    }
    order = kinds[draw(st.sampled_from(sorted(kinds)))]
    gap, lead = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    copies, at = [], lead
    for e, part in order:
        offset = (e * parts + part) * rows * columns
        copies.append(TensorCopy("w", torch.float32, 4 * at, offset, ((rows, wide, columns), (columns, 1, 1))))
        at += rows * wide + gap
    return draw(st.permutations(copies)), at, count * parts * rows * columns


@given(experts())
def test_joined_copies_copy_the_same(made):
    copies, file, size = made
    data = torch.arange(float(file)).view(torch.uint8)
    want, found = torch.full((size,), -1.0), torch.full((size,), -1.0)
    for copy in copies:
        copy.view_target(want).copy_(copy.view_source(data))
    assert (want >= 0).all()
    few = merge_copies(copies)
    for copy in few:
        copy.view_target(found).copy_(copy.view_source(data))
    assert torch.equal(want, found)
    assert len(few) <= len(copies)


def stacked(order: list[str], experts: int = 64) -> list[TensorCopy]:
    """gate, up and down of 64 experts in a file, and where vLLM puts them: gate over up, one expert after the other."""
    shapes, copies, at = {"gate": (3, 5), "up": (3, 5), "down": (5, 3)}, [], 0
    tensors = [(e, x) for e in range(experts) for x in order if x in shapes]
    if "each" in order:
        tensors = [(e, x) for x in order if x in shapes for e in range(experts)]
    for e, x in tensors:
        rows, columns = shapes[x]
        parameter, offset = ("w2", 15 * e) if x == "down" else ("w13", 30 * e + 15 * (x == "up"))
        copies.append(
            TensorCopy(parameter, torch.bfloat16, 2 * at, offset, ((rows, columns, columns), (columns, 1, 1)))
        )
        at += rows * columns
    return copies


def test_a_layers_experts_are_few_copies_however_they_lie():
    assert len(merge_copies(stacked(["gate", "up", "down"]))) == 2
    assert len(merge_copies(stacked(["up", "gate", "down"]))) == 4
    assert len(merge_copies(stacked(["each", "gate", "up", "down"]))) == 2


def test_parts_of_rows_stay_strided():
    """The columns that a tensor-parallel rank has of each expert."""
    copies = [TensorCopy("w2", torch.float32, 4 * 24 * e, 12 * e, ((4, 6, 3), (3, 1, 1))) for e in range(5)]
    (one,) = merge_copies(copies)
    assert math.prod(step[0] for step in one.dimensions) == 5 * 12
    data, parameter = torch.arange(120.0).view(torch.uint8), torch.zeros(5, 4, 3)
    one.view_target(parameter).copy_(one.view_source(data))
    assert torch.equal(parameter, torch.arange(120.0).reshape(5, 4, 6)[..., :3])


def test_padding_is_filled_and_what_is_left_out_shows():
    module = torch.nn.Linear(3, 4, bias=True)
    data = torch.arange(6.0).view(torch.uint8)
    copies = [TensorCopy("weight", torch.float32, 0, 0, ((2, 3, 3), (3, 1, 1)))]
    with torch.no_grad():
        load = ModuleLoad(copies, [TensorFill("weight", 6, (2, 3), (3, 1), 0.0)])
        load.fill_module(module, data, True, torch._foreach_copy_)
    assert module.weight.tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0], [0, 0, 0]]
    assert (module.bias == 87).all()


@given(experts(), st.integers(4, 200))
def test_pieces_of_a_copy_copy_the_same_and_none_is_larger_than_asked_for(made, piece_bytes):
    copies, file, size = made
    data = torch.arange(float(file)).view(torch.uint8)
    want, found = torch.full((size,), -1.0), torch.full((size,), -1.0)
    for copy in merge_copies(copies):
        copy.view_target(want).copy_(copy.view_source(data))
        for target, source in split_copy(copy.view_target(found), copy.view_source(data), piece_bytes):
            assert target.nbytes <= piece_bytes
            target.copy_(source)
    assert torch.equal(want, found)


class LateStream:
    """A stream that does nothing before the host waits for it."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], object]] = []

    def submit(self, work: Callable[[], object]) -> None:
        self._pending.append(work)

    def make_event(self) -> Mock:
        event, reached = Mock(), [0]

        def run_until_reached():
            for work in self._pending[: reached[0]]:
                work()
            self._pending[: reached[0]] = [lambda: None] * reached[0]

        event.record.side_effect = lambda: reached.__setitem__(0, len(self._pending))
        event.synchronize.side_effect = run_until_reached
        return event


def test_no_buffer_is_packed_while_it_is_uploaded():
    stream = LateStream()

    class LateTensor(torch.Tensor):
        def copy_(self, source, non_blocking=False):
            assert non_blocking
            stream.submit(lambda: super(LateTensor, self).copy_(source))

    data = torch.arange(1200.0)
    held = torch.zeros(3, 4, 200, dtype=torch.bfloat16).as_subclass(LateTensor)
    events = [stream.make_event(), stream.make_event()]
    buffers = [PinnedBuffer(torch.empty(160, dtype=torch.uint8), event) for event in events]
    with ThreadPoolExecutor(2) as pool:
        uploader = PinnedUploader(pool, buffers, piece_bytes=80)
        for layer in range(3):
            rows = data[400 * layer :][:400].view(2, 200)
            uploader.copy_tensors([held[layer, ::2], held[layer, 1]], [rows, -rows[0]])
    for event in events:
        event.synchronize()
    want = data.bfloat16().view(3, 2, 200)
    assert torch.equal(held.as_subclass(torch.Tensor)[:, ::2], want)
    assert torch.equal(held.as_subclass(torch.Tensor)[:, 1], -want[:, 0])
