"""Nothing is defined that nothing names: each function, class and method is named again, in code, tests, docs or presets."""

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]

BY_OTHER_PACKAGES = {
    "megatron": {"_postprocess", "activation_recompute_forward", "get_replay_topk", "is_fp8_enabled", "record_event"}
    | {"dispatch_preprocess", "token_dispatch", "dispatch_postprocess"}
    | {"combine_preprocess", "token_combine", "combine_postprocess"},
    "vllm": {"log_engine_initialized", "record_sleep_state"},
    "asyncio": {"get_debug"},
    "verifiers": {"launch"},
}
"""Called by their names there."""


def names_defined(path: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    found = {node.name for node in nodes if not node.decorator_list}  # what has one may be registered by it
    return {name for name in found if not name.startswith(("__", "visit_"))}


def unused(sources: list[Path], texts: list[Path]) -> list[str]:
    named = Counter(word for path in texts for word in re.findall(r"\w+", path.read_text()))
    others = set().union(*BY_OTHER_PACKAGES.values())
    return sorted(
        f"{path.name}: {name}"
        for path in sources
        for name in names_defined(path)
        if named[name] < 2 and name not in others
    )


def test_nothing_is_defined_that_nothing_names():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    files = [ROOT / name for name in listed.stdout.splitlines()]
    texts = [p for p in files if p.suffix in (".py", ".md", ".toml", ".html", ".js") and p.is_file()]
    sources = [p for p in texts if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in ("r3async", "actors", "tools")]
    assert len(sources) > 150
    assert unused(sources, texts) == []


def test_a_function_that_nothing_names_is_found(tmp_path):
    (tmp_path / "a.py").write_text("def used():\n    pass\n\n\ndef forgotten():\n    used()\n")
    assert unused([tmp_path / "a.py"], [tmp_path / "a.py"]) == ["a.py: forgotten"]
