"""The learner's processor time is booked to stages that the catalogue knows, all of it."""

import asyncio
import time

import pytest

from r3async.data.metrics import METRICS
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.micro_batches import pack_samples
from r3async.learner.train_step import train_step
from r3async.record.process_time import LagMeter, StageTimer
from r3async.world.real import REAL_WORLD
from tests.helpers import models as hm
from tests.helpers.learner import LENGTHS, settings


def test_a_step_is_accounted_for_by_stage(tmp_path):
    learner = MegatronLearner.from_pretrained(settings(), hm.make_hf_model(tmp_path / "model"))
    micro_batches = pack_samples(hm.make_samples(1, LENGTHS), 64)

    async def run() -> tuple[dict[str, float], float]:
        meter, lane, seconds = LagMeter(), REAL_WORLD.threads.new_worker("torch"), StageTimer("learner")
        meter.start()
        try:
            seconds.read_increment()
            before = time.process_time()
            for version in range(3):
                await lane.run(train_step, learner, [micro_batches], version=version)
            return seconds.read_increment(), time.process_time() - before
        finally:
            meter.stop()
            await lane.close()

    spent, process = asyncio.run(run())
    assert {name for name, seconds in spent.items() if seconds} <= set(METRICS)  # 0: lanes of tests before
    cpu = {name: value for name, value in spent.items() if name.startswith("cpu/")}
    assert sum(cpu.values()) == pytest.approx(process, rel=0.02)
    assert max(cpu, key=lambda name: cpu[name]) == "cpu/learner_model_seconds"
    named = sum(cpu[f"cpu/learner_{name}_seconds"] for name in ("model", "optimizer", "figures"))
    assert cpu["cpu/learner_torch_seconds"] < 0.1 * named
    assert cpu["cpu/learner_optimizer_seconds"] > 0
    assert cpu["cpu/learner_figures_seconds"] > 0
