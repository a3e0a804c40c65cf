"""Export the model of a checkpoint as a Hugging Face directory, or its adapters in PEFT's format:
`r3async export`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from r3async.checkpoint import Checkpoint, CheckpointError, find_checkpoint
from r3async.checkpoint.resume_checks import check_start_model
from r3async.config import Config, ParallelConfig, config_from_saved
from r3async.world.files import make_directory, replace_directory


def export_model(
    run_or_checkpoint: Path, directory: Path, *, model: Path | None = None
) -> Checkpoint:
    """Write the model that `LearnerBackend.save_pretrained` would have written at that
    step, bit for bit.

    Export runs in host memory, in one process, however many ranks trained: it takes 4 bytes per
    parameter, and 2 more where training was in bfloat16. Returns the checkpoint.

    Args:
        model: The current location of the start model, if it was moved; architecture and
            tokenizer are read there.

    Raises:
        CheckpointError: The checkpoint or its start model is missing or unusable.
        FileExistsError: `directory` exists.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists: name another directory, or remove it")
    opened, source = _find_source(run_or_checkpoint, model)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a model that many devices trained need not fit on one
    from r3async.learner import build_learner

    learner = build_learner(_to_single_rank(opened), source)
    try:
        learner.restore_state(opened.open_learner_state(), with_optimizer=False)
        learner.save_pretrained(directory)
    finally:
        learner.close()
    return opened


def export_adapter(
    run_or_checkpoint: Path, directory: Path, *, model: Path | None = None
) -> Checkpoint:
    """Write the adapters of a run with `learner.lora` as PEFT reads them.

    No model is loaded. Everything else is as in `export_model`.
    """
    from r3async.checkpoint.rank_files import TensorSlice
    from r3async.learner.lora import save_adapter

    if directory.exists():
        raise FileExistsError(f"{directory} exists: name another directory, or remove it")
    opened, source = _find_source(run_or_checkpoint, model)
    lora = _to_single_rank(opened).learner.lora
    parts = opened.open_learner_state()
    if not lora.rank:
        raise CheckpointError(
            "`learner.lora.rank` is 0: the run has no adapters; without --adapter its "
            "model is exported"
        )
    kind = "master/"
    names = sorted(name for name in parts.tensor_names() if name.startswith(kind))
    tensors = {
        name.removeprefix(kind): parts.read_slice(
            TensorSlice.full_tensor(name, parts.tensor_shape(name))
        )
        for name in names
    }
    stacked = any(tensor.ndim > 2 for tensor in tensors.values())
    scratch = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    make_directory(scratch)
    try:
        save_adapter(
            scratch,
            tensors,
            lora,
            base=str(source),
            order=_list_parameters(source) if stacked else (),
        )
        replace_directory(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return opened


def _list_parameters(source: Path) -> list[str]:
    """List the names of the model's parameters in its order, without reading weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(source, local_files_only=True)
        )
    return [name for name, _ in model.named_parameters()]


def _find_source(run_or_checkpoint: Path, model: Path | None) -> tuple[Checkpoint, Path]:
    """Return the checkpoint and its start model. Raises `CheckpointError`."""
    opened = find_checkpoint(run_or_checkpoint)
    source = model or Path(opened.state.model_path)
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"the start model is not in {source} any more, and architecture and tokenizer are read "
            "there: name its directory with --model"
        )
    learner = _to_single_rank(opened).learner
    if learner.lora.rank or learner.freeze_router:  # the checkpoint has only a part of the weights
        check_start_model(opened.state, source)
    return opened, source


def _to_single_rank(opened: Checkpoint) -> Config:
    """Return the run's configuration for one rank."""
    config = config_from_saved(
        {k: v for k, v in opened.state.config.items() if k in Config.__struct_fields__}
    )
    config.algorithm.reference_kl.coef = 0.0  # otherwise a copy of the start model would be kept
    return msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, parallel=ParallelConfig())
    )
