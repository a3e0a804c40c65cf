"""The walk of a trajectory in docs/architecture.md names files and functions that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\|[^|]*\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def functions(path: Path) -> dict[str, int]:
    """`function` and `Class.method` of a module, with their lines."""
    body = ast.parse(path.read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    inside = [(f"{c.name}.", node) for c in classes for node in c.body]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        prefix + node.name: node.lineno
        for prefix, node in [*(("", n) for n in body), *inside]
        if isinstance(node, kinds)
    }


def walk() -> list[tuple[str, str]]:
    return ROW.findall((ROOT / "docs" / "architecture.md").read_text())


def test_every_file_and_function_of_the_walk_exists():
    rows = walk()
    assert len(rows) >= 40
    lost = [(file, name) for file, name in rows if name not in functions(ROOT / file)]
    assert not lost


def test_the_trainer_comes_in_the_order_of_the_walk():
    """Of the functions that the walk names there, each is defined before the next."""
    trainer = "r3async/learner/trainer.py"
    lines = functions(ROOT / trainer)
    places = [lines[name] for file, name in walk() if file == trainer]
    assert len(places) == 8
    assert places == sorted(places)


COLLECTIVE = {
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "begin",
    "broadcast",
    "init_process_group",
    "recv",
}
COLLECTIVE |= {"reduce", "send", "spawn", "wait"}


def communicates(path: Path) -> list[str]:
    """Constructors of a module that call what other processes answer."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__"):
            called = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
            names = {f.attr for f in called if isinstance(f, ast.Attribute)}
            found += [f"{path.name}:{node.lineno} {name}" for name in sorted(names & COLLECTIVE)]
    return found


def test_no_constructor_of_the_learner_communicates():
    files = [*(ROOT / "r3async" / "learner").rglob("*.py"), ROOT / "actors" / "ranks.py"]
    assert len(files) > 20
    assert [line for path in files for line in communicates(path)] == []


def test_a_constructor_that_communicates_would_be_seen(tmp_path):
    (tmp_path / "x.py").write_text("class A:\n    def __init__(self, ranks):\n        self.total = ranks.reduce(1)\n")
    assert communicates(tmp_path / "x.py") == ["x.py:2 reduce"]
