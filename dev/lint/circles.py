"""Check that files do not import each other in a circle: `python -m dev.lint.circles`.

An import within a function counts: to understand one of the files, a reader needs all of them. An import for types
alone (`if TYPE_CHECKING:`) does not. import-linter has such a contract (`acyclic_siblings`), but it leaves out the
`__init__.py` of a package, through which most of the learner was once one circle.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import grimp


def find_circles(imports: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield circles of modules, each of which imports the next and the last of which imports the first.

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
    """Return a text for each circle of the package."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)}
    circles = []
    for circle in find_circles(imports):
        lines = [_describe_import(graph, *pair) for pair in zip(circle, [*circle[1:], circle[0]], strict=True)]
        circles.append("\n  ".join(["files import each other in a circle:", *lines]))
    return circles


def _describe_import(graph: grimp.ImportGraph, importer: str, imported: str) -> str:
    first = graph.get_import_details(importer=importer, imported=imported)[0]
    return f"{importer}, line {first['line_number']}: {first['line_contents']}"


def main() -> int:
    circles = check_package("r3async")
    for each in circles:
        print(each)
    return bool(circles)


if __name__ == "__main__":
    sys.exit(main())
