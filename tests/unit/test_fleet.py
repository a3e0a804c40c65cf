"""The conductor's generators, stand-ins here: the newest weights only, confirmed and probed, and what silence means."""

import asyncio
import errno
import itertools
import re
from functools import partial

import msgspec
import pytest

from r3async.actors.conductor import Conductor
from r3async.actors.lease_dispatcher import LeaseDispatcher
from r3async.actors.leasing import LeaseAnswer, LeaseCall
from r3async.actors.process import ActorNotLoaded, RunFailed
from r3async.actors.run_setup import RunSetup
from r3async.actors.weight_transport import choose_weight_backend
from r3async.config import config_to_dict, load_config
from r3async.rollout.engine import EngineLostError, InstallReport
from r3async.weights.interfaces import TransferOffer
from r3async.weights.manifest import TensorEntry, TensorMismatch, WeightManifest
from r3async.weights.probe import FAILED_MODEL_DIRECTORY
from r3async.world import ActorLostError
from r3async.world.disk_retries import DiskRetrier
from r3async.world.real import REAL_WORLD
from tests.helpers.fleet import TOKENS, deliver, loaded, published, restart, revive, sampled, scores, supervisor
from tests.helpers.transport import until
from tests.helpers.world import StandIn


@pytest.mark.parametrize("loss", [ActorLostError("it was killed"), ActorNotLoaded("generator-1 was lost")])
async def test_one_that_is_lost_before_it_has_weights_is_left_to_its_supervisor_and_the_others_begin(handles, loss):
    installer = await loaded(handles)
    fleet = installer.fleet
    handles["generator-1"].wrong["install_version"] = loss
    await installer.install_first_version()
    assert [g.state.value for g in fleet] == ["healthy", "lost"]
    assert sorted(fleet.events.names()) == ["generator_lost", "probe", "probe_sampled"]


@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("no kernel image"), "no kernel image"), (AssertionError(), "AssertionError()")]
)
async def test_a_failed_installation_is_the_loss_of_its_generator_whose_process_is_ended(
    installer, fleet, handles, error, told, world
):
    """One without words is not taken for silence."""
    handles["generator-0"].wrong["install_version"] = error
    assert await deliver(installer, 1) is not None
    assert [(g.state, g.version) for g in fleet] == [("lost", -1), ("healthy", 1)]
    assert world.killed == [(handles["generator-0"], True)]
    (failed,) = fleet.events.facts("install_failed")
    assert (failed["generator"], failed["version"], failed["error"]) == ("generator-0", 1, f"generator-0: {told}")


async def test_a_version_that_every_generator_refuses_also_when_it_was_restarted_ends_the_run(
    installer, fleet, handles
):
    for handle in handles.values():
        handle.wrong["install_version"] = RuntimeError("tensor 'a' is corrupt")
    assert await deliver(installer, 1) is None
    refused = "generator-1: tensor 'a' is corrupt (no generator can install version 1"
    for generator, raised, message in zip(
        fleet, (ActorLostError, RunFailed), ("generator-0: tensor 'a' is corrupt", refused), strict=True
    ):
        generator.health.begin_restart()
        generator.health.mark_loaded()
        with pytest.raises(raised, match=re.escape(message)):
            await installer.install_until_current(generator)


async def test_what_does_not_come_in_time_is_no_refusal_however_often(patient, handles):
    generator = patient.fleet["generator-0"]
    for handle in handles.values():
        handle.wrong["install_version"] = TimeoutError("version 1 did not arrive within 120 s")
    await deliver(patient, 1)
    for _ in range(5):
        generator.health.mark_lost()
        generator.health.begin_restart()
        generator.health.mark_loaded()
        with pytest.raises(ActorLostError, match="did not arrive"):
            await patient.install_until_current(generator)


@pytest.fixture
async def patient(handles, world):
    """An installer whose generators may be restarted often."""
    installer = await loaded(handles, None, "generator.max_restarts=8", world=world)
    await installer.install_first_version()
    return installer


@pytest.fixture
def soon(monkeypatch):
    """A disk is tried again at once."""
    monkeypatch.setattr("r3async.actors.version_delivery.DiskRetrier", partial(DiskRetrier, retry_seconds=0.01))


