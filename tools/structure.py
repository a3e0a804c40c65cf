"""Check for a dry run that a local model can be built, loaded and sharded as in the run.

Nothing is allocated: tensors have shapes only.
"""

from __future__ import annotations

from pathlib import Path

from r3async.config import Config, ConfigError
from r3async.world.processes import pause_garbage_collector

from .memory import check_router_settings, find_model_shape
from .preflight import check_engine_config, check_model_directory, check_teacher


def check_local_models(config: Config) -> None:
    """Check the directories of the model and its teacher, if they are on this machine; see `preflight`."""
    if config.model.path and Path(config.model.path).exists():
        check_model_directory(config.model.path)
    if (teacher := config.algorithm.distillation.teacher) and Path(teacher).exists():
        check_teacher(config)


def check_model_structure(config: Config) -> None:
    """Raise `ConfigError` for a model that the start would refuse or get stuck with."""
    shape, _ = find_model_shape(config)
    check_router_settings(shape, config)
    if config.model.path and Path(config.model.path).exists():
        check_engine_config(config)
        check_buildable(config, Path(config.model.path))


def check_buildable(config: Config, path: Path) -> None:
    """Check that the backend can build the model, or has everything for it."""
    from r3async.learner import LearnerError

    try:
        with pause_garbage_collector():
            _check_backend_build(config, path)
    except LearnerError as error:
        raise ConfigError(f"`model.path` = {str(path)!r}: {error}") from error


def _check_backend_build(config: Config, path: Path) -> None:
    """Check the model with its backend. Raises `LearnerError`."""
    if config.learner.backend == "megatron":
        from r3async.learner.model import check_model_directory as fits

        fits(path, config.learner.parallel)
    elif config.learner.backend == "torch":
        from r3async.learner.torch.backend import check_buildable as built

        built(config, path)
