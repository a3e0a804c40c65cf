"""Programs of the pages that train: executed to their end as they are written, but for the size of their runs."""

import sys

import pytest

from tests.helpers.cli import run_program
from tests.tools.test_docs_blocks import PAGES, blocks

SMALLER = {
    'schedule={"max_staleness": 0}': 'schedule={"max_staleness": 0, "prompts_per_step": 4, "group_size": 4}, '
    'model={"init": {"max_warm_steps": 10}}, steps=2',
    "steps=20": 'schedule={"prompts_per_step": 8, "group_size": 8}, steps=2',  # warmed up, or no answer is right
    "tasks=256": "tasks=8",
    "tasks=64": "tasks=8",
}
PROGRAMS = [(page.stem, block.text) for page in PAGES for block in blocks(page) if block.how == "train"]
NIGHTLY = {"operations", "api"}
"""Pages with long runs, or with the calls of the README."""


def test_there_are_programs_that_train():
    assert {"README", "operations"} <= {page for page, _ in PROGRAMS}


@pytest.mark.ray
@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    ("page", "program"),
    [
        pytest.param(page, text, id=page, marks=[pytest.mark.nightly] if page in NIGHTLY else [])
        for page, text in PROGRAMS
    ],
)
def test_a_program_of_the_pages_ends_without_an_error(page, program, tmp_path, ray_head):
    for written, smaller in SMALLER.items():
        program = program.replace(written, smaller)
    assert "steps=2" in program, "its run has to be made smaller"
    (tmp_path / "program.py").write_text(program)
    done = run_program([sys.executable, "program.py"], cwd=tmp_path, timeout=540, RAY_ADDRESS=ray_head)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "latest" / "metrics.jsonl").read_text().count("\n") == 2