async def test_a_restarted_generator_waits_for_its_hosts_disk_and_is_named(installer, fleet, handles, soon, clock):
    handle, generator = handles["generator-0"], fleet["generator-0"]
    handle.wrong["install_version"] = OSError(errno.ENOSPC, "No space left on device")
    reviving = asyncio.create_task(restart(installer, generator))
    await until(lambda: len(handle.asked("install_version")) >= 5)
    clock.now += 10_000
    assert generator.is_waiting_for_disk
    assert await deliver(installer, 1) is not None, "the other one does not wait for it"
    del handle.wrong["install_version"]
    await asyncio.wait_for(reviving, 120)
    assert (generator.state, generator.version, generator.restarts) == ("healthy", 1, 1)
    assert not generator.is_waiting_for_disk
    waited = [(event, facts["generator"]) for event, facts in fleet.events.seen if event.startswith("weights_")]
    assert waited == [("weights_stalled", "generator-0"), ("weights_go_on", "generator-0")]


async def test_a_restarted_generator_that_does_not_load_is_lost_once_more(installer, fleet, handles):
    handle, generator = handles["generator-0"], fleet["generator-0"]

    def fail_once():
        del handle.wrong["start"]
        raise RuntimeError("CUDA error: device unavailable")

    handle.wrong["start"] = fail_once
    await restart(installer, generator)
    (lost,) = fleet.events.facts("generator_lost")
    assert lost["error"].startswith("generator-0 was restarted and did not load: CUDA error")
    assert (generator.state, generator.restarts) == ("healthy", 2)


async def test_a_run_goes_on_without_a_generator_that_was_lost_too_often_and_ends_with_the_last_one(
    installer, fleet, handles, world
):
    for handle in handles.values():
        handle.wrong["run"] = ActorLostError("it was killed")

    last = handles["generator-1"]
    answer = last.answer

    async def outliving(name, *args):
        if name == "run":
            await until(lambda: fleet.events.facts("generator_excluded"))
        return await answer(name, *args)

    last.answer = outliving
    members = supervisor(installer, world)
    with pytest.raises(RunFailed, match=r"generator-1 was lost 3 times .*, the last time by: it was killed"):
        await asyncio.wait_for(members.run(), 120)
    assert world.killed == [(handles["generator-0"], False)]
    (excluded,) = fleet.events.facts("generator_excluded")
    assert excluded["generator"] == "generator-0"
    assert "generator-0 was lost 3 times (generator.max_restarts = 2)" in excluded["error"]


@pytest.mark.parametrize("known", ["", "it did not install version 1"])
async def test_a_lost_engine_is_the_loss_of_its_generator_whose_process_is_ended_once(
    installer, fleet, handles, known, world
):
    """Two may find it: the loop that plays, and an installation."""
    generator, handle = fleet["generator-0"], handles["generator-0"]
    generator.end_reason = known
    handle.wrong |= {"run": EngineLostError("its process ended with code -9"), "install_version": RuntimeError("dead")}
    stop_requested = asyncio.Event()
    stop_requested.set()  # so it is not restarted
    running = asyncio.create_task(supervisor(installer, world, stop_requested).run())
    await until(lambda: handle.asked("run"))
    await asyncio.sleep(0.05)
    running.cancel()
    assert generator.end_reason == (known or "its engine is lost: its process ended with code -9")
    await deliver(installer, 1)
    assert world.killed == ([] if known else [(handle, True)])


async def test_a_run_whose_engines_are_lost_again_and_again_ends_with_the_reason(installer, fleet, handles):
    for generator, handle in zip(fleet, handles.values(), strict=True):
        handle.wrong["run"] = EngineLostError("its process ended with code -9")
        generator.has_played = True
    reason = r"\(generator\.max_restarts = 2\), the last time by: its engine is lost: its process ended with code -9"
    with pytest.raises(RunFailed, match=f"lost 3 times {reason}"):
        await asyncio.wait_for(supervisor(installer).run(), 120)


