"""What passed between generators and learner of a whole run, simulated, and its records: `dev/chaos/accounting.py` finds no
problem with a learner as it is, whatever is killed, and a problem with each that is wrong. On Ray: `ray/test_chaos_run.py`."""

import asyncio
import errno
import io
from collections import Counter

import msgspec
import pytest
from rich.console import Console

from dev.chaos.accounting import AcknowledgedRecord
from dev.chaos.actors import LEARNER_FAULTS, RelayRecorder, chaos_directory
from dev.chaos.run import ScenarioRun, check_run
from dev.simulation.world import START_TIME
from r3async.config import load_config
from r3async.data.control_messages import Ack, Deliver, decode_control, join_item_frames
from r3async.data.wire import decode_trajectory
from r3async.data.wire_frames import WireError
from tests.sim.whole import SMALL, Simulated

SETTINGS = [
    "generator.concurrency=16",
    "generator.max_restarts=20",
    "supervise.max_run_restarts=20",
    "supervise.stall_seconds=60",
    "checkpoint.every_steps=2",
    "buffer.durability=disk",
    "transport.ack_timeout=1",
    "schedule.max_staleness=2",
    "schedule.window=3",
    "episode.retries=30",
    "episode.max_new_tokens=12",
    "env.name=dev.simulation.environment:LetterTask",
    "env.args={ turns = 2, seconds = 1.0, tail = 10, failing = 50 }",
    "episode.max_turns=2",
]


def killing(kills, done):
    """Kills these processes, one after the other, every two steps, and up to two seconds later."""

    async def kill(machine):
        rng = machine.simulation.rng_for("kills")
        for number, name in enumerate(kills):
            await machine.until(lambda: len(machine.trained()) >= 1 + 2 * number)  # noqa: B023
            await asyncio.sleep(rng.uniform(0, 2))
            await machine.kill(name)
            done[name.partition("-")[0]] += 1

    return kill


def rehearse(machine, tmp_path, kills, *overrides, fault="", damage=0.0, meddle=None):
    """What the accounting finds in a run whose processes `kills` are killed, or to which `meddle` does something."""
    machine.simulation.network.damage_rate = damage
    passed, message = [], machine.simulation.network.on_message

    def note(event, route, frames):
        message(event, route, frames)
        if event != "sent":
            return
        try:
            control = decode_control(frames[0])
        except WireError:
            return
        now = START_TIME + machine.seconds
        if isinstance(control, Deliver):
            for item, pieces in zip(control.items, control.split_by_item(frames[1:]), strict=True):
                sent = RelayRecorder.make_sent_record(decode_trajectory(join_item_frames(item, pieces)))
                passed.append(msgspec.structs.replace(sent, at=now))
        elif isinstance(control, Ack):
            passed.append(AcknowledgedRecord(now, list(control.ids)))

    machine.simulation.network.on_message = note
    done = Counter()

    class Faulty(Simulated):
        learner_class = LEARNER_FAULTS[fault] if fault else Simulated.learner_class

    chosen = [*SETTINGS, *overrides]
    run_dir = machine.train(*chosen, meddle=meddle or killing(kills, done), pipeline=Faulty)
    directory = chaos_directory(run_dir)
    directory.mkdir()
    (directory / "passed.jsonl").write_bytes(b"".join(msgspec.json.encode(p) + b"\n" for p in passed))
    config = load_config("quickstart", [*SMALL, f"model.path={machine.model}", *chosen])
    rehearsal = ScenarioRun("quickstart", chosen, "kills", 0, fault, tmp_path, Console(file=io.StringIO()))
    return check_run(config, rehearsal, run_dir, done, machine.seconds)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("backend", ["shared_memory", "tcp"])
def test_a_run_of_which_every_role_is_killed_trains_everything_once(machine, tmp_path, backend, seed):
    kills = ["generator-0", "learner", "generator-1", "conductor", "generator-2"]
    settings = ["generator.count=3", "generator.concurrency=4", "steps=16", f"weights.backend={backend}"]
    report = rehearse(machine, tmp_path, kills, *settings, damage=0.15)
    assert report.problems == []
    assert report.faults == {"generator": 3, "learner": 1, "conductor": 1}
    assert report.resumed >= 2
    assert report.trajectories == report.steps * 8
    assert report.damaged


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "kills", "problem"),
    [
        ("ack-before-spool", ["learner"], "was acknowledged and then played again"),
        ("unlink-before-commit", ["learner"], "was acknowledged and then played again"),
        ("no-dedupe", [], "times"),
    ],
)
def test_the_accounting_shows_what_a_learner_does_wrong(machine, tmp_path, fault, kills, problem):
    # A checkpoint every few steps only: the learner dies with something that it has trained and not saved.
    settings = ["checkpoint.every_steps=5", "steps=10", "generator.count=1"]
    damage = 0.0
    if not kills:
        # Without kills, what comes twice is what was sent again because its acknowledgement was damaged. It has to come
        # while its group still waits for others, so they differ in how long they take, and a loss is noticed soon.
        damage = 0.2
        settings += ["transport.ack_timeout=0.3"]
    report = rehearse(machine, tmp_path, kills, *settings, fault=fault, damage=damage)
    assert any(problem in found for found in report.problems), report


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_a_run_whose_disk_fills_up_continues_and_every_row_is_there_when_it_has_free_bytes_again(
    machine, tmp_path, seed
):
    full = []

    async def fill(machine):
        for step in (2, 12):
            await machine.step(step)
            machine.host.disk.refuse_operations(machine.root, errno.ENOSPC)
            began = START_TIME + machine.seconds
            await asyncio.sleep(30)  # steps come 3 s apart, and up to 15
            machine.host.disk.allow_operations(machine.root)
            full.append((began, START_TIME + machine.seconds))

    # A full spool pauses generators; here the run has to make steps all the while.
    settings = ["buffer.durability=memory", "routing.trace=all", "steps=30", "checkpoint.every_steps=0"]
    report = rehearse(machine, tmp_path, [], *settings, "generator.engine_args={ token_seconds = 0.1 }", meddle=fill)
    assert report.problems == []
    made = [row["time"] for row in machine.rows()]
    for began, ended in full:
        assert any(began < at < ended for at in made)
    assert len(machine.events("records_kept")) == len(machine.events("records_written")) >= 2
    assert not machine.events("records_lost")
