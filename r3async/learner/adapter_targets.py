"""The matrices that `learner.lora.targets` name; importing this module does not load torch."""

from __future__ import annotations

from collections.abc import Iterable

from r3async.config import LearnerConfig
from r3async.config.learner import is_served_module, matches_target
from r3async.learner.results import LearnerError


def select_targets(config: LearnerConfig, modules: Iterable[tuple[str, bool]]) -> set[str]:
    """Return the names of the model's matrices that have adapters; each matrix comes with whether
    it is a router's.

    With `learner.freeze_router` no router has. Raises `LearnerError` for a target
    that matches none, and for a matrix whose adapter engines cannot be given alone.
    """
    known = sorted(
        {(name, router) for name, router in modules if not (router and config.freeze_router)}
    )
    chosen: set[str] = set()
    for target in config.lora.targets:
        found = {name for name, router in known if matches_target(target, name, router=router)}
        if not found:
            there = sorted(
                {
                    ".".join(p for p in name.split(".")[3:] if not p.isdigit()) or name
                    for name, _ in known
                }
            )
            raise LearnerError(
                f"`learner.lora.targets`: {target!r} names no matrix that can be adapted; there "
                f"are {', '.join(there)}, and `learner.freeze_router` leaves out routers"
            )
        chosen |= found
    refused = sorted(name for name in chosen if not is_served_module(name))
    if config.lora.delivers_adapters and refused:
        raise LearnerError(
            f'`learner.lora.deliver` = "adapter" serves the projections of attention and of dense '
            f"layers, and {refused[0]!r} is none ({len(refused)} in all): vLLM has no CPU kernel "
            "for adapters of experts, and adds none to routers and to latent attention as the "
            'learner does; set `learner.lora.targets` = ["self_attn"], or `learner.lora.deliver` = '
            '"merged"'
        )
    return chosen
