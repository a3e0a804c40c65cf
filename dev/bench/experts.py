"""The benchmark `bench experts`: a layer's experts as stacked matrices against one expert after the other, on the same
tokens."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from dev.bench.jobs import Say, table

if TYPE_CHECKING:
    from torch import Tensor

REPEATS = 15


class Shape(msgspec.Struct, frozen=True):
    """The sizes of a layer: each of `tokens` goes to `top_k` of `experts`, and every expert has three matrices of
    `hidden_size` and `width`."""

    name: str
    tokens: int
    experts: int
    top_k: int
    hidden_size: int
    width: int
    dtype: str


class Form(msgspec.Struct, frozen=True):
    """Cost of the forward and backward pass of one form.

    Attributes:
        seconds: CPU seconds, the median of all repeats.
        least: the smallest of all repeats.
        most: the largest of all repeats.
        operations: number of torch operations.
        waits: number of these operations that the host would have to wait for on a GPU.
    """

    seconds: float
    least: float
    most: float
    operations: int
    waits: int


class Compared(msgspec.Struct, frozen=True):
    """Both forms on one shape.

    Attributes:
        ratio: the least time of the stacks over that of the loop.
        difference: the largest difference between stacks and loop in result and gradients, relative to their norms.
    """

    shape: Shape
    loop: Form
    stacks: Form
    ratio: float
    difference: float


class Report(msgspec.Struct, frozen=True):
    """The report of `bench experts`. Both forms took turns in one process with one thread."""

    benchmark: str
    compared: list[Compared]


QUICK = [Shape("small", 64, 8, 2, 16, 8, "float32")]
SHAPES = [
    Shape("quickstart", 4096, 8, 2, 128, 64, "float32"),
    Shape("quickstart, few tokens", 256, 8, 2, 128, 64, "float32"),
    Shape("many experts", 512, 128, 8, 256, 96, "float32"),
    Shape("many experts", 512, 128, 8, 256, 96, "bfloat16"),
]


def run(quick: bool, say: Say) -> Report:
    """Compare both forms on all shapes, or on one small shape if `quick`."""
    compared = []
    for shape in QUICK if quick else SHAPES:
        say(f"{shape.name}, {shape.dtype}: {shape.tokens} tokens to {shape.top_k} of {shape.experts} experts")
        compared.append(_compare(shape, 2 if quick else REPEATS))
    return Report("experts", compared)


def render(report: Report) -> str:
    """Format the report as a table for people."""
    rows = [
        (
            f"{c.shape.name}, {c.shape.dtype}",
            *(f"{1e3 * f.seconds:.1f} ({1e3 * f.least:.1f}..{1e3 * f.most:.1f})" for f in (c.loop, c.stacks)),
            f"{c.ratio:.2f}",
            f"{c.loop.operations} / {c.stacks.operations}",
            f"{c.loop.waits} / {c.stacks.waits}",
            f"{c.difference:.1e}",
        )
        for c in report.compared
    ]
    head = ("shape", "loop, CPU ms", "stacks, CPU ms", "ratio", "operations", "waits", "difference")
    return "\n".join(table(head, rows))


def _loop(x: Tensor, gates: Tensor, chosen: Tensor, first: Tensor, second: Tensor, top_k: int) -> Tensor:
    """Run one expert after the other: masks sort the tokens, each expert runs separately, and a scatter adds up the
    outputs."""
    import torch
    import torch.nn.functional as F

    counts = chosen.sum(dim=0).tolist()
    by_expert = chosen.T.contiguous()
    tokens = torch.arange(len(x), device=x.device).expand_as(by_expert).masked_select(by_expert)
    shares = gates.T.contiguous().masked_select(by_expert)
    done = []
    for rows, share, up, down in zip(
        x.index_select(0, tokens).split(counts), shares.split(counts), first, second, strict=True
    ):
        gate, wide = F.linear(rows, up).chunk(2, dim=-1)
        done.append(F.linear((F.silu(gate) * wide * share[:, None]).to(x.dtype), down))
    return torch.zeros_like(x).scatter_add(0, tokens[:, None].expand(-1, x.shape[1]), torch.cat(done))


def _stacks(x: Tensor, gates: Tensor, chosen: Tensor, first: Tensor, second: Tensor, top_k: int) -> Tensor:
    """Run all experts as stacked matrices, as the learner does."""
    from r3async.learner.kernels import ExpertDispatch, WeightedSwiGLU, grouped_linear

    sent = ExpertDispatch(chosen, top_k)
    wide = grouped_linear(sent.dispatch_rows(x), first, sent.expert_counts)
    return sent.combine_outputs(
        grouped_linear(WeightedSwiGLU.apply(wide, sent.gather_gates(gates)), second, sent.expert_counts)
    )


def _compare(shape: Shape, repeats: int) -> Compared:
    import torch

    torch.set_num_threads(1)
    rng, dtype = torch.Generator().manual_seed(0), getattr(torch, shape.dtype)
    x, first, second, grad = (
        0.1 * torch.randn(*size, generator=rng).to(dtype)
        for size in (
            (shape.tokens, shape.hidden_size),
            (shape.experts, 2 * shape.width, shape.hidden_size),
            (shape.experts, shape.hidden_size, shape.width),
            (shape.tokens, shape.hidden_size),
        )
    )
    gates = torch.rand(shape.tokens, shape.experts, generator=rng)
    chosen = torch.zeros(shape.tokens, shape.experts, dtype=torch.bool)
    chosen.scatter_(1, gates.topk(shape.top_k).indices, True)
    x, gates = x.requires_grad_(), gates.requires_grad_()
    # The loop has separate parameters for every expert, as a model that runs one expert after the other has them.
    matrices: dict[Any, list[Any]] = {
        _loop: [[w.clone().requires_grad_() for w in stack] for stack in (first, second)],
        _stacks: [first.requires_grad_(), second.requires_grad_()],
    }
    seconds: dict[Any, list[float]] = {_loop: [], _stacks: []}
    made: dict[Any, list[Tensor]] = {}
    for _ in range(repeats):
        for form, (one, two) in matrices.items():
            leaves = [x, gates, *one, *two] if form is _loop else [x, gates, one, two]
            for leaf in leaves:
                leaf.grad = None
            began = time.process_time()
            out = form(x, gates, chosen, one, two, shape.top_k)
            out.backward(grad)
            seconds[form].append(time.process_time() - began)
            if form not in made:
                of_weights = [
                    torch.stack([w.grad for w in stack]) if form is _loop else stack.grad for stack in (one, two)
                ]
                made[form] = [out.detach(), x.grad, gates.grad, *of_weights]
    pairs = zip(made[_stacks], made[_loop], strict=True)
    difference = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    loop, stacks = (
        _form(seconds[form], form, x, gates, chosen, *matrices[form], shape.top_k, grad) for form in matrices
    )
    return Compared(shape, loop, stacks, stacks.least / loop.least, difference)


def _form(seconds: list[float], form: Any, *given: Any) -> Form:
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = {"all": 0, "waits": 0}

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts["all"] += 1
            counts["waits"] += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select")
            return func(*args, **(kwargs or {}))

    *inputs, grad = given
    with Counted():
        form(*inputs).backward(grad)
    # No dispatcher sees the single read of a CPU tensor by `tolist`, so the loop's wait is counted by hand.
    waits = counts["waits"] + (form is _loop)
    return Form(median(seconds), min(seconds), max(seconds), counts["all"], waits)
