"""Causes in a mixture of experts: which experts, with which gates, in which order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from r3async.tools.diagnose.experiments import FIX_CONFIG, FIX_MAPPING, Cause, Found, given
from r3async.tools.diagnose.judge import Case
from r3async.tools.diagnose.reference import Trial

MOST_ROWS = 64
"""Tokens of which the shares of all experts are found out."""


def _gate_form(case: Case) -> Found:
    """Gates of the files in another form."""
    if case.ids is None:
        return
    scaling = getattr(case.reference.config, "routed_scaling_factor", None) or 1.0
    probabilities = _probabilities(case)

    def normal(gates: Tensor) -> Tensor:
        return gates / gates.sum(-1, keepdim=True)

    yield lambda t: _with(t, lambda g: normal(g)), "gates of the chosen experts add up to 1, and not in the files"
    yield (
        lambda t: _with(t, lambda g: probabilities),
        "gates of the chosen experts do not add up to 1, as they do in the files",
    )
    yield lambda t: _with(t, lambda g: probabilities * scaling), "gates are scaled, and not normalised"
    if scaling != 1:
        yield (
            lambda t: _with(t, lambda g: g / scaling),
            f"gates are not multiplied by routed_scaling_factor = {scaling:g}",
        )
    yield lambda t: _with(t, lambda g: torch.full_like(g, 1 / g.shape[1])), "all chosen experts have the same gate"


def _gate_order(case: Case) -> Found:
    if case.ids is None or case.ids.shape[1] < 2:
        return
    for by in range(1, case.ids.shape[1]):
        yield (
            given(lambda t, by: _with(t, lambda g: g.roll(by, 1)), by),
            f"gates belong to the experts {by} places further on",
        )

    def reverse(gates: Tensor) -> Tensor:
        order = gates.argsort(dim=1)
        return torch.zeros_like(gates).scatter_(1, order, gates.gather(1, order.flip(1)))

    yield lambda t: _with(t, reverse), "the best expert has the smallest gate"


def _fewer(case: Case) -> Found:
    if case.ids is None:
        return
    for kept in range(1, case.ids.shape[1]):

        def drop(gates: Tensor, kept: int = kept) -> Tensor:
            least = gates.topk(kept, dim=1).values[:, -1:]
            return torch.where(gates >= least, gates, 0.0)

        yield given(_with, drop), f"only the best {kept} of the chosen experts compute"


def _shared(case: Case) -> Found:
    mlp: Any = case.trial().part
    shared = next((n for n in ("shared_expert", "shared_experts") if getattr(mlp, n, None) is not None), None)
    if shared is None:
        return

    def none(trial: Trial) -> None:
        part: Any = trial.part
        getattr(part, shared).down_proj.weight.data.zero_()

    yield none, "shared experts are left out"
    if hasattr(mlp, "shared_expert_gate"):

        def open_gate(trial: Trial) -> None:
            part: Any = trial.part
            part.shared_expert_gate.forward = lambda x: torch.full_like(x[..., :1], 40.0)

        yield open_gate, "shared experts have no gate"


def _activation(case: Case) -> Found:
    others = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}
    for name, function in others.items():

        def change(trial: Trial, function: Any = function) -> None:
            for module in trial.part.modules():
                if hasattr(module, "act_fn"):
                    module.act_fn = _Function(function)

        yield (
            change,
            f"the activation is {name}, and {getattr(case.reference.config, 'hidden_act', 'silu')} in config.json",
        )


class _Function(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._function(x)
        return out


def _gate_and_up(case: Case) -> Found:
    def change(trial: Trial) -> None:
        for module in trial.part.modules():
            both = getattr(module, "gate_up_proj", None)
            if isinstance(both, nn.Parameter):
                both.data = torch.cat(both.data.chunk(2, 1)[::-1], 1)
            elif hasattr(module, "gate_proj"):
                gate, up = module.gate_proj.weight, module.up_proj.weight
                gate.data, up.data = up.data, gate.data

    yield change, "the projections of gate and values are exchanged: silu(up) * gate"


def _permutation(case: Case) -> Found:
    """Which expert computes in the place of each: by the shares of all experts in what came out, by least squares."""
    if case.ids is None:
        return
    shares, rows = _shares(case)
    gates = case.gates if case.gates is not None else _gates(case)
    votes = torch.zeros(shares.shape[1], shares.shape[1])
    for row, token in enumerate(rows):
        for place, expert in enumerate(case.ids[token].tolist()):
            near = (shares[row] - gates[token, place]).abs()
            votes[expert, near.argmin()] += 1
    instead = torch.where(votes.sum(1) > 0, votes.argmax(1), torch.arange(len(votes)))
    moved = [(e, int(to)) for e, to in enumerate(instead) if e != to]
    if moved:
        named = ", ".join(f"{e} by {to}" for e, to in moved[:8])
        yield (
            lambda trial: setattr(trial, "experts", lambda ids: instead[ids]),
            f"tokens are computed by other experts than were chosen: those of {named}",
        )


def _shares(case: Case) -> tuple[Tensor, list[int]]:
    """`[rows, experts]`: with which weight each expert is in what came out of some tokens, and which tokens these are."""
    assert case.ids is not None
    assert case.reference.routing is not None
    experts, rows = case.reference.routing.num_experts, list(range(min(MOST_ROWS, len(case.x))))
    x, y, ids = case.x[rows], case.y[rows], case.ids[rows]

    def outputs(expert: int, gate: float) -> Tensor:
        trial = case.trial()
        trial.x, trial.ids = x, ids
        trial.gates = lambda g: torch.cat([torch.full_like(g[:, :1], gate), torch.zeros_like(g[:, 1:])], 1)
        trial.experts = lambda ids: torch.cat([torch.full_like(ids[:, :1], expert), (ids[:, 1:] * 0 + expert)], 1)
        return trial.result()

    shared = outputs(0, 0.0)
    each = torch.stack([outputs(e, 1.0) - shared for e in range(experts)], 2)  # [rows, hidden, experts]
    return torch.linalg.lstsq(each.double(), (y - shared).double()[..., None]).solution[..., 0].float(), rows


def _gates(case: Case) -> Tensor:
    kept: list[Tensor] = []
    trial = case.trial()

    def keep(gates: Tensor) -> Tensor:
        kept.append(gates.float())
        return gates

    trial.gates = keep
    trial.result()
    return kept[0]


def _probabilities(case: Case) -> Tensor:
    """Of the chosen experts, before they are normalised or scaled."""
    assert case.ids is not None
    trial = case.trial()
    router: Any = trial.layer.mlp.gate
    logits = router(case.x)[0].float()
    sigmoid = hasattr(router, "e_score_correction_bias")
    scores: Tensor = logits.sigmoid() if sigmoid else logits.softmax(-1)
    return scores.gather(1, case.ids).detach()


def _with(trial: Trial, gates: Any) -> None:
    trial.gates = gates


def _rows(case: Case) -> Found:
    """Rows of the router's matrix in another order."""
    distance = torch.cdist(case.y.T.double(), case.expected.T.double())
    order = distance.argmin(1)
    moved = [(e, int(source)) for e, source in enumerate(order) if e != source]
    if moved and len(order.unique()) == len(order):
        named = ", ".join(f"{e} has those of {source}" for e, source in moved[:8])
        yield (
            lambda trial: trial.part.weight.data.copy_(trial.part.weight.data[order].clone()),
            f"scores of experts are exchanged: {named}",
        )


