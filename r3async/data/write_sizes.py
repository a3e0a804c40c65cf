"""The bytes of a model that a run writes. Its time limits are computed from them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from r3async.config import Config
from r3async.data.model_shape import ModelShapeError, parse_model_shape
from r3async.untrusted import MalformedError, decode_python_json
from r3async.world import Files
from r3async.world.files import read_file
from r3async.world.real import REAL_WORLD

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of one value, keyed by dtype."""
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Bytes of each parameter in a checkpoint: the weight and two moments in float32."""


class WriteSizes(NamedTuple):
    """Sizes in bytes of one version of the weights and of one checkpoint."""

    version_bytes: int
    checkpoint_bytes: int

    @classmethod
    def for_model(cls, config: Config, parameters: int) -> WriteSizes:
        """Return the sizes for a model with this number of parameters.

        A checkpoint of adapters (`learner.lora`) is too small to count: 0.
        """
        trained = 0 if config.learner.lora.rank else parameters
        return cls(
            DTYPE_BYTES[config.generator.dtype] * parameters,
            CHECKPOINT_BYTES_PER_PARAMETER * trained,
        )


UNKNOWN_SIZES = WriteSizes(0, 0)
"""Sizes of a model about which nothing is known: each time limit is then the one
that any model has."""


def read_write_sizes(
    config: Config, model_path: Path, *, files: Files = REAL_WORLD.files
) -> WriteSizes:
    """Return the sizes for the model in a directory; `UNKNOWN_SIZES` if its `config.json` does
    not tell its shape."""
    try:
        shape = parse_model_shape(
            decode_python_json(read_file(model_path / "config.json", files=files))
        )
    except (OSError, MalformedError, ModelShapeError):
        return UNKNOWN_SIZES
    return WriteSizes.for_model(config, shape.num_parameters)
