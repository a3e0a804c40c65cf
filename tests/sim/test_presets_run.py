"""Presets, simulated: a run with the preset's own environment, schedule, algorithm and a real learner keeps its bound."""

import contextlib
import json
from pathlib import Path

import pytest

from r3async.actors.process import NotTrained
from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.tools.plan import make_run_plan

CHANCE = contextlib.suppress(NotTrained)
"""Whether a script finds a reward in a few steps is left to chance, and is not what is tested."""


PRESETS = ["on_policy", "one_step_off", "fully_async", "fully_async_long_tail", "reverse-text", "alphabet-sort"]
PRESETS += ["stepwise_search", "math"]


def rows_for(name: str, directory: Path) -> list[str]:
    """The settings that a preset for one's own rows lacks."""
    if not name.startswith("math"):
        return []
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data={directory / 'rows.jsonl'}"]


@pytest.mark.long
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_runs_without_a_model_that_plays_and_keeps_its_bound(machine, name, tmp_path):
    small = rows_for(name, tmp_path)
    small += ["steps=3", "schedule.prompts_per_step=4", "schedule.group_size=4", "weights.directory=/memory"]
    settings = [*small, "generator.engine=scripted", "weights.probe=false"]
    settings += ["schedule.tokens_per_step=40"] * (name == "fully_async_long_tail")
    machine.run_dir.mkdir(parents=True)
    with CHANCE:
        machine.train(preset=name, settings=settings)
    rows = read_json_objects(machine.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["staleness/max"] for row in rows) <= make_run_plan(load_config(name, settings)).staleness_bound
    assert all(row["batch/trained_tokens"] > 0 for row in rows)
