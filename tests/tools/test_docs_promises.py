"""docs/operations.md: each promise has a test that holds it, by name.

The page's last section has two tables. The first names, for words of the page, the tests that hold them: the first cell of a
table's row, the beginning of a bullet, or words of a paragraph. Every row and every bullet has some. The second has promises of
its own words.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
HEADING = "## Which test holds what"
OTHERS = "Promises of other pages"
ABOVE, HOLDS = PAGE.split(f"\n{HEADING}\n")
HOLDS, OTHER = HOLDS.split(f"\n{OTHERS}")
TEST = re.compile(r"`(\w+/test_\w+\.py)::(test_\w+)`")
SEPARATOR = re.compile(r"^\|[-| ]+\|$")


def plain(text):
    return " ".join(text.replace("**", "").split())


def rows(text):
    """Cells of each row of each table, without the tables' heads."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        head = i + 1 < len(lines) and SEPARATOR.match(lines[i + 1])
        if line.startswith("| ") and not SEPARATOR.match(line) and not head:
            yield [plain(cell) for cell in re.split(r"(?<!\\) \| ", line.strip("| "))]


def bullets(text):
    return [plain(b) for b in re.findall(r"^\* (.+?)(?=^\* |^\S|^$|\Z)", text, re.MULTILINE | re.DOTALL)]


def held(text):
    """Words, and the tests that hold them."""
    return [(cells[0], TEST.findall(" ".join(cells[1:]))) for cells in rows(text)]


FIRST_CELLS = [cells[0] for cells in rows(ABOVE)]
BULLETS = bullets(ABOVE)


def test_the_page_is_read_as_it_is_written():
    assert {"`auto` (default)", "no process fails, but nothing progresses", "`playing/GENERATOR`", "restarts"} <= set(
        FIRST_CELLS
    )
    assert any(bullet.startswith("Nothing is trained twice.") and "trained.jsonl" in bullet for bullet in BULLETS)
    assert not {"resume", "what", "stage", "state"} & set(FIRST_CELLS)
    assert len(FIRST_CELLS) > 50
    assert len(BULLETS) > 10


@pytest.mark.parametrize("row", FIRST_CELLS)
def test_every_row_names_the_test_that_holds_it(row):
    assert row in [words for words, _ in held(HOLDS)], (
        f"add a row to {HEADING!r} of docs/operations.md: | {row} | `tests` |"
    )


@pytest.mark.parametrize("bullet", BULLETS, ids=lambda text: text[:30])
def test_every_bullet_names_the_test_that_holds_it(bullet):
    assert any(bullet.startswith(words) for words, _ in held(HOLDS)), f"add its first words to {HEADING!r}: {bullet}"


def test_what_is_held_is_on_the_page_and_every_named_test_is_there():
    text = plain(ABOVE)
    for words, _ in held(HOLDS):
        assert words in text, f"{HEADING!r}: the page does not say {words!r} (any more)"
    for words, tests in held(HOLDS) + held(OTHER):
        assert tests, f"{HEADING!r}: {words!r} names no test"
        for file, name in tests:
            assert name in names_in(file), f"{HEADING!r}: there is no tests/{file}::{name}"


def names_in(file):
    """Names of the tests that pytest collects from a file: its functions that are called so."""
    path = ROOT / "tests" / file
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
