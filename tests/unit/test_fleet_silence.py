"""Generators that fall silent: suspect, not waited for, and given what they missed when they answer again."""

from __future__ import annotations

import asyncio

import pytest

from r3async.actors.process import RunFailed
from r3async.rollout.engine import InstallReport
from tests.helpers.fleet import deliver
from tests.helpers.transport import until


async def test_a_silent_generator_is_suspect_and_gets_new_weights_and_leases_when_it_speaks_again(
    installer, fleet, handles
):
    clock, generator = fleet["generator-0"].health._clock, fleet["generator-0"]
    clock.now += 9
    fleet.note_answer(fleet["generator-1"])
    clock.now += 2
    fleet.check_silence()
    fleet.check_silence()
    assert [g.state.value for g in fleet] == ["suspect", "healthy"]
    assert not generator.health.can_lease
    assert [event for event in fleet.events.names() if not event.startswith("probe")] == ["generator_suspect"]
    assert fleet.events.seen[-1][1]["generator"] == "generator-0"
    await deliver(installer, 1)  # it may only be slow
    assert (generator.state, generator.version) == ("healthy", 1)
    assert fleet.events.names()[-1] == "generator_recovered"
    assert fleet.events.seen[-1][1]["seconds"] == 11


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("r3async.actors.installer.DELIVERY_POLL_SECONDS", 0.01)


async def fall_silent(fleet, name):
    """All but `name` answer for as long as makes one suspect."""
    for generator in fleet:
        generator.health._clock.now += 11 / len(fleet.generators)
    for generator in fleet:
        if generator.generator_id != name:
            fleet.note_answer(generator)
    fleet.check_silence()
    assert fleet[name].state == "suspect"


async def test_one_that_falls_silent_in_a_delivery_holds_nobody_up_and_gets_the_newest_when_it_wakes(
    installer, fleet, handles, impatient
):
    handles["generator-0"].may_install.clear()
    delivering = asyncio.create_task(deliver(installer, 1))
    await asyncio.sleep(0.05)
    assert not delivering.done()
    await fall_silent(fleet, "generator-0")
    assert await asyncio.wait_for(delivering, 10) is not None
    assert [g.version for g in fleet] == [0, 1]
    assert await asyncio.wait_for(deliver(installer, 2), 10) is not None
    assert [g.version for g in fleet] == [0, 2]
    assert installer.versions_in_use == [1], "what a stopped engine reads stays"
    assert not installer.needs_delivery, "it is being given what it needs"
    handles["generator-0"].may_install.set()
    fleet.weights_due.clear()
    await asyncio.wait_for(fleet.weights_due.wait(), 10)
    assert installer.needs_delivery
    await installer.deliver_newest()
    assert [(g.state, g.version) for g in fleet] == [("healthy", 2), ("healthy", 2)]
    assert handles["generator-0"].asked("install_version") == [("install_version", v) for v in (0, 1, 2)]
    assert installer.versions_in_use == []
    assert not installer.needs_delivery


async def test_if_nobody_answers_nothing_counts_as_installed_until_one_wakes(installer, fleet, handles, impatient):
    for handle in handles.values():
        handle.may_install.clear()
    delivering = asyncio.create_task(deliver(installer, 1))
    await asyncio.sleep(0.02)
    fleet["generator-0"].health._clock.now += 11
    fleet.check_silence()
    assert await asyncio.wait_for(delivering, 10) is None
    handles["generator-1"].may_install.set()
    await until(lambda: installer.needs_delivery)
    assert await asyncio.wait_for(installer.deliver_newest(), 10) is not None
    assert [g.version for g in fleet] == [0, 1]


async def test_what_goes_wrong_with_one_that_was_not_waited_for_ends_the_run(installer, fleet, handles, impatient):
    handles["generator-0"].may_install.clear()
    await fall_silent(fleet, "generator-0")
    assert await asyncio.wait_for(deliver(installer, 1), 10) is not None
    handles["generator-0"].wrong["install_version"] = InstallReport(0, 0.1, 0.1)
    handles["generator-0"].may_install.set()
    await until(lambda: installer.needs_delivery)
    with pytest.raises(RunFailed, match="it missed an update"):
        await installer.deliver_newest()


async def test_a_paused_generator_does_not_time_out_and_one_that_answers_does(installer, fleet, handles, monkeypatch):
    monkeypatch.setattr("r3async.actors.installer.RPC_SECONDS", -119.95)  # weights.install_timeout is 120
    handles["generator-0"].may_install.clear()
    await fall_silent(fleet, "generator-0")
    assert await asyncio.wait_for(deliver(installer, 1), 10) is not None
    await asyncio.sleep(0.2)
    assert not installer.needs_delivery
    fleet.note_answer(fleet["generator-0"])
    await until(lambda: installer.needs_delivery)
    await installer.deliver_newest()
    assert fleet["generator-0"].state == "lost"
    (failed,) = fleet.events.facts("install_failed")
    assert failed["error"].startswith("generator-0: no answer to `install_version` within")
