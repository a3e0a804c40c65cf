"""torchvision without its kernels, where they were compiled for another torch.

An engine's processes find this package before the installed torchvision, and it becomes that one.
torchvision describes two of its operators to torch even if it could not load them, and does not
import. Here they are declared first. Nothing that generates text calls them.
"""

import sys
from pathlib import Path

import torch


def _find_installed() -> Path:
    for entry in sys.path:
        package = Path(entry) / "torchvision"
        if (package / "extension.py").is_file():
            return package
    raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")


_installed = _find_installed()
try:
    torch.ops.load_library(str(_installed / "_C.so"))
except OSError:
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
__path__ = [str(_installed)]
__file__ = str(_installed / "__init__.py")
exec(compile(Path(__file__).read_text(), __file__, "exec"))
