"""The catalogue of metrics is what a run writes: no more, no less."""

import contextlib
import re

from r3async.actors.process import NotTrained
from r3async.data.metrics import METRICS, find_metric
from r3async.record.reading import read_json_objects


def test_a_run_writes_the_metrics_of_the_catalogue_and_no_others(machine) -> None:
    settings = ["steps=8", "schedule.prompts_per_step=4", "schedule.group_size=4", "weights.directory=/memory"]
    machine.run_dir.mkdir(parents=True)
    with contextlib.suppress(NotTrained):
        machine.train(preset="fully_async", settings=[*settings, "generator.engine=scripted", "weights.probe=false"])
    rows = read_json_objects(machine.run_dir / "metrics.jsonl")
    written = {name for row in rows for name in row}
    assert {name for name in written if find_metric(name).description == name} == set()
    sometimes = {name for name in written if not all(isinstance(row.get(name), int | float) for row in rows)}
    served = {name for name in sometimes if name.startswith(("rollout_kl/served_", "rollout_kl/k3_staleness_"))}
    not_in_the_first_row = {"pace/ratio", "learner/idle_share", "generator/idle_share"}
    parts = ("weight_write", "weight_update", "weight_transfer", "weight_load", "engine_pause")
    of_a_version_that_ended = {"weights/bytes", *(f"timing/{part}_seconds" for part in parts)}
    assert sometimes - served == not_in_the_first_row | of_a_version_that_ended
    lacking = {name for name in METRICS if name not in written}
    of_real_processes = {name for name in lacking if re.fullmatch(r"(cpu|wall)/[a-z]+_[a-z]+_seconds", name)}
    assert of_real_processes >= {"cpu/generator_play_seconds", "wall/conductor_idle_seconds"}
    supervised = {"loss/answers", "loss/answers_held_out"}
    # The environment has no end of tasks, and a step one epoch and no teacher; none is so far that it is shortened.
    of_tasks = {"data/epochs", "data/easy_tasks", "data/hard_tasks", "data/replaced_tasks"}
    others = {"rollout_kl/k3_last_epoch", "distillation/reverse_kl", "rollout_kl/served_k3_predicted"}
    assert lacking - of_real_processes == of_tasks | others | supervised
