"""Checks of a run's model before a start: files, tokenizer, sizes, the backend's own
requirements, adapters.

Only small files and the headers of weights are read; nothing is allocated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from r3async.config import Config, ConfigError
from r3async.data.checkpoint_forms import INDEX_FILE
from r3async.data.engine_models import find_engine_model, list_needed_config
from r3async.data.model_shape import (
    ModelShape,
    ModelShapeError,
    check_size_values,
    parse_model_shape,
    read_moe_layers,
    take_text_config,
)
from r3async.learner import LearnerError
from r3async.learner.adapter_targets import select_targets
from r3async.rollout.vllm.engine_packages import has_torchvision
from r3async.untrusted import decode_model_config
from r3async.world.processes import pause_garbage_collector

from .adapted import list_adaptable_matrices
from .memory import check_model_type

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")


def check_teacher(config: Config) -> None:
    """Check that `algorithm.distillation.teacher`, if set, is a model that reads
    the same tokens."""
    name = config.algorithm.distillation.teacher
    if not name or config.algorithm.distillation.is_served:
        return
    check_model_files(name, "algorithm.distillation.teacher")
    if Path(config.model.path or "-").is_dir():
        from r3async.learner import LearnerError
        from r3async.learner.distillation import check_same_vocabulary

        try:
            check_same_vocabulary(Path(config.model.path), Path(name))
        except LearnerError as error:
            raise ConfigError(str(error)) from error


def check_model_directory(name: str) -> None:
    """Check that `model.path` is a model with weights, a tokenizer and a chat template. Reads
    small files only."""
    path = Path(name)
    said = check_model_files(name, "model.path")
    settings = (
        _read_json(path / "tokenizer_config.json", said)
        if (path / "tokenizer_config.json").is_file()
        else {}
    )
    if not settings.get("chat_template") and not any(
        (path / file).exists() for file in CHAT_TEMPLATE_FILES
    ):
        raise ConfigError(
            f"{said} has no chat template, so messages cannot be shown to it: add "
            "chat_template.jinja, or take the model's instruction-tuned version"
        )


def check_model_files(name: str, setting: str) -> str:
    """Check that `setting` is a model with weights and a tokenizer. Returns its
    label for messages."""
    path = Path(name)
    said = f"`{setting}` = {name!r}"
    if not path.exists():
        raise ConfigError(f"{said} is not a model directory (no config.json in it)")
    if not path.is_dir():
        raise ConfigError(
            f"{said} is a file, not a model directory: name the directory with config.json in it"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"{said} is not a model directory (no config.json in it)")
    if "model_type" not in _read_json(path / "config.json", said):
        raise ConfigError(
            f"{said}: its config.json has no `model_type`, so it is no Hugging Face model"
        )
    if not any(file for pattern in WEIGHT_PATTERNS for file in path.glob(pattern)):
        raise ConfigError(f"{said} has no weights: no *.safetensors in it")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{said} has no *.safetensors, and its .bin files are not read: "
            "`AutoModelForCausalLM.from_pretrained(…)"
            ".save_pretrained(…)` writes them"
        )
    _check_shards(path, said)
    if not any((path / file).exists() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"{said} has no tokenizer: copy tokenizer.json and tokenizer_config.json of "
            "the model into it"
        )
    return said


def _check_shards(path: Path, label: str) -> None:
    """Check that all shards of a model are there, with the index of their contents."""
    index = path / INDEX_FILE
    shards = sorted(file.name for file in path.glob("*-of-*.safetensors"))
    if index.is_file():
        named = _read_json(index, label).get("weight_map", {})
        lacking = sorted({str(name) for name in named.values() if not (path / str(name)).is_file()})
        if lacking:
            raise ConfigError(
                f"{label} lacks {len(lacking)} of its files of weights, such as {lacking[0]}: "
                "copy them into it"
            )
    elif shards and not (path / "model.safetensors").is_file():
        count = shards[0].removesuffix(".safetensors").rpartition("-of-")[2]
        if count != f"{len(shards):05}":
            raise ConfigError(
                f"{label} has its weights in {len(shards)} files of {count} ({shards[0]}, …) and "
                f"no {INDEX_FILE}: copy the others into the directory"
            )


def _read_json(path: Path, label: str) -> dict[str, Any]:
    try:
        data = decode_model_config(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{label}: {path.name} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}


def check_engine_config(config: Config, *, on_cpu: bool) -> None:
    """Check that vLLM computes what the `config.json` says, and can on this machine.

    Args:
        on_cpu: The engines certainly have no GPU.
    """
    if config.generator.engine != "vllm":
        return
    described = _read_json(Path(config.model.path) / "config.json", "`model.path`")
    try:
        text = take_text_config(described)
    except ModelShapeError as error:
        raise ConfigError(f"`model.path` = {config.model.path!r}: {error}") from error
    kind = str(text.get("model_type"))
    known = find_engine_model(kind)
    where = f"`model.path` = {config.model.path!r}"
    reason = known.unsupported_reason or (known.cpu_unsupported_reason if on_cpu else "")
    if reason:
        raise ConfigError(
            f"{where}: vLLM{' on CPU' if not known.unsupported_reason else ''} cannot generate "
            f"with {kind}: {reason}. `r3async sft` trains it"
        )
    if on_cpu and known.cpu_dtype_reason and config.generator.dtype != "bfloat16":
        raise ConfigError(
            f"{where}: vLLM on CPU generates with {kind} in bfloat16 only: "
            f"{known.cpu_dtype_reason}. Set generator.dtype=bfloat16"
        )
    if on_cpu and not known.has_cpu_kernel(text):
        raise ConfigError(
            f"{where}: vLLM on CPU generates with {kind} only where `linear_key_head_dim` and "
            f"`linear_value_head_dim` are equal, and {' or '.join(map(str, known.cpu_head_dims))}. "
            "`r3async sft` trains it"
        )
    if on_cpu and known.imports_torchvision and not has_torchvision():
        raise ConfigError(
            f"{where}: vLLM imports torchvision for {kind}, and engines have none: `make install` "
            "installs it for them"
        )
    for key, needed in list_needed_config(text).items():
        if text.get(key) != needed:
            raise ConfigError(
                f"{where}: its config.json has `{key}` = {json.dumps(text.get(key))}, and vLLM "
                f"computes {kind} with {json.dumps(needed)} only: add it to that file"
            )
    for key, value in known.iter_differences(text):
        raise ConfigError(
            f"{where}: its config.json has `{key}` = {json.dumps(text[key])}, which vLLM does not "
            f"read: it computes {kind} with {json.dumps(value)}, so engine and learner would have "
            "different models. `r3async sft` trains it"
        )


def check_model_kind(config: Config) -> None:
    """Check that a backend trains models of this type, and that the sizes in
    `config.json` are possible."""
    path = Path(config.model.path)
    described = _read_json(path / "config.json", "`model.path`")
    check_model_type(described, path.name)
    try:
        read_moe_layers(described)
    except ModelShapeError as error:
        raise ConfigError(f"{path.name} cannot be trained: {error}") from error


def read_evaluated_shape(path: Path) -> ModelShape | None:
    """Return the shape of a model that only generates; None if it describes itself by keys that
    nothing here reads.

    Raises `ConfigError` for sizes that no model can have.
    """
    described = _read_json(path / "config.json", str(path))
    try:
        check_size_values(take_text_config(described))
    except ModelShapeError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    try:
        return parse_model_shape(described, path.name)
    except ModelShapeError:
        return None


def check_tokenizer(config: Config) -> None:
    """Load the tokenizer and render a message with its chat template. Raises `ConfigError`."""
    from .rows import make_renderer

    make_renderer(config)


def check_buildable(config: Config) -> None:
    """Check that the backend can build the model, shard it, and give it the adapters
    of `learner.lora`.

    Raises `ConfigError`.
    """
    path = Path(config.model.path)
    try:
        with pause_garbage_collector():
            _check_backend_build(config, path)
    except LearnerError as error:
        raise ConfigError(f"`model.path` = {str(path)!r}: {error}") from error
    except Exception as error:
        # Many kinds: transformers reads other keys of config.json without looking at them.
        line = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"`model.path` = {str(path)!r}: its config.json describes no model that can be built: "
            f"{type(error).__name__}: {line:.200}"
        ) from error


def _check_backend_build(config: Config, path: Path) -> None:
    """Check the model with its backend. Raises `LearnerError`."""
    if config.learner.backend == "megatron":
        from r3async.learner.model import check_model_directory as check_megatron_model

        check_megatron_model(path, config.learner)
    elif config.learner.backend == "torch":
        from r3async.learner.torch.backend import check_buildable as check_torch_model

        check_torch_model(config, path)


def check_planned_adapters(config: Config, shape: ModelShape) -> None:
    """Check that `learner.lora.targets` name matrices of a model of this shape, which is not on
    this machine yet."""
    if not config.learner.lora.rank:
        return
    modules = [
        (matrix.name, matrix.name.endswith("mlp.gate"))
        for layer in range(shape.num_layers)
        for matrix in list_adaptable_matrices(
            shape, layer, fused_gate_up=config.learner.backend == "torch"
        )
    ]
    try:
        select_targets(config.learner, modules)
    except LearnerError as error:
        raise ConfigError(str(error)) from error