async def test_a_run_whose_generators_fail_twice_alike_before_they_have_played_ends_with_the_cause(patient, handles):
    attempts = {name: itertools.count(100) for name in handles}
    for name, handle in handles.items():
        handle.wrong["run"] = lambda _, name=name: EngineLostError(
            f"pid {next(attempts[name])}: no kernel for 96 elements a head"
        )
    cause = (
        "generator-1 failed 2 times in the same way before it had played an episode: its engine is lost: pid 101: no"
    )
    with pytest.raises(RunFailed, match=f"{cause} kernel for 96 elements a head; see logs/generator-1.log"):
        await asyncio.wait_for(supervisor(patient).run(), 120)
    (excluded,) = patient.fleet.events.facts("generator_excluded")
    assert excluded["generator"] == "generator-0"
    assert [g.restarts for g in patient.fleet] == [1]
    assert [len(handle.asked("run")) for handle in handles.values()] == [2, 2]


@pytest.mark.parametrize("second", [EngineLostError("its process ended with code -9"), ActorLostError("it was killed")])
async def test_starts_that_fail_differently_or_without_a_word_are_losses_like_any_other(patient, handles, second):
    handle, generator = handles["generator-0"], patient.fleet["generator-0"]
    losses = iter([EngineLostError("no kernel image"), second, EngineLostError("no kernel image")])
    handle.wrong["run"] = lambda _: next(losses, None)
    running = asyncio.create_task(supervisor(patient).run())
    await until(lambda: generator.is_finished)
    running.cancel()
    assert generator.restarts == 3


async def test_a_restarted_process_that_twice_does_not_load_for_the_same_reason_is_restarted_no_more(patient, handles):
    handles["generator-0"].wrong |= {"run": ActorLostError("it was killed"), "start": RuntimeError("device is busy")}
    message = "failed 2 times in the same way .* did not load: device is busy; see logs/generator-0.log"
    with pytest.raises(RunFailed, match=message):
        await asyncio.wait_for(supervisor(patient).run(), 120)


async def test_one_that_plays_is_lost_if_its_disk_does_not_take_a_version_in_time(
    installer, fleet, handles, soon, clock
):
    """Its groups are played by others then."""
    handle = handles["generator-0"]
    handle.wrong["install_version"] = OSError(errno.EMFILE, "Too many open files")
    delivering = asyncio.create_task(deliver(installer, 1))
    await until(lambda: len(handle.asked("install_version")) >= 4)
    assert [g.state for g in fleet] == ["healthy", "healthy"]
    clock.now += 121
    assert await asyncio.wait_for(delivering, 120) is not None
    assert [g.state for g in fleet] == ["lost", "healthy"]
    (failed,) = fleet.events.facts("install_failed")
    assert "Too many open files" in failed["error"]
    for gone in ("its connection is gone", "it was killed"):
        fleet.report_lost(fleet["generator-0"], ActorLostError(gone), [])
    told = [facts["error"] for facts in fleet.events.facts("generator_lost")]
    assert "Too many open files" in told[0], "the cause, and not what it looks like from here"
    assert told[1] == fleet["generator-0"].last_loss_reason == "it was killed"


async def test_the_first_installation_of_a_process_has_the_time_that_its_bytes_take(installer, fleet, handles):
    whole = 61 * 10**9
    first = published(1)
    manifest = msgspec.structs.replace(first.publication.manifest, nbytes=whole)
    installer.newest_published = msgspec.structs.replace(first, publication=TransferOffer(manifest))
    generator = fleet["generator-0"]
    await installer.deliver_newest()
    assert generator.answer_seconds == pytest.approx(120 + 122)
    await restart(installer, generator)
    assert generator.answer_seconds == pytest.approx(120 + 305)


async def test_a_generator_that_lags_gets_the_newest_version_only(installer, fleet, handles):
    slow = handles["generator-1"]
    slow.may_install.clear()
    first = asyncio.create_task(deliver(installer, 1))
    await asyncio.sleep(0.01)
    installer.newest_published = published(2)
    assert installer.versions_in_use == [1]
    installer.newest_published = published(3)
    slow.may_install.set()
    await first
    await installer.deliver_newest()
    assert installer.versions_in_use == []
    for handle in handles.values():
        assert [v for _, v in handle.asked("install_version")] == [0, 1, 3]
    assert {g.version for g in fleet} == {3}


async def test_a_restarted_generator_does_not_play_before_it_has_what_the_others_have(installer, fleet, handles):
    fresh, generator = handles["generator-0"], fleet["generator-0"]
    fresh.may_install.clear()
    reviving = asyncio.create_task(restart(installer, generator))
    await asyncio.sleep(0.1)
    await deliver(installer, 1)
    assert (generator.state, generator.health.can_lease) == ("stale", False)
    fresh.may_install.set()
    await reviving
    assert [v for _, v in fresh.asked("install_version")] == [0, 0, 1]
    assert generator.version == 1


