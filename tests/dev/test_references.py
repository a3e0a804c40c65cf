"""References in docstrings, comments and pages: those that name nothing are found, and those of others are left alone."""

import pytest

from dev.lint.references import check_files
from r3async.config import Config

GATE = """class Base:
    opened = 0


class Gate(Base):
    def close_gate(self):
        self.width = 1


LIMIT = 3
"""
SOURCES = {"r3async/room/__init__.py": "", "r3async/room/gate.py": GATE}


@pytest.mark.parametrize(
    ("reference", "wrong"),
    [
        ("`Gate.lock_gate`", "class `Gate` has no `lock_gate`"),
        ("`gate.Gate.lock_gate()`", "class `Gate` has no `lock_gate`"),
        ("`room.gate.MAXIMUM`", "module `room.gate` has no `MAXIMUM`"),
        ("`r3async.room.door`", "module `r3async.room` has no `door`"),
        ("`schedule.samples_per_group`", "neither a setting nor a module has `schedule.samples_per_group`"),
        ("`schedule.group_sizes = 4`", "neither a setting nor a module has `schedule.group_sizes`"),
        ("`room/door.py`", "there is no `room/door.py`"),
    ],
)
@pytest.mark.parametrize("page", [False, True])
def test_a_reference_to_what_is_not_there_is_found(reference, wrong, page):
    text = f"See {reference}.\n"
    place = {"docs/page.md": text} if page else {"r3async/room/user.py": f'"""{text}"""\n'}
    (found,) = check_files(SOURCES | place, Config)
    assert found.endswith(wrong)


@pytest.mark.parametrize(
    "reference",
    [
        "`Gate.close_gate()`",
        "`Gate.width`",
        "`Gate.opened`",
        "`gate.LIMIT`",
        "`r3async.room.gate`",
        "`r3async/room/gate.py`",
        "`schedule.group_size`",
        "`schedule.group_size=4`",
        "`env.args.anything`",
        "`torch.topk`",
        "`self.width`",
        "`sample.table`",
        "`config.toml`",
    ],
)
def test_what_is_there_or_is_not_of_this_repository_is_not_found(reference):
    assert check_files(SOURCES | {"docs/page.md": f"See {reference}."}, Config) == []


def test_a_reference_in_code_is_none():
    assert check_files(SOURCES | {"r3async/room/user.py": "text = '`Gate.lock_gate`'\n"}, Config) == []


def test_pages_about_another_time_may_name_what_is_gone():
    assert check_files(SOURCES | {"CHANGELOG.md": "`Gate.lock_gate` went."}, Config) == []


@pytest.mark.parametrize("place", ["CHANGELOG.md", "docs/page.md", "r3async/room/user.py"])
def test_the_number_of_a_decision_has_a_file(place):
    records = {"docs/decisions/D-007-gates.md": "", "docs/decisions/D-008-doors.md": ""}
    text = "See D-007, D-008 and D-009."
    sources = SOURCES | records | {place: f'"""{text}"""\n' if place.endswith(".py") else text}
    assert check_files(sources, Config) == [f"{place}:1: there is no record D-009"]
