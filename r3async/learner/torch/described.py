"""Model configuration from `config.json` alone, read before the parts of transformers that build a
model are imported.

That import takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from r3async.data.checkpoint_forms import (
    QUANTIZATION_KEYS,
    CheckpointFormError,
    read_quantized_form,
)
from r3async.learner.results import LearnerError
from r3async.untrusted import decode_python_json


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the `config.json` of a Hugging Face model directory.

    Raises `LearnerError` if it has no trainable model.
    """
    try:
        config = decode_python_json((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise LearnerError(
            f"`model.path` = {path} is not a Hugging Face model directory: config.json: {error}"
        ) from error
    try:
        read_quantized_form(config)
    except CheckpointFormError as error:
        raise LearnerError(f"{path}: {error}") from error
    return config


def load_transformers_config(path: Path) -> Any:
    """Return the configuration as transformers loads it, without what describes quantized
    weights: they are read dequantized.

    Raises `LearnerError` for a model that transformers does not know, or that samples no text.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        loaded = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # many kinds: an unknown model type, numbers that do not fit
        raise LearnerError(f"transformers cannot build it: {first_error_line(error)}") from error
    if loaded.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise LearnerError(
            f"transformers cannot build it: {loaded.model_type!r} is no causal language model"
        )
    for part in (loaded, loaded.get_text_config()):
        for key in QUANTIZATION_KEYS:
            if hasattr(part, key):
                delattr(part, key)
    return loaded


def first_error_line(error: Exception) -> str:
    """Return the first line of an error: transformers explains at length, with lists of all models
    and pip commands."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