async def test_a_generator_that_is_lost_in_a_delivery_is_left_to_its_supervisor(installer, fleet, handles):
    handles["generator-0"].wrong["install_version"] = ActorLostError("it was killed")
    assert await deliver(installer, 1) is not None
    assert fleet["generator-0"].state == "lost"
    handles["generator-1"].wrong["score_tokens"] = ActorLostError("it was killed")
    assert await deliver(installer, 3) is None


async def test_the_probe_comes_at_the_start_and_every_so_many_versions(installer, handles):
    probed = []
    for version in (1, 2, 3, 4, 5, 8, 9):
        before = len(handles["generator-0"].asked("score_tokens"))
        await deliver(installer, version)
        if len(handles["generator-0"].asked("score_tokens")) > before:
            probed.append(version)
    assert probed == [3, 8]
    assert len(handles["generator-0"].asked("count_stale_cached_tokens")) == 3


def unscored(version):
    return msgspec.structs.replace(published(version), scores=None)


async def test_the_learner_scores_the_text_with_the_versions_that_are_probed_alone(installer, handles):
    scored = []
    for version in range(1, 14):
        asked = installer.needs_probe_scores(version)
        scored += [version] * asked
        assert asked == installer.needs_probe_scores(version), "of the steps that make a version, the last one counts"
        installer.newest_published = published(version) if asked else unscored(version)
        await installer.deliver_newest()
    assert scored == [3, 6, 9, 12]
    assert all(len(h.asked("score_tokens")) == 1 + 4 for h in handles.values())


async def test_while_a_scored_version_is_on_its_way_no_other_is_scored(installer, handles):
    assert installer.needs_probe_scores(3)
    assert not installer.needs_probe_scores(4), "3 is not published"
    handles["generator-0"].may_install.clear()
    delivering = asyncio.create_task(deliver(installer, 3))
    await asyncio.sleep(0.01)
    assert handles["generator-1"].asked("sample_probe")
    assert not installer.needs_probe_scores(5), "3 is being installed"
    handles["generator-0"].may_install.set()
    await delivering
    assert not installer.needs_probe_scores(5)
    assert installer.needs_probe_scores(6)


async def test_a_restarted_generator_is_probed_with_what_it_has_or_the_next_version(installer, fleet, handles):
    fresh, generator, learner = handles["generator-0"], fleet["generator-0"], installer.learner
    for learner.version, probed in ((2, 2), (3, -1)):
        installer.newest_published = unscored(2)
        generator.probed_version = -1
        generator.health.mark_lost()
        assert installer.needs_probe_scores(3)
        await restart(installer, generator)
        assert (generator.state, generator.version, generator.probed_version) == ("healthy", 2, probed)
    fresh.calls.clear()
    assert installer.needs_probe_scores(4), "3 was published, and not asked to be scored in time"
    await deliver(installer, 4)
    assert fresh.asked("score_tokens") == [("score_tokens",)]


async def test_a_failed_probe_names_generator_version_and_tensor(installer, fleet, handles):
    bad = handles["generator-1"]
    bad.wrong["score_tokens"] = scores(2)
    bad.wrong["find_weight_differences"] = [
        TensorMismatch(f"model.{x}", "model.ab", n) for x, n in (("a", 5), ("b", 6))
    ]
    message = (
        r"version 3 of the weights in generator-1 .* 'model\.a' \(5 elements of parameter 'model\.ab'\), 'model\.b'"
    )
    with pytest.raises(RunFailed, match=message):
        await deliver(installer, 3)
    assert fleet["generator-1"].version == 0
    assert installer.learner.kept == [3]
    assert ("version_kept", {"version": 3, "directory": FAILED_MODEL_DIRECTORY}) in fleet.events.seen


async def test_a_version_that_cannot_be_kept_does_not_hide_why_the_probe_failed(installer, fleet, handles):
    handles["generator-1"].wrong["score_tokens"] = scores(2)
    installer.learner.disk_is_full = True
    with pytest.raises(RunFailed, match="version 3 of the weights in generator-1 does not answer like the learner's"):
        await deliver(installer, 3)
    assert ("version_not_kept", {"version": 3, "error": "the disk is full"}) in fleet.events.seen


