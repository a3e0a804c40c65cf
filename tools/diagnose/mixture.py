"""Causes in a mixture of experts: which experts, with which gates, in which order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .experiments import FIX_CONFIG, FIX_MAPPING, Cause, Experiments, bind_value
from .judge import DivergentStage
from .reference import StageTrial

MAX_SOLVED_TOKENS = 64
"""Number of tokens for which the shares of all experts are solved."""


def _try_gate_form(case: DivergentStage) -> Experiments:
    """Try other forms of the files' gates."""
    if case.expert_ids is None:
        return
    scaling = getattr(case.reference.config, "routed_scaling_factor", None) or 1.0
    probabilities = _compute_probabilities(case)

    def normal(gates: Tensor) -> Tensor:
        return gates / gates.sum(-1, keepdim=True)

    yield (
        lambda t: _set_gates(t, lambda g: normal(g)),
        "gates of the chosen experts add up to 1, and not in the files",
    )
    yield (
        lambda t: _set_gates(t, lambda g: probabilities),
        "gates of the chosen experts do not add up to 1, as they do in the files",
    )
    yield (
        lambda t: _set_gates(t, lambda g: probabilities * scaling),
        "gates are scaled, and not normalised",
    )
    if scaling != 1:
        yield (
            lambda t: _set_gates(t, lambda g: g / scaling),
            f"gates are not multiplied by routed_scaling_factor = {scaling:g}",
        )
    yield (
        lambda t: _set_gates(t, lambda g: torch.full_like(g, 1 / g.shape[1])),
        "all chosen experts have the same gate",
    )


def _try_gate_order(case: DivergentStage) -> Experiments:
    if case.expert_ids is None or case.expert_ids.shape[1] < 2:
        return
    for by in range(1, case.expert_ids.shape[1]):
        yield (
            bind_value(lambda t, by: _set_gates(t, lambda g: g.roll(by, 1)), by),
            f"gates belong to the experts {by} places further on",
        )

    def reverse(gates: Tensor) -> Tensor:
        order = gates.argsort(dim=1)
        return torch.zeros_like(gates).scatter_(1, order, gates.gather(1, order.flip(1)))

    yield lambda t: _set_gates(t, reverse), "the best expert has the smallest gate"


def _try_fewer_experts(case: DivergentStage) -> Experiments:
    if case.expert_ids is None:
        return
    for kept in range(1, case.expert_ids.shape[1]):

        def drop(gates: Tensor, kept: int = kept) -> Tensor:
            least = gates.topk(kept, dim=1).values[:, -1:]
            return torch.where(gates >= least, gates, 0.0)

        yield bind_value(_set_gates, drop), f"only the best {kept} of the chosen experts compute"


def _try_shared_experts(case: DivergentStage) -> Experiments:
    mlp: Any = case.make_trial().module
    shared = next(
        (n for n in ("shared_expert", "shared_experts") if getattr(mlp, n, None) is not None), None
    )
    if shared is None:
        return

    def none(trial: StageTrial) -> None:
        part: Any = trial.module
        getattr(part, shared).down_proj.weight.data.zero_()

    yield none, "shared experts are left out"
    if hasattr(mlp, "shared_expert_gate"):

        def open_gate(trial: StageTrial) -> None:
            part: Any = trial.module
            part.shared_expert_gate.forward = lambda x: torch.full_like(x[..., :1], 40.0)

        yield open_gate, "shared experts have no gate"


def _try_activation(case: DivergentStage) -> Experiments:
    others = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}
    for name, function in others.items():

        def change(trial: StageTrial, function: Any = function) -> None:
            for module in trial.module.modules():
                if hasattr(module, "act_fn"):
                    module.act_fn = _ActivationModule(function)

        yield (
            change,
            (
                f"the activation is {name}, and "
                f"{getattr(case.reference.config, 'hidden_act', 'silu')} in config.json"
            ),
        )


