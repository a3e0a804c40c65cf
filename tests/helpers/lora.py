"""Learners with adapters: their gradients, and those of full training at the same weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from r3async.config import Config, LoraConfig
from r3async.learner import build_learner
from r3async.learner.backend import LearnerBackend
from tests.helpers import checkpoint as hc
from tests.helpers.parity import LENGTHS, batch, of_rank
from tests.helpers.steps import train_minibatch

RANK, ALPHA = 3, 6.0


def with_lora(config: Config, *targets: str, **changes: Any) -> Config:
    lora = LoraConfig(rank=RANK, alpha=ALPHA, **({"targets": list(targets)} if targets else {}))
    learner = msgspec.structs.replace(config.learner, lora=lora, **changes)
    return msgspec.structs.replace(config, learner=learner)


def alone(config: Config, dtype: str = "float32") -> Config:
    """Have engines of `dtype` get the adapters alone."""
    lora = msgspec.structs.replace(config.learner.lora, deliver="adapter")
    return msgspec.structs.replace(
        config,
        learner=msgspec.structs.replace(config.learner, lora=lora),
        generator=msgspec.structs.replace(config.generator, dtype=dtype),
    )


def without_lora(config: Config) -> Config:
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, lora=LoraConfig()))


def settings(backend: str, **options: Any) -> Config:
    """Return a configuration without weight decay and without warm-up, whose steps do almost nothing."""
    config = hc.settings(backend, **options)
    return msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, warmup_steps=0, weight_decay=0.0)
    )


def gradients_of_step(
    learner: LearnerBackend, lengths: Sequence[int] = LENGTHS
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradients that the optimizer got on this rank, before clipping, by the names of a checkpoint, and the
    global norm. The step's samples have `lengths`."""
    config, optimizer = learner.config, learner.optimizer
    p = config.learner.parallel
    rank = dist.get_rank() if p.world_size > 1 else 0
    taken: list[torch.Tensor] = []
    norm = optimizer.reducer.compute_squared_norm

    def capture(gradients):
        taken.extend(g.detach().clone() for g in gradients)
        return norm(gradients)

    optimizer.reducer.compute_squared_norm = capture
    recorded = config.routing.replay != "off"
    micro_batches = batch(lengths=lengths, routes=recorded)
    metrics = train_minibatch(learner, of_rank(micro_batches, rank // (p.tp * p.cp) % p.dp, p.dp)).metrics
    optimizer.reducer.compute_squared_norm = norm
    out = {}
    for held, gradient in zip(learner.trained_slices(), taken, strict=True):
        for place, part in zip(held.places, held.layout.split(gradient), strict=True):
            out[place.name] = part
    return out, metrics["grad_norm"]


def randomize(learner: LearnerBackend, seed: int = 5) -> None:
    """Set the adapters to values that change the model, the same for any number of ranks."""
    assert learner.adapters is not None
    with torch.no_grad():
        for one in learner.adapters.list_parameters():
            (place,) = one.shard_slice.places
            if ".lora_B." in place.name:
                rng = torch.Generator().manual_seed(seed + len(place.name) + sum(map(ord, place.name)))
                whole = torch.randn(place.shape, generator=rng) * 0.1
                box = tuple(slice(o, o + n) for o, n in zip(place.offset, place.size, strict=True))
                one.parameter.copy_(whole[box])
    learner.adapters.merge_weights()


def adapter_gradients(
    path: Path, config: Config, merged: Path | None = None, lengths: Sequence[int] = LENGTHS
) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """Run on a rank: return the gradients of its adapters, which are not 0, by name, their norm, and the adapters
    themselves.

    The merged model is written to `merged`.
    """
    learner = build_learner(config, path)
    try:
        randomize(learner)
        if merged is not None:
            learner.save_pretrained(merged)
        values = {
            one.shard_slice.places[0].name: one.parameter.detach().clone() for one in learner.adapters.list_parameters()
        }
        gradients, norm = gradients_of_step(learner, lengths)
        return gradients, norm, values
    finally:
        learner.close()


def full_gradients(path: Path, config: Config, lengths: Sequence[int] = LENGTHS) -> dict[str, torch.Tensor]:
    """Return the gradients of all weights."""
    learner = build_learner(without_lora(config), path)
    try:
        return gradients_of_step(learner, lengths)[0]
    finally:
        learner.close()


def projected(full: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Project `full` on the subspace of the adapters `values`, in float64."""
    out, scale = {}, ALPHA / RANK
    for name in values:
        module, side = name.removesuffix(".weight").rsplit(".", 1)
        g = full[f"{module}.weight" if f"{module}.weight" in full else module].double()
        a, b = (values[f"{module}.{s}.weight"].double() for s in ("lora_A", "lora_B"))
        out[name] = scale * (b.mT @ g if side == "lora_A" else g @ a.mT)
    return out


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, exact in expected.items():
        scale = float(exact.norm())
        assert float((found[name].double() - exact).norm()) <= 1e-5 * max(scale, 1e-6), name


def parts_of_rank(path: Path, config: Config) -> tuple[list[tuple[Any, torch.Tensor]], float]:
    """Run on a rank: return the places of its adapters, each with its part of the gradient, and the global norm."""
    learner = build_learner(config, path)
    try:
        randomize(learner)
        gradients, norm = gradients_of_step(learner)
        return [(held.places[0], gradients[held.places[0].name]) for held in learner.trained_slices()], norm
    finally:
        learner.close()


def trained_and_saved(path: Path, config: Config, out: Path, merged: Path) -> None:
    """Run on a rank: make two steps, then write the checkpoint and the merged model."""
    learner = build_learner(config, path)
    try:
        hc.train(learner, config, hc.batches(2))
        hc.write_rank_file(out, learner.capture_state())
        learner.save_pretrained(merged)
    finally:
        learner.close()


def restored_and_saved(path: Path, config: Config, saved: list[Path], merged: Path) -> None:
    """Run on a rank: write the model of a checkpoint."""
    learner = build_learner(config, path)
    try:
        learner.restore_state(hc.LearnerStateReader(saved))
        learner.save_pretrained(merged)
    finally:
        learner.close()


def taught_on_rank(
    path: Path, config: Config, micro_batches: list[Any]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Run on a rank: return the metrics of one supervised step, and the model after it (on rank 0)."""
    from r3async.learner.supervised import compute_supervised_loss, run_supervised_step

    p = config.learner.parallel
    rank = dist.get_rank() if p.world_size > 1 else 0
    learner = build_learner(config, path)
    try:
        mine = of_rank(micro_batches, rank // (p.tp * p.cp) % p.dp, p.dp)
        metrics = run_supervised_step(learner, mine)
        total, count = compute_supervised_loss(learner, mine)
        return metrics | {"after": total / count}, {n: t.clone() for n, t in learner.export_weights().items()}
    finally:
        learner.close()


def served_on_rank(path: Path, config: Config) -> dict[str, torch.Tensor]:
    """Run on a rank: return its adapters, which are not 0, as engines have them."""
    learner = build_learner(config, path)
    try:
        randomize(learner)
        return learner.export_adapters()
    finally:
        learner.close()
