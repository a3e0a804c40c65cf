"""The records of docs/decisions/: the index lists each as it is, and records that replace each other name each other."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"
PATHS = sorted(DECISIONS.rglob("D-*.md"))
NUMBER = re.compile(r"\bD-(\d{3})\b")


class Record(NamedTuple):
    number: str
    title: str
    status: str
    text: str

    def named_after(self, relation):
        """The numbers of the records that the status names after a word, up to its next part."""
        found = re.search(rf"\b{relation} ([^;]+)", self.status)
        return set(re.findall(r"\[D-(\d{3})\]", found[1])) if found else set()


def read_record(path):
    heading, _, rest = path.read_text().partition("\n\n")
    number, title = re.fullmatch(r"# D-(\d{3}) (\S.*)", heading).groups()
    status, _, text = rest.partition("\n\n")
    assert status.startswith("Status: "), path.name
    return Record(number, title, " ".join(status.removeprefix("Status: ").split()), text)


RECORDS = {path: read_record(path) for path in PATHS}
BY_NUMBER = {record.number: record for record in RECORDS.values()}


def test_numbers_are_given_once_and_without_a_gap():
    assert len(BY_NUMBER) == len(RECORDS)
    assert sorted(BY_NUMBER) == [f"{number:03}" for number in range(1, len(RECORDS) + 1)]


def test_the_index_lists_each_record_once_with_its_title_and_status():
    line = re.compile(r"^\* \[D-(\d{3})\]\((\S+)\) (.+?)(?: \(((?:superseded|withdrawn|amended)\b.*)\))?$", re.M)
    rows = line.findall((DECISIONS / "README.md").read_text())
    assert len(rows) == len(RECORDS)
    listed = {DECISIONS / target: (number, title, status) for number, target, title, status in rows}
    assert listed.keys() == RECORDS.keys()
    for path, record in RECORDS.items():
        number, title, status = listed[path]
        assert (number, title) == (record.number, record.title)
        replaced = re.match(r"superseded|withdrawn", status)
        assert (replaced[0] if replaced else "accepted") == re.split(r"[ ;:]", record.status)[0], path.name
        assert set(NUMBER.findall(status)) == record.named_after("superseded by") | record.named_after("amended by")


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem[:5])
def test_a_record_is_where_its_status_and_its_name_say(path):
    record = RECORDS[path]
    slug = re.fullmatch(r"D-(\d{3})-([a-z0-9]+(?:-[a-z0-9]+)*)", path.stem)
    assert slug[1] == record.number
    assert len(slug[2].split("-")) <= 8
    assert re.match(r"(accepted|superseded|withdrawn)(?![^ ;:])", record.status)
    assert (path.parent.name == "archive") == (not record.status.startswith("accepted"))
    assert record.status.startswith("superseded") == bool(record.named_after("superseded by"))
    assert not record.status.startswith("withdrawn") or re.match(r"withdrawn: \w.{9,}", record.status)
    assert record.text.strip()
    assert "```" not in record.text, "blocks are run by tests on pages only: write a command in a line"


@pytest.mark.parametrize(("one_way", "other_way"), [("superseded by", "replaces"), ("amended by", "amends")])
def test_records_that_replace_each_other_name_each_other(one_way, other_way):
    pairs = {(record.number, other) for record in RECORDS.values() for other in record.named_after(one_way)}
    inverse = {(other, record.number) for record in RECORDS.values() for other in record.named_after(other_way)}
    assert pairs == inverse
    assert pairs
