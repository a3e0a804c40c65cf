"""Check that names in backticks exist: in docstrings, comments and docs. Run by `make lint` as
`python -m dev.lint.references`.

Numbers of decisions (`D-NNN`) are checked too, everywhere: each has a file in docs/decisions/.

A reference is judged where it names something of this repository:

* `Class.member`, of a class that is defined here
* `module.name`, of a module that is here
* `section.setting`, of the configuration
* a path of a `.py` file

Anything else in backticks (parameters, other libraries, values) is not judged.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import subprocess
import sys
import tokenize
import typing
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
PAGES_OF_OTHER_TIMES = (
    "CHANGELOG.md",
    "docs/comparison.md",
    "docs/coming-from.md",
)
"""Pages whose names are those of another time, or of other projects."""
RECORD = re.compile(r"\bD-(\d{3})\b")
RECORD_FILE = re.compile(r"docs/decisions/D-(\d{3})-[\w-]+\.md")
REFERENCE = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\)| ?=[^`]*)?`(?!`)")
FILE_REFERENCE = re.compile(r"(?<!`)`((?:[\w-]+/)+[\w-]+\.py)`(?!`)")
IGNORED_LAST_PARTS = {
    "css",
    "db",
    "html",
    "json",
    "jsonl",
    "md",
    "parquet",
    "public",
    "py",
    "safetensors",
    "secret",
    "sh",
    "toml",
    "yaml",
    "txt",
    "NAME",
}
"""Last parts of what is a file, or stands for any name."""


@dataclass
class RepositoryDefinitions:
    """The definitions of the repository.

    Attributes:
        members: Names of the members of each class, by the name of the class, over all
            classes of that name.
        bases: Names of the base classes of each class.
        modules: Names at the top level of each module, by every end of its dotted path (`relay`,
            `weights.relay`).
    """

    members: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    bases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    modules: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add_module(self, path: str, source: str) -> None:
        """Add what a file defines. `path`: from the root, with `/`."""
        tree = ast.parse(source)
        names = set(_assigned_names(tree.body))
        parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
        for start in range(len(parts)):
            self.modules[".".join(parts[start:])] |= names
        for end in range(1, len(parts)):
            for start in range(end):
                self.modules[".".join(parts[start:end])].add(parts[end])
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.members[node.name] |= set(_member_names(node))
                self.bases[node.name] |= {
                    ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases
                }

    def has_member(self, class_name: str, member: str) -> bool:
        """Return True if a class, or one of its bases, has the member; a base of another
        library may have any."""
        open_classes = [class_name]
        seen = set()
        while open_classes:
            name = open_classes.pop()
            if name in seen:
                continue
            seen.add(name)
            if name not in self.members:
                if name not in (
                    "Generic",
                    "Protocol",
                    "Struct",
                    "NamedTuple",
                    "Exception",
                    "ValueError",
                    "RuntimeError",
                ):
                    return True
                continue
            if member in self.members[name]:
                return True
            open_classes += self.bases[name]
        return False


def _assigned_names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _assigned_names(node.body)
        else:
            yield from (
                n.id
                for n in ast.walk(node)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            )


def _member_names(node: ast.ClassDef) -> Iterator[str]:
    yield from _assigned_names(node.body)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr


def is_setting(section: type, parts: list[str]) -> bool:
    """Return True if `parts` name a setting, or a section, below `section`. What a table of the
    user holds may be anything."""
    if not parts:
        return True
    fields = {each.encode_name: each.type for each in msgspec.structs.fields(section)}
    if parts[0] not in fields:
        return False
    inner = list(_flatten_type(fields[parts[0]]))
    if any(typing.get_origin(kind) is dict or kind in (dict, Any) for kind in inner):
        return True
    sections = [
        kind for kind in inner if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]
    return not parts[1:] or any(is_setting(each, parts[1:]) for each in sections)


def _flatten_type(kind: Any) -> Iterator[Any]:
    yield kind
    for argument in typing.get_args(kind):
        yield from _flatten_type(argument)


def find_stale_reference(reference: str, definitions: RepositoryDefinitions, config: type) -> str:
    """Return what is wrong with a dotted reference; "" if it exists, or is not of
    this repository."""
    parts = reference.split(".")
    if parts[-1] in IGNORED_LAST_PARTS:
        return ""
    is_section = parts[0] in {each.encode_name for each in msgspec.structs.fields(config)}
    if is_section and is_setting(config, parts):
        return ""
    for at, (owner, name) in enumerate(itertools.pairwise(parts)):
        if owner in definitions.members and owner[:1].isupper():
            return "" if definitions.has_member(owner, name) else f"class `{owner}` has no `{name}`"
        path = ".".join(parts[: at + 1])
        if path in definitions.modules and parts[at + 1] in definitions.modules[path]:
            if at + 2 == len(parts):
                return ""
            continue
        if path in definitions.modules and (at or is_section or "_" in owner):
            return f"module `{path}` has no `{name}`"
        if at == 0 and not is_section:
            return ""
    return f"neither a setting nor a module has `{reference}`" if is_section else ""


def read_prose(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file that are for people, with their first lines: all of a page;
    docstrings and comments of code."""
    if not path.endswith(".py"):
        yield from enumerate(source.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and token.string.startswith('"""')
        ):
            yield from enumerate(token.string.splitlines(), token.start[0])


def check_files(files: dict[str, str], config: type) -> list[str]:
    """Return a line for each reference, or number of a decision, that does not exist. `files`:
    sources by path from the root."""
    definitions = RepositoryDefinitions()
    for path, source in files.items():
        if path.endswith(".py"):
            definitions.add_module(path, source)
    records = {match[1] for path in files if (match := RECORD_FILE.fullmatch(path))}
    problems = []
    for path, source in files.items():
        for line, text in read_prose(path, source):
            problems += [
                f"{path}:{line}: there is no record D-{number}"
                for number in RECORD.findall(text)
                if number not in records
            ]
            if path.startswith(PAGES_OF_OTHER_TIMES):
                continue
            for reference in REFERENCE.findall(text):
                wrong = find_stale_reference(reference, definitions, config)
                if wrong:
                    problems.append(f"{path}:{line}: `{reference}`: {wrong}")
            for named in FILE_REFERENCE.findall(text):
                if not any(each == named or each.endswith(f"/{named}") for each in files):
                    problems.append(f"{path}:{line}: there is no `{named}`")
    return problems


def main() -> int:
    from r3async.config import Config

    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [path for path in listed.stdout.splitlines() if not (ROOT / path).is_symlink()]
    problems = check_files({path: (ROOT / path).read_text() for path in paths}, Config)
    print("\n".join(problems), end="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