UNLIKE = {"score_tokens": scores(2)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (UNLIKE, " does not answer like .* holds what loading the published tensors again gives"),
        (UNLIKE | {"find_weight_differences": RuntimeError("lost")}, " .*could not be found out: generator-1: lost"),
        ({"sample_probe": sampled(-1.5)}, " under version 3 reports other log-probs than it samples with.* 0.5 "),
        ({"count_stale_cached_tokens": 128}, ": a new request under version 3 took 128 positions from a prefix cache"),
        ({"install_version": InstallReport(0, 0.1, 0.1)}, " was given version 3 .* has version 0: it missed an update"),
    ],
)
async def test_an_engine_that_is_not_what_the_learner_trains_stops_the_run(installer, handles, wrong, message):
    handles["generator-1"].wrong |= wrong
    with pytest.raises(RunFailed, match=f"generator-1{message}"):
        await deliver(installer, 3)


@pytest.mark.parametrize("method", ["score_tokens", "sample_probe"])
@pytest.mark.parametrize("fails_on", ["the first text", "both texts"])
async def test_one_text_that_differs_is_a_tie_of_experts_and_two_a_fault(installer, fleet, handles, method, fails_on):
    def answer(text):
        wrong = text == TOKENS or fails_on == "both texts"
        return {"score_tokens": scores(2 if wrong else 3), "sample_probe": sampled(-1.5 if wrong else -2.0)}[method]

    handles["generator-1"].wrong[method] = answer
    if fails_on == "both texts":
        with pytest.raises(RunFailed, match="Do not train on this engine"):
            await deliver(installer, 3)
        assert "probe_tie" not in fleet.events.names()
        return
    await deliver(installer, 3)
    assert fleet["generator-1"].version == fleet["generator-1"].probed_version == 3
    (tie,) = fleet.events.facts("probe_tie")
    assert (tie["generator"], tie["version"]) == ("generator-1", 3)
    assert tie["mean_difference"] > tie["tolerance"]


async def test_an_engine_that_lacks_a_published_tensor_is_not_asked_for_a_second_text(installer, handles):
    bad = handles["generator-1"]
    bad.wrong["score_tokens"] = lambda text: scores(2 if text == TOKENS else 3)
    bad.wrong["find_weight_differences"] = [TensorMismatch("model.a", "model.ab", 5)]
    with pytest.raises(RunFailed, match=r"'model\.a'"):
        await deliver(installer, 3)
    assert len(bad.asked("score_tokens")) == 2  # at the start, and now


async def test_the_figures_are_those_of_the_slowest_and_the_share_is_of_all_time(installer):
    for generator in installer.fleet:  # two, 0.1 s each at the start
        generator.first_weights_at -= 100
    figures = await deliver(installer, 1)
    assert figures["timing/engine_pause_seconds"] == 0.1
    assert figures["timing/weight_load_seconds"] == 0.05
    assert figures["timing/weight_transfer_seconds"] == 0.02
    assert installer.fleet.paused_share == pytest.approx(0.4 / 200, rel=0.05)


def test_the_backend_follows_from_the_hosts_unless_it_is_named():
    def chosen(hosts, *overrides):
        return choose_weight_backend(load_config("quickstart", list(overrides)), hosts)

    assert chosen({"a"}) == "shared_memory"
    assert chosen({"a", "b"}) == "tcp"
    assert chosen({"a"}, "weights.backend=tcp") == "tcp"
    with pytest.raises(ValueError, match=r'different hosts \(a, b\).*weights\.backend="tcp"'):
        chosen({"a", "b"}, "weights.backend=shared_memory")


def test_equal_contents_have_equal_digests():
    tensors = {"a": TensorEntry("float32", (2,), 1), "b": TensorEntry("float32", (2,), 2)}
    manifest = WeightManifest(1, "x", tensors, 8)
    assert manifest.digest == msgspec.structs.replace(manifest, version=2, path="y").digest
    assert manifest.digest == WeightManifest(1, "x", dict(reversed(tensors.items())), 8).digest
    assert manifest.digest != WeightManifest(1, "x", {**tensors, "b": TensorEntry("float32", (2,), 3)}, 8).digest


