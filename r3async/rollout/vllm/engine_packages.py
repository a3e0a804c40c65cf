"""Packages that engines on CPU import and no other process does.

vLLM imports torchvision for some models of text, because their classes are those of models with
images. Its kernels are built for CUDA where an index has no build for torch's CPU one, and then
any use of transformers in the same environment fails. So `make install` puts it into a folder that
only engines look into, where it is imported without kernels (`engine_path/torchvision`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ENGINE_PACKAGES_FOLDER = "share/r3async/vllm"
"""Folder of these packages in the environment's `sys.prefix`; `Makefile` installs them."""


def find_engine_packages() -> Path | None:
    """Return the folder with torchvision for engines; None if there is none."""
    folder = Path(sys.prefix) / ENGINE_PACKAGES_FOLDER
    return folder if (folder / "torchvision").is_dir() else None


def has_torchvision() -> bool:
    """Return True if engines can import torchvision."""
    return find_engine_packages() is not None or bool(importlib.util.find_spec("torchvision"))


def expose_engine_packages() -> None:
    """Let this process, and each that it starts, import the packages, if they are installed."""
    folder = find_engine_packages()
    if folder is None:
        return
    added = [str(Path(__file__).with_name("engine_path")), str(folder)]
    sys.path[:0] = added
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, inherited] if inherited else added)
