"""docs/tour.md names code that exists, what each function calls, in the order in which it does, and the lines of its files."""

import ast
import re
from pathlib import Path

import pytest

from dev.pages.reference import insert_path_list, list_tour_files

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text()
PLACE = r"`([\w/]+\.py)` `([\w.]+)`"
CALLS = r"`[\w.]+`(?:,\s+`[\w.]+`)*"
STOPS = {
    (file, name): re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
    for file, name, text in re.findall(rf"^### {PLACE}\n(.*?)(?=^#|\Z)", TOUR, re.MULTILINE | re.DOTALL)
} | {
    (file, name): re.findall(r"`([\w.]+)`", calls)
    for file, name, calls in re.findall(rf"^\* {PLACE}:\s+({CALLS})\.", TOUR, re.MULTILINE)
}
MAX_PATH_LINES = 9000


def find_definition(file: str, name: str) -> ast.AST:
    """Return the function, method or class `name` of a file."""
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for part in name.split("."):
        (found,) = [node for node in body if getattr(node, "name", None) == part]
        body = getattr(found, "body", [])
    return found


def calls_of(node: ast.AST) -> list[str]:
    """Return the dotted names that a function calls, in the order of its text.

    A call of another actor, `self.learner.call("run_step")`, is `self.learner.run_step`.
    """
    calls = []
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            name = ast.unparse(call.func)
            if name.endswith(".call"):
                name = name.removesuffix("call") + getattr(call.args[0], "value", "")
            calls.append((call.func.end_lineno, call.func.end_col_offset, name))
    return [name for _, _, name in sorted(calls)]


def first_missing(stops: list[str], calls: list[str]) -> str | None:
    """Return the first of `stops` that is not called after those before it."""
    left = iter(calls)
    return next((stop for stop in stops if not any(f".{name}".endswith(f".{stop}") for name in left)), None)


@pytest.mark.parametrize(("file", "name"), STOPS, ids="{}".format)
def test_a_stop_of_the_tour_calls_what_the_tour_says_in_that_order(file, name):
    assert STOPS[file, name]
    assert first_missing(STOPS[file, name], calls_of(find_definition(file, name))) is None


def test_every_place_that_the_tour_names_exists():
    places = dict.fromkeys(re.findall(PLACE, TOUR))
    assert len(places) > 60
    for file, name in places:
        assert find_definition(file, name)


def test_the_functions_of_the_tour_are_a_first_read():
    lines = 0
    for file, name in dict.fromkeys([*STOPS, *re.findall(rf"^\* {PLACE}$", TOUR, re.MULTILINE)]):
        node = find_definition(file, name)
        lines += node.end_lineno - node.lineno + 1
    (said,) = re.findall(r"some ([\d,]+) lines in all", TOUR)
    assert abs(lines - int(said.replace(",", ""))) <= 100, f"say some {lines} lines"


def test_the_files_of_the_tour_are_listed_and_few():
    assert insert_path_list(TOUR) == TOUR, "run python -m dev.pages.reference"
    followed, named = list_tour_files(TOUR)
    assert {file for file, _ in STOPS} == set(followed)
    # Beside its files, the tour names the classes behind its protocols, and answers to questions.
    stops = TOUR.partition("\n## Beside the path\n")[0]
    behind = "\n".join(re.findall(r"^Protocol `[^:]*:(.*?)\n\n", stops, re.MULTILINE | re.DOTALL))
    mentioned, others = (set(re.findall(r"`([\w/]+\.py)`", text)) for text in (stops, behind))
    assert mentioned - others - {"tests/dev/test_tour.py"} <= {*followed, *named}
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in followed)
    assert lines <= MAX_PATH_LINES, f"{lines} lines to read: let the tour name fewer files"


def test_a_call_in_another_order_would_be_seen():
    node = ast.parse("def f(self):\n    self.a.take(g())\n    self.learner.call('step', x)\n")
    assert calls_of(node) == ["self.a.take", "g", "self.learner.step"]
    assert first_missing(["take", "learner.step"], calls_of(node)) is None
    assert first_missing(["learner.step", "take"], calls_of(node)) == "take"
    assert first_missing(["ake"], calls_of(node)) == "ake"