def _some_rows(case: Case) -> Found:
    difference = (case.y - case.expected).norm(dim=0) / case.expected.norm(dim=0).clamp(min=1e-12)
    bad = (difference > case.tolerance).nonzero()[:, 0]
    if len(bad) <= len(difference) // 2:
        fitted = torch.linalg.lstsq(case.x.double(), case.y.double()).solution.T.float()

        def change(trial: Trial) -> None:
            part: Any = trial.part
            part.weight.data[bad] = fitted[bad]

        yield change, f"rows {', '.join(map(str, bad.tolist()[:8]))} of its matrix are not the files', the others are"


CAUSES = (
    Cause("gate form", ("mlp",), _gate_form, "compare norm_topk_prob and routed_scaling_factor of both"),
    Cause("gate order", ("mlp",), _gate_order, "gates and chosen experts are not in the same order"),
    Cause("gate and up projection", ("mlp",), _gate_and_up, FIX_MAPPING),
    Cause("expert permutation", ("mlp",), _permutation, FIX_MAPPING),
    Cause("number of experts", ("mlp",), _fewer, "compare num_experts_per_tok of both"),
    Cause("shared experts", ("mlp",), _shared, FIX_MAPPING),
    Cause("activation", ("mlp",), _activation, FIX_CONFIG),
    Cause("expert permutation", ("router",), _rows, FIX_MAPPING),
    Cause("stale rows", ("router",), _some_rows, "the router's matrix was not updated whole", fitted=True),
)
