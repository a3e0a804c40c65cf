"""The records of docs/decisions/: the index lists each with its title, and a number is given once."""

import re
from pathlib import Path

import pytest

DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"
PATHS = sorted(DECISIONS.glob("D-*.md"))
HEADING = re.compile(r"# (D-\d{3}) (\S.*)")


def read_heading(path):
    return HEADING.fullmatch(path.read_text().partition("\n\n")[0]).groups()


def test_the_index_lists_each_record_once_with_its_title():
    rows = re.findall(r"^\* \[(D-\d{3})\]\((\S+)\) (.+)$", (DECISIONS / "README.md").read_text(), re.MULTILINE)
    assert len(PATHS) > 30
    assert sorted(rows) == sorted(
        (number, path.name, title) for path in PATHS for number, title in [read_heading(path)]
    )


def test_a_number_is_given_once_and_the_index_says_which_are_taken():
    numbers = [read_heading(path)[0] for path in PATHS]
    assert len({*numbers}) == len(numbers)
    (taken,) = re.findall(r"numbers up to (D-\d{3}) are taken", (DECISIONS / "README.md").read_text())
    assert max(numbers) <= taken


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem[:5])
def test_a_record_has_its_number_in_its_name_and_a_text(path):
    number, _ = read_heading(path)
    slug = re.fullmatch(r"(D-\d{3})-([a-z0-9]+(?:-[a-z0-9]+)*)", path.stem)
    assert slug[1] == number
    assert len(slug[2].split("-")) <= 8
    _, _, text = path.read_text().partition("\n\n")
    assert text.strip()
    assert "```" not in text, "blocks are run by tests on pages only: write a command in a line"
