"""Whole runs on Ray with vLLM whose weights are damaged on their way, or come over TCP. Each time:
`engine/test_vllm_engine.py` and `engine/test_vllm_faults.py` have engines refuse and find what was damaged,
`sim/test_wrong_weights.py` has runs end for it."""

import json

import pytest

from r3async.actors.process import RunFailed
from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.tools.training_session import train
from r3async.weights.probe import FAILED_MODEL_DIRECTORY
from tests.helpers.engine import needs_fp8_cache

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600), pytest.mark.usefixtures("local_ray")]

SMALL = ["steps=6", "schedule.prompts_per_step=4", "schedule.group_size=4", "generator.kv_cache_gib=0.25"]
CHANGES = ["learner.lr=3e-3", "weights.probe_every=1", "routing.trace=off"]


def run(model, tmp_path, *overrides, **faults):
    """`faults`: engine arguments that are refused where a configuration is read."""
    config = load_config("quickstart", [*SMALL, *CHANGES, f"model.path={model}", "name=run", *overrides])
    config.generator.engine_args.update(faults)
    return train(config, "quickstart", root=tmp_path)


def test_a_bit_that_is_flipped_in_shared_memory_stops_the_run_and_is_named(warm_model, tmp_path):
    fault = {"worker_extension_cls": "tests.helpers.faults.FlipsABit"}
    # On policy: no later version comes in the place of the damaged one, which the restarted generator is given again.
    with pytest.raises(RunFailed, match=r"generator-0: .*version 1 .*tensor '.*' is corrupt"):
        run(warm_model, tmp_path, "schedule.max_staleness=0", **fault)
    # No slot was freed by it.
    assert all(row["version"] < 1 for row in read_json_objects(tmp_path / "run" / "metrics.jsonl"))


@needs_fp8_cache
def test_a_run_whose_probe_fails_is_diagnosed_and_the_setting_is_named(warm_model, tmp_path, capsys):
    with pytest.raises(RunFailed, match=r"version 0 .* does not answer like the learner's"):
        run(warm_model, tmp_path, 'generator.engine_args={ kv_cache_dtype = "fp8_e5m2" }')
    seen = capsys.readouterr().err
    assert "PARTED: engine, attention of layers 0" in seen
    assert "hint: generator.engine_args.kv_cache_dtype" in seen
    diagnosis = tmp_path / "run" / FAILED_MODEL_DIRECTORY / "diagnosis.txt"
    assert diagnosis.read_text() in seen


def test_a_run_over_tcp_is_probed(warm_model, tmp_path):
    run(
        warm_model,
        tmp_path,
        "weights.backend=tcp",
        "weights.bucket_bytes=100000",
        "generator.on_update=recompute",
        "episode.temperature=0.8",
    )
    rows = read_json_objects(tmp_path / "run" / "metrics.jsonl")
    assert [r["version"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert all(0 < r["weights/paused_share"] < 1 for r in rows[1:])
    transfers = [r["timing/weight_transfer_seconds"] for r in rows if "timing/weight_transfer_seconds" in r]
    assert transfers
    assert all(seconds > 0 for seconds in transfers)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    for name in ("probe", "probe_sampled"):
        probes = [e for e in events if e["event"] == name]
        assert len(probes) >= 3  # a version that follows while one is on its way is not probed
        assert all(e["mean_difference"] < 1e-4 for e in probes)
