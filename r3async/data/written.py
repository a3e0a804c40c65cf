"""How many bytes of a model a run writes: what its time limits follow from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from r3async.config import Config
from r3async.data.model_shape import ShapeError, read_shape
from r3async.untrusted import Malformed, decode_python_json
from r3async.world import Files
from r3async.world.files import read_file
from r3async.world.real import REAL

WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a value."""
STATE_WIDTH = 12
"""Bytes that a checkpoint has of a parameter: the weight and two moments in float32."""


class WrittenBytes(NamedTuple):
    """How many bytes one version of the weights has, and one checkpoint."""

    version: int
    checkpoint: int

    @classmethod
    def of(cls, config: Config, parameters: int) -> WrittenBytes:
        """Return those of a model of so many parameters. A checkpoint of adapters (`learner.lora`) has too few to count: 0."""
        trained = 0 if config.learner.lora.rank else parameters
        return cls(WIDTH[config.generator.dtype] * parameters, STATE_WIDTH * trained)


UNKNOWN = WrittenBytes(0, 0)
"""Then a limit is what any model has."""


def written_bytes(config: Config, model_path: Path, *, files: Files = REAL.files) -> WrittenBytes:
    """Return those of the model in that directory; `UNKNOWN` if its `config.json` does not say its sizes."""
    try:
        shape = read_shape(decode_python_json(read_file(model_path / "config.json", files=files)))
    except (OSError, Malformed, ShapeError):
        return UNKNOWN
    return WrittenBytes.of(config, shape.parameters)
