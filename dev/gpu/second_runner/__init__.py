"""vLLM's second model runner, the one that CUDA uses, on CPU: its Triton kernels are run by
Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """Return the environment variables of engines with the second model runner.

    Processes that begin with them import `sitecustomize` of this folder. They cannot go back.
    """
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
