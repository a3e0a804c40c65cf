"""`r3async export`: the model of a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from r3async.checkpoint import CheckpointError, Opened, find_checkpoint
from r3async.config import Config, ParallelConfig, config_from_dict


def export(run_or_checkpoint: Path, directory: Path, *, model: Path | None = None) -> Opened:
    """Write what `LearnerBackend.save` would have written at that step, bit for bit; returns the checkpoint it is from.

    In host memory, by one process, whatever ranks trained: it takes 4 bytes a parameter, and 2 more where training was in
    bfloat16. `model`: where the start model is now, if it was moved: architecture and tokenizer are read there. Raises
    `CheckpointError`, or `FileExistsError` if `directory` is there.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists: name another directory, or remove it")
    opened = find_checkpoint(run_or_checkpoint)
    source = model or Path(opened.state.model_path)
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"the start model is not in {source} any more, and architecture and tokenizer are read there: name its directory "
            "with --model"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a model that many devices trained need not fit on one
    from r3async.learner import build_learner

    learner = build_learner(_alone(opened), source)
    try:
        learner.restore(opened.learner(), optimizer=False)
        learner.save(directory)
    finally:
        learner.close()
    return opened


def _alone(opened: Opened) -> Config:
    """The run's configuration, on one rank."""
    config = config_from_dict({k: v for k, v in opened.state.config.items() if k in Config.__struct_fields__})
    config.algorithm.reference_kl.coef = 0.0  # or a copy of the start model would be kept
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, parallel=ParallelConfig()))
