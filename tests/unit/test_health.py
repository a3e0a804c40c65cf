"""A generator's health, for any order of events."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from r3async.schedule.health import GeneratorHealth, HealthState, RestartsExhausted
from tests.helpers.world import Clock


def healthy(clock, **settings):
    health = GeneratorHealth(clock, **settings)
    health.mark_loaded()
    health.mark_installed(3, 3)
    return health


def test_it_leases_only_with_current_weights():
    health = GeneratorHealth(Clock())
    assert not health.can_lease
    health.mark_loaded()
    assert (health.state, health.can_lease) == (HealthState.STALE, False)
    health.mark_installed(2, 3)
    assert not health.can_lease
    health.mark_installed(3, 3)
    assert health.can_lease


def test_silence_makes_it_suspect_and_a_word_healthy_again():
    clock = Clock()
    health = healthy(clock, silence_seconds=10)
    clock.now += 10
    assert not health.check_silence()
    clock.now += 1
    assert health.check_silence()
    assert not health.check_silence()  # told once
    assert (health.state, health.can_lease, health.version) == (HealthState.SUSPECT, False, 3)
    health.note_answer()
    assert health.can_lease
    assert health.silent_seconds == 0


def test_a_late_answer_does_not_revive_the_dead_and_its_weights_are_gone():
    health = healthy(Clock())
    health.mark_lost()
    health.note_answer()
    assert (health.state, health.version) == (HealthState.LOST, -1)
    with pytest.raises(ValueError, match="cannot install"):
        health.mark_installed(4, 4)


def test_versions_only_go_up():
    health = healthy(Clock())
    with pytest.raises(ValueError, match="only go up"):
        health.mark_installed(2, 3)


def test_the_backoff_doubles_and_is_forgiven_after_a_healthy_stretch():
    clock = Clock()
    health = healthy(clock, backoff_seconds=1, max_backoff_seconds=5, forgive_seconds=100)
    waits = []
    for stretch in (0, 0, 0, 0, 99, 100):
        clock.now += stretch
        health.mark_lost()
        waits.append(health.seconds_to_restart)
        clock.now += health.seconds_to_restart
        assert health.seconds_to_restart == 0
        health.begin_restart()
        health.mark_loaded()
        health.mark_installed(3, 3)
    assert waits == [1, 2, 4, 5, 5, 1]


def test_restarts_are_counted_and_run_out():
    health = healthy(Clock(), max_restarts=1)
    health.mark_lost()
    health.mark_lost()
    health.begin_restart()
    health.mark_lost()
    with pytest.raises(RestartsExhausted, match="lost 2 times, 1 restarts"):
        health.begin_restart()


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens: only one with the newest weights that has answered leases, and none gets stuck."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.health = GeneratorHealth(self.clock, silence_seconds=5, max_restarts=1000)
        self.current = self.behind = 0
        self.answered_at = self.clock.now

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds):
        self.clock.now += seconds
        self.health.check_silence()

    @rule()
    def a_version_is_published(self):
        self.current += 1

    @rule()
    def answered(self):
        self.health.note_answer()
        self.answered_at = self.clock.now

    @rule()
    def lost(self):
        self.health.mark_lost()

    @precondition(lambda self: self.health.state is HealthState.STARTING)
    @rule()
    def loaded(self):
        self.health.mark_loaded()
        self.answered_at = self.clock.now

    @precondition(lambda self: self.health.state not in (HealthState.STARTING, HealthState.LOST))
    @rule(lag=st.integers(0, 2))
    def installed(self, lag):
        self.health.mark_installed(max(self.health.version, self.current - lag), self.current)
        self.answered_at = self.clock.now

    @precondition(lambda self: self.health.state is HealthState.LOST)
    @rule()
    def restarted(self):
        self.clock.now += self.health.seconds_to_restart
        self.health.begin_restart()

    @invariant()
    def leases_only_with_weights_and_a_voice(self):
        if self.health.can_lease:
            assert self.health.version >= 0
            assert self.clock.now - self.answered_at <= 25
        if self.health.state in (HealthState.STARTING, HealthState.LOST):
            assert not self.health.can_lease
        if self.health.state is HealthState.LOST:
            assert self.health.version == -1
            assert self.health.seconds_to_restart <= 60.001


TestAnyOrder = AnyOrder.TestCase
