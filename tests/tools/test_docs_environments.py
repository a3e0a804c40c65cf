"""docs/environments.md, from nothing to a trained environment: its blocks, in order, with fewer steps."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import run_program

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
SECTION = PAGE.split("\n## Your own environment")[1].split("\n### ")[0]
FEWER = "steps=2 schedule.prompts_per_step=4 schedule.group_size=4 model.init.max_warm_steps=10 name=shift"


def test_it_takes_fewer_than_sixty_lines_of_code():
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert 10 < sum(len(block.splitlines()) for block in blocks) < 60


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(580)
def test_the_page_takes_a_reader_to_a_trained_environment(tmp_path):
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL):
        if kind in ("python", "toml"):
            (tmp_path / re.match(r"# (\S+)", text).group(1)).write_text(text)
            continue
        assert kind == "sh"
        script = text.replace("train shift.toml", f"train shift.toml {FEWER}").replace("--tasks 64", "--tasks 8")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = run_program(["bash", "-ec", script], cwd=tmp_path, timeout=570, PATH=path, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "oracle on shift:Shift: mean reward 1.0000" in done.stdout
        assert "model on shift:Shift" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["batch/trained_tokens"] > 0 for row in rows)
