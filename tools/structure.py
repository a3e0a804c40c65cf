"""What a dry run looks at besides numbers: whether the model that is here could be built, loaded and divided as the run would do
it. Nothing is allocated: tensors have shapes only."""

from __future__ import annotations

from pathlib import Path

from r3async.config import Config, ConfigError
from r3async.tools.memory import check_router_settings, shape_of
from r3async.tools.preflight import check_engine_keys, check_model, check_teacher
from r3async.world.processes import collector_paused


def check_directory(config: Config) -> None:
    """The directories of the model and its teacher, if they are on this machine: see `preflight`."""
    if config.model.path and Path(config.model.path).exists():
        check_model(config.model.path)
    if (teacher := config.algorithm.distillation.teacher) and Path(teacher).exists():
        check_teacher(config)


def check_structure(config: Config) -> None:
    """Raise `ConfigError` for what the start would refuse, or be stuck with."""
    shape, _ = shape_of(config)
    check_router_settings(shape, config)
    if config.model.path and Path(config.model.path).exists():
        check_engine_keys(config)
        check_built(config, Path(config.model.path))


def check_built(config: Config, path: Path) -> None:
    """The backend has all that it makes the model of, or builds it."""
    from r3async.learner import LearnerError

    try:
        with collector_paused():
            _build(config, path)
    except LearnerError as error:
        raise ConfigError(f"`model.path` = {str(path)!r}: {error}") from error


def _build(config: Config, path: Path) -> None:
    """Raises `LearnerError`."""
    if config.learner.backend == "megatron":
        from r3async.learner.trained import check_model as fits

        fits(path, config.learner.parallel)
    elif config.learner.backend == "torch":
        from r3async.learner.torch.built import check_built as built

        built(config, path)
