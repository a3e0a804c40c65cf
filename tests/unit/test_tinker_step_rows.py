"""Rows of a served client's steps, of which each is written once."""

import numpy as np

from r3async.record.reading import read_json_objects
from r3async.tinker.backend import LossBatch
from r3async.tinker.protocol import TrainResult
from r3async.tinker.step_rows import StepRows
from r3async.world.real import REAL_WORLD


def step(rows, version, loss):
    batch = LossBatch("cross_entropy", {}, [], version)
    rows.add_training("m", batch, TrainResult([np.zeros(4, np.float32)], {"loss:sum": loss}))
    rows.write_step("m", 0.1, {"grad_norm": 1.0, "optimizer/skipped": 0.0})


def read(tmp_path):
    return [(row["step"], row["version"], row["loss/answers"]) for row in read_json_objects(tmp_path / "metrics.jsonl")]


def test_a_step_that_is_made_again_to_restore_its_model_has_one_row(tmp_path):
    rows = StepRows(tmp_path, REAL_WORLD)
    step(rows, 0, 4.0)
    rows.add_training("m", LossBatch("cross_entropy", {}, [], 1), TrainResult([np.zeros(4)], {"loss:sum": 9.0}))
    rows.begin_model("m")  # it was lost, with that part of a gradient
    step(rows, 0, 4.0)
    step(rows, 1, 8.0)
    rows.close()
    assert read(tmp_path) == [(1, 1, 1.0), (2, 2, 2.0)]
    again = StepRows(tmp_path, REAL_WORLD)
    step(again, 1, 8.0)
    step(again, 2, 12.0)
    again.close()
    assert read(tmp_path) == [(1, 1, 1.0), (2, 2, 2.0), (3, 3, 3.0)]
