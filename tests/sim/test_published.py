"""Published curves are predicted from published settings."""

from pathlib import Path

import pytest

from r3async.tools.capacity.published import CASES, calibrated_token, markdown, reproduce, seconds_of


@pytest.mark.long
def test_a_case_is_calibrated_on_its_first_point_alone_and_predicts_the_others() -> None:
    case = CASES["marin"]()
    rows = reproduce(case)
    assert [row.calibrated for row in rows] == [True, False, False, False, False]
    assert abs(rows[0].error) < 0.01
    assert max(abs(row.error) for row in rows) < 0.15
    assert seconds_of(case.points[0], calibrated_token(case.points[0])) == rows[0].predicted
    table = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    for line, row in zip(markdown(rows).splitlines()[2:], rows, strict=True):
        shown = line.replace(f"| {row.case} ", "")
        assert shown in table
