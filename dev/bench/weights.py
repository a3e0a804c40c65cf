"""The benchmark `bench weights`: the cost of new weights in a real run: the learner's pause,
writing, transfer, load, the engine's pause."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dev.bench.jobs import BenchError, PrintLine, train_in_process
from dev.bench.report import Measurements
from r3async.config import InitShape, load_config
from r3async.data.safetensors_header import decode_safetensors_header
from r3async.tools.init_model import build_byte_tokenizer, build_random_model

TIMEOUT_SECONDS = 1800.0
WARM_UP_UPDATES = 2
"""Number of updates that do not count, because processes warm up in them."""


QUICKSTART_OVERRIDES = [
    "name=bench",
    "schedule.prompts_per_step=4",
    "schedule.group_size=4",
    "generator.kv_cache_gib=0.25",
    "routing.trace=off",
]
"""Overrides of the quickstart; those of the command come after them."""
PART_METRICS = {
    "snapshot": "timing/snapshot_seconds",
    "write": "timing/weight_write_seconds",
    "transfer": "timing/weight_transfer_seconds",
    "load": "timing/weight_load_seconds",
    "pause": "timing/engine_pause_seconds",
    "update": "timing/weight_update_seconds",
    "step": "timing/train_seconds",
}
"""Metrics by the name of their part of an update."""


def measure_weights(
    updates: int, shape: InitShape, overrides: Sequence[str], print_line: PrintLine
) -> Measurements:
    """Make the run of a random model in a separate process, and read its metrics. Raises
    `BenchError`, `ConfigError`.

    A value is of one update; the first two, in which processes warm up, are left out.
    """
    config = load_config(
        "quickstart", [*QUICKSTART_OVERRIDES, *overrides, f"steps={updates + WARM_UP_UPDATES}"]
    )
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        model = Path(scratch, "init")
        tokenizer = build_byte_tokenizer()
        tokenizer.save_pretrained(model)
        build_random_model(config.model.init, tokenizer, shape).save_pretrained(model)
        config.model.path = str(model)
        rows = train_in_process(
            config, Path(scratch), timeout=TIMEOUT_SECONDS, print_line=print_line
        )[WARM_UP_UPDATES:]
        tensors = sum(map(_count_tensors, sorted(Path(scratch).rglob("init/*.safetensors"))))
    measured = Measurements()
    measured.facts = {
        "weights": (
            f"{tensors:,} tensors of the model; a version has "
            f"{_last_value(rows, 'weights/bytes') / 1e6:.1f} MB in {config.generator.dtype}"
        ),
        "engines are paused for": f"{rows[-1]['weights/paused_share']:.1%} of the time",
    }
    for row in rows:
        for part, name in PART_METRICS.items():
            if name not in row:  # nothing was delivered during this step
                continue
            # A version of adapters has other tensors than the model.
            is_counted = (
                part not in ("update", "step") and not config.learner.lora.delivers_adapters
            )
            each = 1e6 * row[name] / tensors if is_counted else None
            measured.add_figures(part, {"ms": 1e3 * row[name], "µs a tensor": each})
    return measured


def _last_value(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the last row's value that has one. Raises `BenchError` if there is none."""
    values = [row[name] for row in rows if name in row]
    if not values:
        raise BenchError(f"no row has {name}: nothing was delivered before the last step ended")
    return float(values[-1])


def _count_tensors(path: Path) -> int:
    return len(decode_safetensors_header(path.read_bytes())[0])
