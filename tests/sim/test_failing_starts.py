"""Whole runs, simulated, whose generators fail at their start: alike twice ends the run, a loss after play does not."""

import pytest

from r3async.actors.process import RunFailed
from r3async.rollout.engine import EngineLostError
from r3async.rollout.scripted import ScriptedEngine
from r3async.views.summary import summarize_run


def fail_from(monkeypatch, first):
    """Let each engine fail at its requests from number `first` on, counted over all engines. Returns the requests."""
    generate, requests = ScriptedEngine.generate, []

    async def generate_or_fail(self, request):
        requests.append(request)
        if first <= len(requests):
            self.lose_process()
            raise EngineLostError("no kernel for 96 elements a head")
        return await generate(self, request)

    monkeypatch.setattr(ScriptedEngine, "generate", generate_or_fail)
    return requests


def test_a_run_whose_generator_fails_twice_alike_at_its_start_ends_with_the_cause(machine, monkeypatch):
    fail_from(monkeypatch, 1)
    cause = "generator-0 failed 2 times in the same way before it had played an episode: its engine is lost: no kernel"
    with pytest.raises(RunFailed, match=cause):
        machine.train("steps=3", "generator.count=1", "supervise.max_run_restarts=3", "weights.probe=false")
    assert len(machine.events("generator_lost")) == 2
    assert len(machine.events("generator_restarted")) == 1
    assert not machine.events("run_restarted")
    (failed,) = machine.events("run_failed")
    assert cause in failed["error"]
    assert summarize_run(machine.run_dir).status == "failed"


def test_a_generator_that_has_played_and_is_then_lost_twice_alike_is_restarted_as_often_as_it_may(machine, monkeypatch):
    fail_from(monkeypatch, 400)
    with pytest.raises(RunFailed, match=r"was lost 5 times \(generator.max_restarts = 4\).*no kernel for 96 elements"):
        machine.train("steps=100", "generator.count=1", "generator.max_restarts=4", "weights.probe=false")
    assert len(machine.events("generator_restarted")) == 4
