"""Whole runs in which weights do not arrive as they were published: each is stopped, and the reason is named."""

from __future__ import annotations

import json

import pytest

from actors.deaths import RunFailed
from r3async.config import load_config
from r3async.observe.metrics import read_metrics
from tests.helpers_faults import SKIPPED
from tools.train import train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("local_ray")]

SMALL = ["steps=6", "schedule.groups_per_step=4", "schedule.samples_per_group=4", "generator.kv_cache_gib=0.25"]
CHANGES = ["learner.lr=3e-3", "weights.probe_every=1", "routing.trace=off"]


def run(model, tmp_path, *overrides, **faults):
    """`faults`: engine arguments that are refused where a configuration is read."""
    config = load_config("quickstart", [*SMALL, *CHANGES, f"model.path={model}", "name=run", *overrides])
    config.generator.engine_args.update(faults)
    return train(config, "quickstart", root=tmp_path)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("worker_extension_cls=tests.helpers_faults.FlipsABit", r"generator-0: .*version 1 .*tensor '.*' is corrupt"),
        (
            "worker_extension_cls=tests.helpers_faults.SkipsATensor",
            rf"generator-0: .*tensor '{SKIPPED}' was not loaded",
        ),
        (
            "worker_extension_cls=tests.helpers_faults.MissesUpdates",
            r"generator-0: .*holds version 0 and not version 1",
        ),
        (
            "worker_extension_cls=tests.helpers_faults.PretendsToInstall",
            r"version 1 of the weights in generator-0 does not answer .* It does not hold '.*' \(\d+ elements of parameter",
        ),
        (
            "scheduler_cls=tests.helpers_faults.ForgetsSalts",
            r"generator-0: a new request under version 1 took \d+ positions from a prefix cache that older weights made",
        ),
    ],
    ids=["flipped-bit", "skipped-tensor", "missed-update", "pretended-update", "stale-prefix-cache"],
)
def test_a_fault_of_delivery_stops_the_run_and_is_named(warm_model, tmp_path, fault, reason):
    # Small blocks, or none of these short texts would fill one, and there would be no prefix cache to go stale.
    with pytest.raises(RunFailed, match=reason):
        run(warm_model, tmp_path, **dict([fault.split("=")]), block_size=32)
    # No slot was freed by it.
    assert all(row["version"] < 1 for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))


def test_log_probs_before_temperature_stop_the_run_before_it_trains(warm_model, tmp_path):
    """The text that learner and engine score says nothing of it: only what is sampled does."""
    with pytest.raises(RunFailed, match=r"generator-0 under version 0 reports other log-probs than it samples with"):
        run(warm_model, tmp_path, "episode.temperature=0.7", logprobs_mode="raw_logprobs")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == []


def test_a_run_through_the_object_store_with_every_version_probed(warm_model, tmp_path):
    run(
        warm_model,
        tmp_path,
        "weights.backend=object_store",
        "weights.bucket_bytes=100000",
        "generator.on_update=recompute",
        "episode.temperature=0.8",
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["version"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert all(r["weights/transfer_seconds"] > 0 and 0 < r["weights/paused_share"] < 1 for r in rows)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    for name in ("probe", "probe_sampled"):
        probes = [e for e in events if e["event"] == name]
        assert probes[-1]["version"] == 6
        assert all(e["mean_difference"] < 1e-4 for e in probes)
