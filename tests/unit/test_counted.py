"""What the conductor counts as it changes is what it would find if it looked at every generator."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from r3async.actors.fleet import Fleet
from r3async.config import load_config
from r3async.schedule.health import HealthState, RestartsExhausted
from r3async.schedule.watchdog import Watchdog
from tests.helpers.world import Clock

NAMES = ["generator-0", "generator-1", "generator-2"]
silent = SimpleNamespace(warning=lambda *_, **__: None, info=lambda *_, **__: None)


def happen(fleet: Fleet, clock: Clock, event: str, name: str, version: int) -> None:
    """One thing, if it can happen to that generator now."""
    generator = fleet[name]
    health, state = generator.health, generator.state
    if event == "idle" or event == "busy":
        fleet.set_idle(name, event == "idle")
    elif event == "silence":
        clock.now += 1000.0
        fleet.check_silence()
    elif event == "answer":
        fleet.note_answer(generator)
    elif event == "lose":
        fleet.mark_lost(generator)
    elif event == "load" and state is HealthState.STARTING:
        health.mark_loaded()
    elif event == "restart" and state is HealthState.LOST:
        try:
            health.begin_restart()
        except RestartsExhausted:
            return
    elif event == "install" and state not in (HealthState.STARTING, HealthState.LOST):
        health.mark_installed(max(version, health.version), max(version, health.version) + version % 2)


EVENTS = ["idle", "busy", "silence", "answer", "lose", "load", "restart", "install"]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(NAMES), st.integers(0, 9)), max_size=60))
def test_those_able_to_begin(events):
    clock = Clock()
    fleet = Fleet(load_config("quickstart", []), silent, dict.fromkeys(NAMES), clock)
    idle = set()
    for event, name, version in events:
        happen(fleet, clock, event, name, version)
        if event in ("idle", "busy"):
            (idle.add if event == "idle" else idle.discard)(name)
        assert set(fleet.ready_ids) == {n for n in idle if fleet[n].state is HealthState.HEALTHY}
        assert fleet.describe_generators() == [
            {"id": g.generator_id, "state": str(g.state), "version": g.version, "restarts": g.restarts, "pid": g.pid}
            for g in fleet
        ]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.none() | st.tuples(st.integers(0, 9), st.integers(0, 2))), max_size=40
    )
)
def test_what_all_stages_have_done(seen):
    dog = Watchdog(Clock(), 10.0)
    for stage, report in seen:
        if report is None:
            dog.forget_stage(stage)
        else:
            dog.observe_stage(stage, *report)
        stages = dog.describe_stages()
        stages.pop("a", None)
        done = sum(s["done"] for s in stages.values())
        assert dog.total_others("a") == (done, sum(s["waiting"] > 0 for s in stages.values()))
