"""Run one part in a separate process: `python -m r3async.tools.gpu_check.part OUT small|real
MODULE:FUNCTION JSON`.

The last line of its output is a JSON object.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULT = "RESULT "


def command(out: Path, small: bool, target: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return the command that runs a part.

    -P keeps a folder `tools` in the current directory from shadowing ours.
    """
    size = "small" if small else "real"
    return [
        sys.executable,
        "-P",
        "-m",
        __name__,
        str(out),
        size,
        target,
        json.dumps(dict(arguments)),
    ]


def main(out: str, size: str, target: str, arguments: str) -> int:
    """Run a part and print its figures in the last line. Returns 0 if it produced figures, else 1."""
    from .place import Place

    module, name = target.split(":")
    part = getattr(importlib.import_module(f"r3async.tools.gpu_check.{module}"), name)
    try:
        figures = part(Place(Path(out), size == "small"), **json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        print(RESULT + json.dumps({"failure": f"{type(error).__name__}: {error}"[:600]}))
        return 1
    print(RESULT + json.dumps(figures))
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of an engine that did not stop must not delay the results
