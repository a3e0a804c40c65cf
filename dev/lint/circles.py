"""Check that files do not import each other in a circle: `python -m dev.lint.circles`.

An import within a function counts, and so does one for types alone (`if TYPE_CHECKING:`): to
understand one of the files, a reader needs all of them. `TYPES_ALONE` names the exceptions.
import-linter has such a contract (`acyclic_siblings`), but it leaves out the `__init__.py` of a
package, through which most of the learner was once one circle.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import grimp

TYPES_ALONE = {
    (
        "r3async.learner.state",
        "r3async.learner.backend",
    ): "saves and restores a backend, which has both as methods",
    (
        "r3async.world",
        "r3async.world.appending",
    ): "a world has one flusher of records, which is made of a world",
    (
        "dev.simulation.actors",
        "dev.simulation.world",
    ): "an actor is a process of a host of the simulation, which spawns actors",
    (
        "dev.simulation.processes",
        "dev.simulation.actors",
    ): "a process runs an actor, which is started as a process",
    (
        "dev.simulation.processes",
        "dev.simulation.world",
    ): "a process belongs to a host of the simulation, which starts processes",
}
"""Imports for types alone that close a circle, importer first, each with the
reason why it stays."""


def find_circles(imports: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield circles of modules, each of which imports the next and the last of which
    imports the first.

    The first import of a circle is in no later one: what is yielded is enough to break them all.

    Args:
        imports: The modules that each module imports.
    """
    remaining = {module: set(imported) for module, imported in imports.items()}
    while True:
        try:
            TopologicalSorter(remaining).prepare()
            return
        except CycleError as error:
            circle = error.args[1][::-1]  # with the first module again at its end
            remaining[circle[0]].remove(circle[1])
            yield circle[:-1]


def check_package(package: str) -> list[str]:
    """Return a text for each circle of the package, and for each exception that is not needed."""
    graph = _build_graph(package, types=True)
    imports = _list_imports(graph)
    without_types = _list_imports(_build_graph(package, types=False))
    problems = []
    for importer, imported in TYPES_ALONE:
        if not importer.startswith(f"{package}."):
            continue
        if imported in without_types.get(importer, ()) or imported not in imports.get(importer, ()):
            problems.append(
                f"{importer} does not import {imported} for types alone: take it out of TYPES_ALONE"
            )
        else:
            imports[importer].remove(imported)
    for circle in find_circles(imports):
        pairs = zip(circle, [*circle[1:], circle[0]], strict=True)
        lines = [_describe_import(graph, *pair) for pair in pairs]
        problems.append("\n  ".join(["files import each other in a circle:", *lines]))
    return problems


def _build_graph(package: str, *, types: bool) -> grimp.ImportGraph:
    return grimp.build_graph(package, exclude_type_checking_imports=not types, cache_dir=None)


def _list_imports(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    return {
        module: set(graph.find_modules_directly_imported_by(module)) - {module}
        for module in sorted(graph.modules)
    }


def _describe_import(graph: grimp.ImportGraph, importer: str, imported: str) -> str:
    first = graph.get_import_details(importer=importer, imported=imported)[0]
    return f"{importer}, line {first['line_number']}: {first['line_contents']}"


def main() -> int:
    problems = [problem for package in ("r3async", "dev") for problem in check_package(package)]
    for each in problems:
        print(each)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
