"""docs/comparison.md: every claim has evidence with an address, and a cell is as old as its newest evidence."""

import datetime

import msgspec
import pytest

from dev.pages import comparison
from dev.pages.comparison import ComparisonPoint, DatedEvidence, FrameworkComparison, FrameworkStatement

TODAY = datetime.date(2026, 11, 26)


def days_before(days):
    return DatedEvidence("https://a.example/pull/1", TODAY - datetime.timedelta(days=days))


UNDATED = DatedEvidence("https://a.example/guide")


def data_of_page():
    return msgspec.toml.decode(comparison.DATA_PATH.read_text(), type=FrameworkComparison)


def rows(evidence):
    cell = FrameworkStatement("other", "It does.", evidence)
    page = comparison.render_page(
        FrameworkComparison(TODAY, {"other": "Other"}, [ComparisonPoint("A point", "We do.", "", [cell])])
    )
    return [row for row in page.splitlines() if row.startswith("| Other |")]


def test_the_page_is_that_of_its_data():
    assert comparison.PAGE_PATH.read_text() == comparison.render_page(data_of_page())


def test_every_claim_has_evidence_with_an_address_and_a_day_that_is_past():
    data = data_of_page()
    for point in data.point:
        assert len({cell.of for cell in point.cell}) == len(point.cell), point.title
        for cell in point.cell:
            assert cell.evidence, cell.text
            assert all(evidence.at.startswith("https://") for evidence in cell.evidence), cell.text
            assert all(evidence.dated <= data.as_of for evidence in cell.evidence if evidence.dated), cell.text


@pytest.mark.parametrize(
    ("evidence", "old"),
    [
        ([days_before(180)], False),
        ([days_before(181)], True),
        ([days_before(400), days_before(10)], False),
        ([days_before(181), UNDATED], True),
        ([UNDATED], False),
    ],
)
def test_a_cell_is_old_if_its_newest_evidence_is(evidence, old):
    assert comparison.is_old(FrameworkStatement("other", "It does.", evidence), TODAY) is old
    (row,) = rows(evidence)
    assert "It does." in row
    assert row.endswith("; old) |") is old


def test_each_source_has_its_own_month_or_says_that_its_day_is_not_known():
    (row,) = rows([DatedEvidence("https://a.example/pull/1", datetime.date(2026, 6, 30)), UNDATED])
    assert "([#1](https://a.example/pull/1), Jun 2026; [docs](https://a.example/guide), undated)" in row


@pytest.mark.parametrize(
    ("address", "label"),
    [
        ("https://a.example/a/b/issues/7", "#7"),
        ("https://a.example/a/b/releases/tag/v1.2", "v1.2"),
        ("https://a.example/a/b/tree/v1.2", "v1.2"),
        ("https://a.example/a/b/blob/v1.2/docs/page.md", "page.md"),
        ("https://pypi.org/project/a/1.2.3/", "1.2.3"),
        ("https://arxiv.org/abs/2512.16144", "arXiv 2512.16144"),
        ("https://a.example/a/b#readme", "readme"),
        ("https://a.example/", "docs"),
    ],
)
def test_a_source_is_named_by_what_it_is(address, label):
    (row,) = rows([DatedEvidence(address)])
    assert f"[{label}]({address})" in row


def test_check_compares_and_writes_nothing(tmp_path, monkeypatch):
    page = tmp_path / "comparison.md"
    page.write_text(comparison.PAGE_PATH.read_text())
    monkeypatch.setattr(comparison, "PAGE_PATH", page)
    assert comparison.main(["--check"]) == 0
    page.write_text("another page")
    assert comparison.main(["--check"]) == 1
    assert page.read_text() == "another page"
