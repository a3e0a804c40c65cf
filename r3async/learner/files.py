"""Writing a model directory that is complete or not there."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor

from r3async.world.files import make_directory, replace_directory


def save_model(directory: Path, source: Path, tensors: Mapping[str, Tensor], dtype: str) -> None:
    """Write `tensors`, of `dtype`, as a Hugging Face model directory with the configuration and tokenizer of `source`.

    It is written aside and renamed; what was at `directory` is replaced.
    """
    make_directory(directory.parent)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        save_torch_state_dict({k: v.cpu() for k, v in tensors.items()}, aside, metadata={"format": "pt"})
        for path in source.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".bin", ".index.json", ".pt", ".gguf")):
                shutil.copy2(path, aside / path.name)
        described = json.loads((source / "config.json").read_text())
        described.pop("torch_dtype", None)
        described["dtype"] = dtype
        (aside / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        aside.chmod(0o755)
        replace_directory(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
