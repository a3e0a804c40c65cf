"""The scheduler under any order of leases, ends, deaths, stops, restarts, splits, versions and window sizes."""

import contextlib

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from r3async.data.consumed_groups import ConsumedGroups
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.run_ahead import AdmissionController
from r3async.schedule.staleness_check import StalenessError
from tests.helpers.schedule import Run, Shape

PLAYERS = ["p0", "p1", "p2"]
names = st.sampled_from(PLAYERS)
picks = st.integers(0, 5)

shapes = st.builds(
    Shape,
    staleness=st.integers(0, 3),
    per_step=st.integers(1, 3),
    per_version=st.integers(1, 2),
    samples=st.integers(1, 3),
    window=st.integers(1, 6),
    versions=st.integers(1, 6),
    tokens=st.sampled_from([0, 0, 5, 100]),
    split=st.sampled_from(["idle", "capacity"]),
    tasks=st.sampled_from([None, 1, 5]),
)


def of_run(method, **arguments):
    """Return a rule that calls a method of the run."""

    def call(self, **drawn):
        getattr(self.run, method)(**drawn)

    call.__name__ = method
    return rule(**arguments)(call)


class Machine(RuleBasedStateMachine):
    """The real `AdmissionController`, `GroupBuffer`, `TaskCursor` and age check, driven by `Run`."""

    admission: type[AdmissionController] = AdmissionController
    buffer: type[GroupBuffer] = GroupBuffer
    most_at_once = 6
    """Episodes that a player plays at once, at most."""

    @initialize(shape=shapes, at_once=st.integers(1, 6))
    def begin(self, shape, at_once):
        self.run = Run(shape, len(PLAYERS), self.admission, self.buffer)
        self.at_once = min(at_once, self.most_at_once)

    train, publish, install, restart_conductor = map(of_run, ("train", "publish", "install", "restart_conductor"))
    die, freeze, thaw, take_back, begin_revival, end_revival = (
        of_run(method, name=names) for method in ("die", "freeze", "thaw", "take_back", "begin_revival", "end_revival")
    )
    finish, arrive, stray = (of_run(method, name=names, pick=picks) for method in ("finish", "arrive", "stray"))

    @rule(name=names, among=st.integers(1, 3))
    def lease(self, name, among):
        self.run.lease(name, self.at_once, among)

    @rule(among=st.integers(1, 3))
    def lease_all(self, among):
        for name in PLAYERS:
            while self.run.lease(name, self.at_once, among):
                pass

    @rule()
    def lease_in_shares(self):
        for name in PLAYERS:
            self.run.lease(name, self.at_once, among=len(PLAYERS))

    @rule(name=names, late=st.integers(0, 2))
    def finish_all_but_the_oldest(self, name, late):
        """So that windows, and long runs, are reached: groups other than the oldest few end and arrive."""
        player = self.run.players[name]
        first = self.run.buffer.oldest_group + late
        for key in [k for k in player.playing if k[0] >= first]:
            self.run.finish(name, list(player.playing).index(key))
        while self.run.arrive(name):
            pass

    @rule()
    def train_publish_install(self):
        while self.run.train():
            self.run.publish()
            self.run.install()

    @rule(name=names)
    def install_in_one(self, name):
        self.run.install(name)

    @rule(name=names)
    def sleep_through_versions(self, name):
        """Its groups are played by others, which get ahead as far as slots allow; then it wakes, leases, and plays on."""
        self.run.freeze(name)
        self.run.take_back(name)
        for other in PLAYERS:
            while self.run.lease(other, 100):
                pass
            while self.run.finish(other) or self.run.arrive(other):
                pass
        self.train_publish_install()
        self.run.thaw(name)
        while self.run.lease(name, 100):
            pass
        while self.run.stray(name):
            pass

    @rule(name=names)
    def miss_an_installation(self, name):
        """A restarted player loads its weights so slowly that the others have newer ones by then, and leases what it can."""
        if self.run.players[name].alive:
            self.run.die(name)
        self.run.begin_revival(name)
        for other in PLAYERS:
            while self.run.finish(other):
                self.run.arrive(other)
        self.train_publish_install()
        self.run.end_revival(name)
        while self.run.lease(name, 100):
            pass

    @invariant()
    def holds(self):
        self.run.check()
        assert self.run.can_progress(), "can_progress"

    def teardown(self):
        if hasattr(self, "run"):
            self.run.finish_run(self.at_once)


