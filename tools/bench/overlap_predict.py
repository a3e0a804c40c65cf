"""`bench overlap --predict`: what the cluster model says of every bound, given the durations of the run with S = 1 alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import msgspec

from r3async.config import Config
from r3async.tools.simulate.calibrate import calibrate
from r3async.tools.simulate.cluster import predict
from r3async.tools.simulate.model import Model

CALIBRATED_ON = 1
"""`max_staleness` of the run whose durations are taken."""
SEEDS = 30
"""Runs predicted of each bound: so many that their mean has little noise of its own."""


class Predicted(msgspec.Struct, frozen=True):
    """Seconds a step of one bound. `error`: of the prediction, as a share of what was measured."""

    max_staleness: int
    measured: float
    predicted: float
    error: float


class Prediction(msgspec.Struct, frozen=True):
    """`model`: as it was calibrated, for `max_staleness` = `CALIBRATED_ON`."""

    calibrated_on: int
    model: Model
    points: list[Predicted]


def predict_all(measured: Mapping[int, float], run_dir: Path, config: Config, settle: int) -> Prediction:
    """`measured`: seconds a step by bound. `run_dir`, `config`: of the run with `CALIBRATED_ON`. `settle`: its first steps, which
    are left out. Raises `CalibrationError`."""
    model = calibrate(run_dir, config, settle)
    points = []
    for bound, seconds in sorted(measured.items()):
        slots = (bound + 1) * model.groups_per_step * model.samples_per_group
        settings = msgspec.structs.replace(model, max_staleness=bound, places=slots)
        made = fmean(
            predict(settings, steps=config.steps, settle=settle, seed=seed, ends=True).seconds_per_step
            for seed in range(SEEDS)
        )
        points.append(Predicted(bound, seconds, made, made / seconds - 1))
    return Prediction(CALIBRATED_ON, model, points)