async def test_one_that_has_nothing_more_to_play_is_not_missed(fleet, clock):
    fleet["generator-0"].is_finished = True
    clock.now += 100
    fleet.check_silence()
    assert [g.state.value for g in fleet] == ["healthy", "suspect"]


async def test_a_generator_that_is_lost_again_and_again_waits_longer_each_time_and_then_ends_the_run(
    installer, fleet, handles
):
    generator = fleet["generator-0"]
    for _ in range(2):
        await restart(installer, generator)
    assert [facts["waited"] for facts in fleet.events.facts("generator_restarted")] == [0.02, 0.04]
    fleet["generator-1"].is_finished = True
    generator.health.mark_lost()
    fleet.report_lost(generator, ActorLostError("no kernel image"), [])
    message = r"generator-0 was lost 3 times \(generator\.max_restarts = 2\), the last time by: no kernel image"
    with pytest.raises(RunFailed, match=message):
        await revive(installer, generator)


async def test_one_whose_connection_broke_goes_on_with_its_process_and_nothing_was_restarted(installer, fleet, handles):
    generator, handle = fleet["generator-0"], handles["generator-0"]
    handle.lives, generator.generated_tokens = True, 30
    for _ in range(3):  # more often than a process may be restarted
        fleet.mark_lost(generator)
        await revive(installer, generator)
        assert (generator.state, generator.version, generator.restarts) == ("healthy", 0, 0)
        assert (generator.generated_tokens, fleet.generated_tokens) == (30, 30)
    ended = [event for event in fleet.events.names() if event.startswith("generator_")]
    assert ended == ["generator_recovered"] * 3
    handle.lives = False
    fleet.mark_lost(generator)
    await revive(installer, generator)
    assert (generator.restarts, generator.generated_tokens, fleet.generated_tokens) == (1, 0, 30)


async def test_one_that_leaves_in_a_delivery_ends_neither_it_nor_the_run(installer, fleet, handles, world):
    handle = handles["generator-0"]
    answer = handle.answer
    handle.may_install.clear()

    async def stopping(name, *args):
        if name == "run":
            await until(lambda: fleet["generator-0"].is_leaving)
        if name != "stop":
            return await answer(name, *args)
        handle.wrong["install_version"] = RuntimeError("the engine was stopped")
        handle.may_install.set()
        await asyncio.sleep(0.01)

    handle.answer = stopping
    members = supervisor(installer, world)
    running = asyncio.create_task(members.run())
    delivering = asyncio.create_task(deliver(installer, 1))
    await asyncio.sleep(0.01)
    await members.remove_generator("generator-0")
    assert await delivering is not None
    running.cancel()
    assert world.killed == [(handle, False)]
    assert [(g.generator_id, g.version) for g in fleet] == [("generator-1", 1)]


async def test_weights_that_a_generator_confirmed_before_it_was_lost_are_not_its_successors(installer, fleet, handles):
    handle, generator = handles["generator-0"], fleet["generator-0"]
    handle.may_install.clear()
    delivering = asyncio.create_task(deliver(installer, 1))
    await asyncio.sleep(0.01)
    generator.health.mark_lost()  # its supervisor knows
    handle.may_install.set()
    assert await delivering is not None  # the other one has it
    assert (generator.state, generator.version) == ("lost", -1)


async def test_only_a_healthy_generator_is_leased_episodes(fleet, tmp_path, monkeypatch, clock):
    monkeypatch.setattr("r3async.actors.conductor.prepare_process", lambda *args: None)
    conductor = Conductor(REAL_WORLD, RunSetup("run", config_to_dict(fleet.config), str(tmp_path)), StandIn(), {})
    conductor.fleet, generator = fleet, fleet["generator-0"]
    conductor.dispatcher = LeaseDispatcher(conductor.admission, fleet, StandIn(), asyncio.Event())
    stats = dict.fromkeys(("generated_tokens", "places_empty", "places_all", "engine_idle", "engine_all", "playing"), 0)

    async def leases():
        call = msgspec.msgpack.encode(LeaseCall("generator-0", generator.process, 8, {**stats, "limit": 8}))
        return len(msgspec.msgpack.decode(await conductor.lease_groups(call), type=LeaseAnswer).leases)

    assert await leases() == 1
    clock.now += 11
    fleet.check_silence()
    assert await leases() == 1  # by asking, it answered
    for change in (generator.health.mark_lost, generator.health.begin_restart, generator.health.mark_loaded):
        change()
        assert await leases() == 0
    generator.health.mark_installed(0, 0)
    assert await leases() == 1


