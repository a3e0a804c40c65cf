"""No constructor of the learner communicates: a rank that is made alone does not wait for the others."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]

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
    files = [*(ROOT / "r3async" / "learner").rglob("*.py"), *(ROOT / "actors").glob("rank*.py")]
    assert len(files) > 20
    assert [line for path in files for line in communicates(path)] == []


def test_a_constructor_that_communicates_would_be_seen(tmp_path):
    (tmp_path / "x.py").write_text("class A:\n    def __init__(self, ranks):\n        self.total = ranks.reduce(1)\n")
    assert communicates(tmp_path / "x.py") == ["x.py:2 reduce"]
