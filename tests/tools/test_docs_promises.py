"""docs/operations.md and docs/run-files.md: each row of a table is a promise, and promises.md names the tests that hold it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / "docs" / name).read_text() for name in ("operations.md", "run-files.md"))
REGISTER = Path(__file__).with_name("promises.md")
OF_ROWS, OTHERS = REGISTER.read_text().split("\n## Other promises\n")
TEST = re.compile(r"`(\w+/test_\w+\.py)::(test_\w+)`")
SEPARATOR = re.compile(r"^\|[-| ]+\|$")


def rows(text):
    """Cells of each row of each table, without the tables' heads."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        head = i + 1 < len(lines) and SEPARATOR.match(lines[i + 1])
        if line.startswith("| ") and not SEPARATOR.match(line) and not head:
            yield [" ".join(cell.split()) for cell in re.split(r"(?<!\\) \| ", line.strip("| "))]


def held(text):
    """Words, and the tests that hold them."""
    return [(cells[0], TEST.findall(" ".join(cells[1:]))) for cells in rows(text)]


FIRST_CELLS = [cells[0] for cells in rows(PAGES)]


def test_the_pages_are_read_as_they_are_written():
    assert {"`auto` (default)", "no process fails, but nothing progresses", "`playing/GENERATOR`", "restarts"} <= set(
        FIRST_CELLS
    )
    assert not {"resume", "what", "stage", "state"} & set(FIRST_CELLS)
    assert len(FIRST_CELLS) > 50


@pytest.mark.parametrize("row", FIRST_CELLS)
def test_every_row_names_the_test_that_holds_it(row):
    assert row in [words for words, _ in held(OF_ROWS)], f"add a row to tests/tools/promises.md: | {row} | `tests` |"


def test_what_is_held_is_on_the_page_and_every_named_test_is_there():
    for words, _ in held(OF_ROWS):
        assert words in FIRST_CELLS, f"promises.md: no table has the row {words!r} (any more)"
    for words, tests in held(OF_ROWS) + held(OTHERS):
        assert tests, f"promises.md: {words!r} names no test"
        for file, name in tests:
            assert name in names_in(file), f"promises.md: {words!r}: there is no tests/{file}::{name}"


def names_in(file):
    """Names of the tests that pytest collects from a file: its functions that are called so."""
    path = ROOT / "tests" / file
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