CHECKS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.long
def test_the_bound_holds_nothing_is_lost_or_trained_twice_and_every_state_can_progress():
    run_state_machine_as_test(Machine, settings=settings(max_examples=80, stateful_step_count=60, **CHECKS))


# -- the machine sees what is wrong -----------------------------------------------------------------------------------


class OneSlotTooMany(AdmissionController):
    def __init__(self, schedule, **arguments):
        super().__init__(schedule, **arguments)
        self.slots += 1


class OneSlotTooFew(AdmissionController):
    def __init__(self, schedule, **arguments):
        super().__init__(schedule, **arguments)
        self.slots -= 1


class ForgetsAReturnedLease(AdmissionController):
    def requeue_leases(self, owner, missing_episodes):
        back = super().requeue_leases(owner, missing_episodes)
        for group in back[-1:]:
            del self._waiting_episodes[group]
        return back


class TakesWhatOthersPlay(AdmissionController):
    """Of a dead owner's groups, all that is missing is leased again, whoever plays it."""

    def requeue_leases(self, owner, missing_episodes):
        groups = self.list_leased_groups(owner)
        back = super().requeue_leases(owner, missing_episodes)
        for group in groups:
            if missing_episodes(group):
                self._waiting_episodes[group] = tuple(missing_episodes(group))
        return back


class WiderWindow(GroupBuffer):
    def __init__(self, group_size, window):
        super().__init__(group_size, window + 1)


class ForgetsWhatOvertook(GroupBuffer):
    """Groups beyond the head are not remembered as trained."""

    def take_groups(self, groups):
        taken = super().take_groups(groups)
        self._consumed = ConsumedGroups(self._consumed.window, self._consumed.head)
        return taken


class WiderWindowUnseen(AdmissionController):
    """Admission would notice the wider window of `WiderWindow` itself; here the age check has to."""

    def __init__(self, schedule, **arguments):
        super().__init__(msgspec.structs.replace(schedule, window=schedule.window + 1), **arguments)


@pytest.mark.parametrize(
    ("admission", "buffer", "caught_by"),
    [
        (OneSlotTooMany, GroupBuffer, "promise at most"),
        (OneSlotTooFew, GroupBuffer, "can_progress"),
        (ForgetsAReturnedLease, GroupBuffer, "cannot be finished"),
        (TakesWhatOthersPlay, GroupBuffer, "two live owners"),
        (AdmissionController, WiderWindow, "may not overtake"),
        (AdmissionController, ForgetsWhatOvertook, "cannot be finished"),
    ],
)
@pytest.mark.long
def test_a_broken_scheduler_is_caught(admission, buffer, caught_by):
    # What goes wrong with parts of groups needs players that are smaller than groups.
    most = 1 if admission is TakesWhatOthersPlay else 6
    broken = type("Broken", (Machine,), {"admission": admission, "buffer": buffer, "most_at_once": most})
    search = settings(
        max_examples=3000, stateful_step_count=50, phases=[Phase.generate], database=None, derandomize=True, **CHECKS
    )
    with pytest.raises((AssertionError, ValueError, StalenessError)) as caught:
        run_state_machine_as_test(broken, settings=search)
    assert caught_by in first_of(caught.value)


@pytest.mark.parametrize(
    ("admission", "buffer", "holds"),
    [(AdmissionController, GroupBuffer, True), (WiderWindowUnseen, WiderWindow, False)],
)
def test_a_group_that_one_more_may_overtake_than_the_window_says_grows_too_old(admission, buffer, holds):
    # A search finds this in one of a thousand runs only, so here it is: groups 0 and 1 begin with version 0, and 1 lasts.
    run = Run(Shape(staleness=1, per_step=1, samples=1, window=1), 2, admission, buffer)
    assert run.lease("p0", 1)
    assert run.lease("p1", 1)

    def train_on_what_p0_plays():
        assert run.finish("p0")
        assert run.arrive("p0")
        return run.train() and run.publish() and run.install()

    assert train_on_what_p0_plays()
    assert run.lease("p0", 1)  # group 2
    assert train_on_what_p0_plays() is not holds  # it may not overtake group 1
    assert run.finish("p1")
    assert run.arrive("p1")
    with contextlib.nullcontext() if holds else pytest.raises(StalenessError, match="promise at most 1"):
        assert run.train()
    assert holds is (run.trained == [0, 1])


def first_of(error: BaseException) -> str:
    """What went wrong first: a run that is broken cannot be finished by the machine's teardown either."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{error}"
