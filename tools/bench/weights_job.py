"""A short real run, whose metrics say what its weights cost."""

from __future__ import annotations

from pathlib import Path

import msgspec

from r3async.tools.bench.jobs import job_main, progress
from r3async.tools.bench.weights import WARM_UP, WeightsJob


def main(directory: Path) -> None:
    from r3async.config import load_config
    from r3async.tools.train import train

    job = msgspec.json.decode((directory / "job.json").read_bytes(), type=WeightsJob)
    progress(directory, f"a run of {job.updates} steps")
    config = load_config(
        "quickstart",
        [
            "name=bench",
            f"steps={job.updates + WARM_UP}",
            "schedule.groups_per_step=4",
            "schedule.samples_per_group=4",
            "generator.kv_cache_gib=0.25",
            f"generator.dtype={job.dtype}",
            f"generator.on_update={job.on_update}",
            f"weights.backend={job.backend}",
            "routing.trace=off",
            "model.init.max_warm_steps=1",
            f"model.init.layers={job.layers}",
            f"model.init.hidden_size={job.hidden_size}",
            f"model.init.experts={job.experts}",
            f"model.init.expert_hidden_size={job.expert_hidden_size}",
        ],
    )
    train(config, "quickstart", root=directory / "runs")


if __name__ == "__main__":
    job_main(main)
