"""docs/tour.md names code that exists, and what each function calls, in the order in which it does."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text()
PLACE = r"`([\w/]+\.py)` `([\w.]+)`"
STOPS = {
    (file, name): re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
    for file, name, text in re.findall(rf"^### {PLACE}\n(.*?)(?=^#|\Z)", TOUR, re.MULTILINE | re.DOTALL)
}
MAX_LINES = 1500


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


def test_every_place_that_the_tour_names_exists_and_it_is_a_first_read():
    places = re.findall(PLACE, TOUR)
    assert len(places) > 25
    lines = 0
    for file, name in dict.fromkeys(places):
        node = find_definition(file, name)
        lines += node.end_lineno - node.lineno + 1
    assert lines < MAX_LINES
    assert len(STOPS) > 12


def test_a_call_in_another_order_would_be_seen():
    node = ast.parse("def f(self):\n    self.a.take(g())\n    self.learner.call('step', x)\n")
    assert calls_of(node) == ["self.a.take", "g", "self.learner.step"]
    assert first_missing(["take", "learner.step"], calls_of(node)) is None
    assert first_missing(["learner.step", "take"], calls_of(node)) == "take"
    assert first_missing(["ake"], calls_of(node)) == "ake"
