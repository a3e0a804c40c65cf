"""A model built without memory: what loading it would refuse, known before anything starts."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from r3async.config import Config
from r3async.learner import LearnerError
from r3async.learner.torch.model import ATTENTION, PackedModel, read_config


def check_built(config: Config, path: Path) -> None:
    """Build the model and run it as far as shapes go. Raises `LearnerError` for one that this backend would train wrongly. What
    only values show (changed logits, masked scores) is not seen; nor are the files of weights."""
    described = read_config(path)
    try:
        loaded = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            # Matrices of experts have no kernel without values but in this precision.
            causal = AutoModelForCausalLM.from_config(loaded, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    except Exception as error:  # of many kinds: an unknown model type, numbers that do not fit
        raise LearnerError(f"transformers cannot build it: {error}") from error
    PackedModel(causal.eval(), described, longest=config.episode.max_total_tokens)