async def test_a_silent_generator_is_suspect_and_gets_new_weights_and_leases_when_it_speaks_again(
    installer, fleet, handles, clock
):
    generator = fleet["generator-0"]
    await fall_silent(fleet, clock, "generator-0")
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
    monkeypatch.setattr("r3async.actors.version_delivery.DELIVERY_POLL_SECONDS", 0.01)


async def fall_silent(fleet, clock, name):
    """All but `name` answer for as long as makes one suspect."""
    clock.now += 11
    for generator in fleet:
        if generator.generator_id != name:
            fleet.note_answer(generator)
    fleet.check_silence()
    assert fleet[name].state == "suspect"


async def test_one_that_falls_silent_in_a_delivery_holds_nobody_up_and_gets_the_newest_when_it_wakes(
    installer, fleet, handles, impatient, clock
):
    handles["generator-0"].may_install.clear()
    delivering = asyncio.create_task(deliver(installer, 1))
    await asyncio.sleep(0.05)
    assert not delivering.done()
    await fall_silent(fleet, clock, "generator-0")
    assert await asyncio.wait_for(delivering, 120) is not None
    assert [g.version for g in fleet] == [0, 1]
    assert await asyncio.wait_for(deliver(installer, 2), 120) is not None
    assert [g.version for g in fleet] == [0, 2]
    assert installer.versions_in_use == [1], "what a stopped engine reads stays"
    assert not installer.needs_delivery, "it is being given what it needs"
    handles["generator-0"].may_install.set()
    fleet.weights_due.clear()
    await asyncio.wait_for(fleet.weights_due.wait(), 120)
    assert installer.needs_delivery
    await installer.deliver_newest()
    assert [(g.state, g.version) for g in fleet] == [("healthy", 2), ("healthy", 2)]
    assert handles["generator-0"].asked("install_version") == [("install_version", v) for v in (0, 1, 2)]
    assert installer.versions_in_use == []
    assert not installer.needs_delivery


async def test_if_nobody_answers_nothing_counts_as_installed_until_one_wakes(
    installer, fleet, handles, impatient, clock
):
    for handle in handles.values():
        handle.may_install.clear()
    delivering = asyncio.create_task(deliver(installer, 1))
    await asyncio.sleep(0.02)
    clock.now += 11
    fleet.check_silence()
    assert await asyncio.wait_for(delivering, 120) is None
    handles["generator-1"].may_install.set()
    await until(lambda: installer.needs_delivery)
    assert await asyncio.wait_for(installer.deliver_newest(), 120) is not None
    assert [g.version for g in fleet] == [0, 1]


async def test_what_goes_wrong_with_one_that_was_not_waited_for_ends_the_run(
    installer, fleet, handles, impatient, clock
):
    handles["generator-0"].may_install.clear()
    await fall_silent(fleet, clock, "generator-0")
    assert await asyncio.wait_for(deliver(installer, 1), 120) is not None
    handles["generator-0"].wrong["install_version"] = InstallReport(0, 0.1, 0.1)
    handles["generator-0"].may_install.set()
    await until(lambda: installer.needs_delivery)
    with pytest.raises(RunFailed, match="it missed an update"):
        await installer.deliver_newest()


async def test_a_paused_generator_does_not_time_out_and_one_that_answers_does(
    installer, fleet, handles, monkeypatch, clock
):
    monkeypatch.setattr("r3async.actors.version_delivery.RPC_SECONDS", -119.95)  # TimeLimits.base_install is 120
    handles["generator-0"].may_install.clear()
    await fall_silent(fleet, clock, "generator-0")
    assert await asyncio.wait_for(deliver(installer, 1), 120) is not None
    await asyncio.sleep(0.2)
    assert not installer.needs_delivery
    fleet.note_answer(fleet["generator-0"])
    await until(lambda: installer.needs_delivery)
    await installer.deliver_newest()
    assert fleet["generator-0"].state == "lost"
    (failed,) = fleet.events.facts("install_failed")
    assert failed["error"].startswith("generator-0: no answer to `install_version` within")
