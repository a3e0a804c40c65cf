"""Whole runs, simulated, in which weights do not arrive as they were published, or log-probs are not those of what was sampled:
each is stopped, and the reason is named. What an engine itself notices:
`engine/test_vllm_faults.py`."""

import msgspec
import pytest

from r3async.actors.process import RunFailed
from r3async.record.reading import read_json_objects
from r3async.rollout.engine import EngineError
from r3async.rollout.scripted import ScriptedEngine
from r3async.weights.manifest import TensorMismatch
from tests.sim.whole import Player, Simulated

SEEDS = pytest.mark.parametrize("seed", range(3))
CHANGES = ["steps=6", "weights.probe_every=1"]


class Refuses(ScriptedEngine):
    """The bytes of version 1 are not those that were published."""

    async def install_version(self, manifest, timeout):
        if manifest.version:
            raise EngineError("weights version 1: tensor 'a' is corrupt: its checksum differs from the published one")
        return await super().install_version(manifest, timeout)


class Misses(ScriptedEngine):
    """From version 1 on, nothing is installed."""

    async def install_version(self, manifest, timeout):
        report = await super().install_version(manifest, timeout)
        return msgspec.structs.replace(report, version=0)


class Pretends(ScriptedEngine):
    """From version 1 on, nothing is installed, but it says so."""

    spoilt_from = 1

    def _apply_version(self, manifest, began, seconds):
        super()._apply_version(manifest, began, seconds)
        if manifest.version >= self.spoilt_from:
            self._weights_keys[manifest.version] = 7

    async def find_weight_differences(self, manifest, timeout):
        return [TensorMismatch("a", "packed_a", 3)]


class NeverRight(Pretends):
    """Also the first weights are damaged on the way into it."""

    spoilt_from = 0


class Stale(ScriptedEngine):
    """Its prefix cache does not know which weights a request came with."""

    async def count_stale_cached_tokens(self, token_ids):
        return 32 if self.version else 0


class BeforeTemperature(ScriptedEngine):
    """Reports the log-probs of temperature 1, whatever it samples at."""

    async def generate(self, request):
        return await super().generate(msgspec.structs.replace(request, temperature=1.0))


def with_engine(kind):
    """The run's actors, with engines of that kind."""

    class Faulty(Player):
        def make_engine(self, model_path, seed):
            engine = super().make_engine(model_path, seed)
            engine.__class__ = kind  # its scripts, its routes, its pace
            return engine

    class Run(Simulated):
        generator_class = Faulty

    return Run


@SEEDS
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Refuses, r"generator-0: .*version 1.*tensor 'a' is corrupt"),
        (Misses, r"generator-0 was given version 1 of the weights, but it has version 0: it missed an update"),
        (
            Pretends,
            r"version 1 of the weights in generator-0 does not answer .* The engine does not hold 'a' \(3 elements of parameter",
        ),
        (
            Stale,
            r"generator-0: a new request under version 1 took 32 positions from a prefix cache that older weights made",
        ),
    ],
)
def test_a_fault_of_delivery_stops_the_run_and_is_named(machine, kind, reason, seed):
    with pytest.raises(RunFailed, match=reason):
        machine.train(*CHANGES, pipeline=with_engine(kind))
    # Nothing was trained after the step that made it, whose slots it would have freed.
    rows = read_json_objects(machine.run_dir / "metrics.jsonl")
    assert [row["version"] for row in rows if row["version"] >= 1] == [1]


def test_weights_that_arrive_corrupted_stop_the_run_before_it_trains(machine):
    with pytest.raises(RunFailed, match=r"log-probs .* the largest is .* at position"):
        machine.train(*CHANGES, pipeline=with_engine(NeverRight))
    assert machine.rows() == []
    assert not (machine.run_dir / "model").exists()


def test_log_probs_before_temperature_stop_the_run_before_it_trains(machine):
    """The text that learner and engine score says nothing of it: only what is sampled does."""
    with pytest.raises(RunFailed, match=r"generator-0 under version 0 reports other log-probs than it samples with"):
        machine.train(*CHANGES, "episode.temperature=0.7", pipeline=with_engine(BeforeTemperature))
    assert machine.rows() == []


@SEEDS
@pytest.mark.parametrize("backend", ["shared_memory", "tcp"])
def test_a_run_whose_every_version_is_probed_on_every_generator(machine, backend, seed):
    settings = [*CHANGES, f"weights.backend={backend}", "generator.count=2", "episode.temperature=0.8"]
    machine.train(*settings, "weights.bucket_bytes=100")
    assert [r["version"] for r in machine.rows()] == [1, 2, 3, 4, 5, 6]
    for name in ("probe", "probe_sampled"):
        probes = machine.events(name)
        assert {e["generator"] for e in probes} == {"generator-0", "generator-1"}
        assert probes[-1]["version"] == 6
        assert all(e["mean_difference"] < 1e-4 for e in probes)
