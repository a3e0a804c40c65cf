"""A torchvision whose kernels do not fit is imported by an engine's processes, and by no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from r3async.rollout.vllm import engine_packages

PARTS = {
    "__init__.py": "from torchvision import _meta_registrations, extension\n__version__ = '1'\n",
    "extension.py": "import torch\ntorch.ops.load_library\n",
    "_meta_registrations.py": """
import torch
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets
@torch.library.register_fake("torchvision::qnms")
def qnms(dets, scores, iou_threshold):
    return dets
""",
    "_C.so": "no library of this torch",
}
"""What of torchvision 0.28 breaks without its kernels."""
CODE = """
import subprocess, sys, torchvision
assert torchvision.__version__ == '1' and 'share' in torchvision.__file__ and 'share' in torchvision.extension.__file__
if len(sys.argv) == 1:
    raise SystemExit(subprocess.run([sys.executable, '-c', open('code.py').read(), 'child']).returncode)
"""


@pytest.fixture
def prefix(tmp_path, monkeypatch) -> Path:
    package = tmp_path / engine_packages.ENGINE_PACKAGES_FOLDER / "torchvision"
    package.mkdir(parents=True)
    for name, text in PARTS.items():
        (package / name).write_text(text)
    (tmp_path / "code.py").write_text(CODE)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    return tmp_path


def run(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True)


@pytest.mark.long
def test_engines_and_what_they_start_import_it(prefix):
    assert engine_packages.has_torchvision()
    engine_packages.expose_engine_packages()
    assert sys.path[1] == str(prefix / engine_packages.ENGINE_PACKAGES_FOLDER)
    done = run(CODE, prefix)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_other_processes_do_not(prefix):
    assert "ModuleNotFoundError: No module named 'torchvision'" in run("import torchvision", prefix).stderr
    code = (
        f"import sys; sys.path.insert(0, {str(prefix / engine_packages.ENGINE_PACKAGES_FOLDER)!r}); import torchvision"
    )
    assert "torchvision::nms does not exist" in run(code, prefix).stderr, "this is no torchvision that breaks"


def test_nothing_is_changed_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    before = list(sys.path)
    engine_packages.expose_engine_packages()
    assert sys.path == before
