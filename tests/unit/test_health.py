"""A generator's health, for any order of events."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from r3async.schedule.health import Health, HealthState, RestartsExhausted


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def healthy(clock, **settings):
    health = Health(clock, **settings)
    health.loaded()
    health.installed(3, 3)
    return health


def test_it_leases_only_with_current_weights():
    clock = Clock()
    health = Health(clock)
    assert not health.may_lease
    health.loaded()
    assert (health.state, health.may_lease) == (HealthState.STALE, False)
    health.installed(2, 3)
    assert not health.may_lease
    health.installed(3, 3)
    assert health.may_lease


def test_silence_makes_it_suspect_and_a_word_healthy_again():
    clock = Clock()
    health = healthy(clock, silence=10)
    clock.now += 10
    assert not health.tick()
    clock.now += 1
    assert health.tick()
    assert not health.tick()  # told once
    assert (health.state, health.may_lease, health.version) == (HealthState.SUSPECT, False, 3)
    health.answered()
    assert health.may_lease
    assert health.silent_for == 0


def test_a_late_answer_does_not_revive_the_dead_and_its_weights_are_gone():
    health = healthy(Clock())
    health.lost()
    health.answered()
    assert (health.state, health.version) == (HealthState.LOST, -1)
    with pytest.raises(ValueError, match="cannot install"):
        health.installed(4, 4)


def test_versions_only_go_up():
    health = healthy(Clock())
    with pytest.raises(ValueError, match="only go up"):
        health.installed(2, 3)


def test_the_backoff_doubles_and_is_forgiven_after_a_healthy_stretch():
    clock = Clock()
    health = healthy(clock, backoff=1, backoff_max=5, forgive=100)
    waits = []
    for stretch in (0, 0, 0, 0, 99, 100):
        clock.now += stretch
        health.lost()
        waits.append(health.restart_in)
        clock.now += health.restart_in
        assert health.restart_in == 0
        health.restarting()
        health.loaded()
        health.installed(3, 3)
    assert waits == [1, 2, 4, 5, 5, 1]


def test_restarts_are_counted_and_run_out():
    health = healthy(Clock(), max_restarts=1)
    health.lost()
    health.lost()
    health.restarting()
    health.lost()
    with pytest.raises(RestartsExhausted, match="lost 2 times, 1 restarts"):
        health.restarting()


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens: only one with the newest weights that has answered leases, and none gets stuck."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.health = Health(self.clock, silence=5, max_restarts=1000)
        self.current = self.behind = 0
        self.answered_at = self.clock.now

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds):
        self.clock.now += seconds
        self.health.tick()

    @rule()
    def a_version_is_published(self):
        self.current += 1

    @rule()
    def answered(self):
        self.health.answered()
        self.answered_at = self.clock.now

    @rule()
    def lost(self):
        self.health.lost()

    @precondition(lambda self: self.health.state is HealthState.STARTING)
    @rule()
    def loaded(self):
        self.health.loaded()
        self.answered_at = self.clock.now

    @precondition(lambda self: self.health.state not in (HealthState.STARTING, HealthState.LOST))
    @rule(lag=st.integers(0, 2))
    def installed(self, lag):
        self.health.installed(max(self.health.version, self.current - lag), self.current)
        self.answered_at = self.clock.now

    @precondition(lambda self: self.health.state is HealthState.LOST)
    @rule()
    def restarted(self):
        self.clock.now += self.health.restart_in
        self.health.restarting()

    @invariant()
    def leases_only_with_weights_and_a_voice(self):
        if self.health.may_lease:
            assert self.health.version >= 0
            assert self.clock.now - self.answered_at <= 25
        if self.health.state in (HealthState.STARTING, HealthState.LOST):
            assert not self.health.may_lease
        if self.health.state is HealthState.LOST:
            assert self.health.version == -1
            assert self.health.restart_in <= 60.001


TestAnyOrder = AnyOrder.TestCase
