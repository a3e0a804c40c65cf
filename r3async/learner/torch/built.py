"""A model built without memory: what loading it would refuse, known before anything starts."""

from __future__ import annotations

from pathlib import Path

from r3async.config import Config
from r3async.learner import LearnerError
from r3async.learner.torch.described import first_error_line, load_transformers_config, read_model_config


def check_buildable(config: Config, path: Path) -> None:
    """Build the model and run it as far as shapes go. Raises `LearnerError` for one that this backend would train wrongly. What
    only values show (changed logits, masked scores) is not seen; nor are the files of weights."""
    described, loaded = read_model_config(path), load_transformers_config(path)

    import torch
    from transformers import AutoModelForCausalLM

    from r3async.learner.torch.model import ATTENTION_NAME, PackedModel

    try:
        with torch.device("meta"):
            # Matrices of experts have no kernel without values but in this precision.
            causal = AutoModelForCausalLM.from_config(loaded, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    except Exception as error:  # of many kinds: numbers that do not fit
        raise LearnerError(f"transformers cannot build it: {first_error_line(error)}") from error
    PackedModel(causal.eval(), described, max_total_tokens=config.episode.max_total_tokens)