class _ActivationModule(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._function(x)
        return out


def _try_swapped_gate(case: DivergentStage) -> Experiments:
    def change(trial: StageTrial) -> None:
        for module in trial.module.modules():
            both = getattr(module, "gate_up_proj", None)
            if isinstance(both, nn.Parameter):
                both.data = torch.cat(both.data.chunk(2, 1)[::-1], 1)
            elif hasattr(module, "gate_proj"):
                gate = module.gate_proj.weight
                up = module.up_proj.weight
                gate.data, up.data = up.data, gate.data

    yield change, "the projections of gate and values are exchanged: silu(up) * gate"


def _try_permutation(case: DivergentStage) -> Experiments:
    """Find which expert computes in the place of each, from least-squares shares of all
    experts in the output."""
    if case.expert_ids is None:
        return
    shares, rows = _solve_expert_shares(case)
    gates = case.gates if case.gates is not None else _compute_gates(case)
    votes = torch.zeros(shares.shape[1], shares.shape[1])
    for row, token in enumerate(rows):
        for place, expert in enumerate(case.expert_ids[token].tolist()):
            near = (shares[row] - gates[token, place]).abs()
            votes[expert, near.argmin()] += 1
    instead = torch.where(votes.sum(1) > 0, votes.argmax(1), torch.arange(len(votes)))
    moved = [(e, int(to)) for e, to in enumerate(instead) if e != to]
    if moved:
        named = ", ".join(f"{e} by {to}" for e, to in moved[:8])
        yield (
            lambda trial: setattr(trial, "map_experts", lambda ids: instead[ids]),
            f"tokens are computed by other experts than were chosen: those of {named}",
        )


def _solve_expert_shares(case: DivergentStage) -> tuple[Tensor, list[int]]:
    """Return the weight of each expert in the output of some tokens, `[rows, experts]`,
    and these tokens."""
    assert case.expert_ids is not None
    assert case.reference.routing is not None
    experts = case.reference.routing.num_experts
    rows = list(range(min(MAX_SOLVED_TOKENS, len(case.input))))
    x = case.input[rows]
    y = case.output[rows]
    ids = case.expert_ids[rows]

    def outputs(expert: int, gate: float) -> Tensor:
        trial = case.make_trial()
        trial.input = x
        trial.expert_ids = ids
        trial.change_gates = lambda g: torch.cat(
            [torch.full_like(g[:, :1], gate), torch.zeros_like(g[:, 1:])], 1
        )
        trial.map_experts = lambda ids: torch.cat(
            [torch.full_like(ids[:, :1], expert), (ids[:, 1:] * 0 + expert)], 1
        )
        return trial.compute_output()

    shared = outputs(0, 0.0)
    # [rows, hidden, experts]
    each = torch.stack([outputs(e, 1.0) - shared for e in range(experts)], 2)
    return torch.linalg.lstsq(each.double(), (y - shared).double()[..., None]).solution[
        ..., 0
    ].float(), rows


def _compute_gates(case: DivergentStage) -> Tensor:
    kept: list[Tensor] = []
    trial = case.make_trial()

    def keep(gates: Tensor) -> Tensor:
        kept.append(gates.float())
        return gates

    trial.change_gates = keep
    trial.compute_output()
    return kept[0]


def _compute_probabilities(case: DivergentStage) -> Tensor:
    """Return the probabilities of the chosen experts, before they are normalised or scaled."""
    assert case.expert_ids is not None
    trial = case.make_trial()
    router: Any = trial.layer.mlp.gate
    logits = router(case.input)[0].float()
    sigmoid = hasattr(router, "e_score_correction_bias")
    scores: Tensor = logits.sigmoid() if sigmoid else logits.softmax(-1)
    return scores.gather(1, case.expert_ids).detach()


def _set_gates(trial: StageTrial, gates: Any) -> None:
    trial.change_gates = gates


def _try_row_order(case: DivergentStage) -> Experiments:
    """Try another order of the rows of the router's matrix."""
    distance = torch.cdist(case.output.T.double(), case.expected.T.double())
    order = distance.argmin(1)
    moved = [(e, int(source)) for e, source in enumerate(order) if e != source]
    if moved and len(order.unique()) == len(order):
        named = ", ".join(f"{e} has those of {source}" for e, source in moved[:8])
        yield (
            lambda trial: trial.module.weight.data.copy_(trial.module.weight.data[order].clone()),
            f"scores of experts are exchanged: {named}",
        )


def _try_stale_rows(case: DivergentStage) -> Experiments:
    difference = (case.output - case.expected).norm(dim=0) / case.expected.norm(dim=0).clamp(
        min=1e-12
    )
    bad = (difference > case.tolerance).nonzero()[:, 0]
    if len(bad) <= len(difference) // 2:
        fitted = torch.linalg.lstsq(case.input.double(), case.output.double()).solution.T.float()

        def change(trial: StageTrial) -> None:
            part: Any = trial.module
            part.weight.data[bad] = fitted[bad]

        yield (
            change,
            (
                f"rows {', '.join(map(str, bad.tolist()[:8]))} of its matrix are not the "
                "files', the others are"
            ),
        )


MIXTURE_CAUSES = (
    Cause(
        "gate form",
        ("mlp",),
        _try_gate_form,
        "compare norm_topk_prob and routed_scaling_factor of both",
    ),
    Cause(
        "gate order",
        ("mlp",),
        _try_gate_order,
        "gates and chosen experts are not in the same order",
    ),
    Cause("gate and up projection", ("mlp",), _try_swapped_gate, FIX_MAPPING),
    Cause("expert permutation", ("mlp",), _try_permutation, FIX_MAPPING),
    Cause("number of experts", ("mlp",), _try_fewer_experts, "compare num_experts_per_tok of both"),
    Cause("shared experts", ("mlp",), _try_shared_experts, FIX_MAPPING),
    Cause("activation", ("mlp",), _try_activation, FIX_CONFIG),
    Cause("expert permutation", ("router",), _try_row_order, FIX_MAPPING),
    Cause(
        "stale rows",
        ("router",),
        _try_stale_rows,
        "the router's matrix was not updated whole",
        is_fitted=True,
    ),
)
