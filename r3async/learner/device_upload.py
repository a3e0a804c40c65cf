"""Uploads of what a micro-batch needs on its device, for which the host never waits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload_array(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy an array of the host to the device, without waiting for the device.

    On the CPU nothing is copied: the tensor shares the array's memory. The array must
    not be read-only.
    """
    values = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type != "cuda":
        return values.to(device)
    # Only from pinned memory does a copy return at once. Torch keeps that memory until the copy is
    # done, for later ones.
    return values.pin_memory().to(device, non_blocking=True)
