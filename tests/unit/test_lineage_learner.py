"""A learner actor with its receiver and spool: what a resume took back, or what is refused, is neither trained nor kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.actors.run_setup import RunSetup
from r3async.actors.step_counts import StepCounts
from r3async.actors.trajectory_inbox import TrajectoryInbox
from r3async.config import BufferConfig, config_from_dict
from r3async.data import wire
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import Sample, TokenTable, Trajectory, format_trajectory_id
from r3async.data.versions import Lineage
from r3async.record.events import open_event_log
from r3async.record.reading import read_json_objects
from r3async.schedule.groups import GroupBuffer
from r3async.transport.spool import Spool
from r3async.world.curve_keys import ClientKeys
from r3async.world.real import REAL_WORLD
from tests.helpers.transport import LIMIT, sending
from tests.unit.test_buffer import make_trajectory

Way = tuple[str, ClientKeys]
"""To a learner: its endpoint, and the keys for it."""
EXPERTS = RoutingShape(layers=2, top_k=2, num_experts=8)


def played(group: int, episode: int, version: int, lineage: int) -> Trajectory:
    """All its tokens sampled by that version, which they spell."""
    made = make_trajectory(group, episode, policy_version=np.array([-1, -1, version, version], np.int32))
    made.samples[0].table = made.samples[0].table.with_columns(
        token_ids=np.array([1, 2, version % 100, lineage], np.int32)
    )
    return msgspec.structs.replace(made, trajectory_id=format_trajectory_id(group, episode), lineage=lineage)


class Heard(TrajectoryInbox):
    """What a learner receives that has no model, and trains nothing."""

    @classmethod
    def at(cls, run_dir: Path, lineage: Lineage, version: int, consumed: int, **buffer: Any) -> Heard:
        config = config_from_dict(
            {
                "buffer": {"durability": "disk", **buffer},
                "schedule": {"prompts_per_step": 1, "group_size": 2, "max_staleness": 3},
                "transport": {"ack_timeout": 0.5},
                "episode": {"max_total_tokens": 8192, "max_prompt_tokens": 4096},
            }
        )
        parts = {"buffer": GroupBuffer(2, 1, head=consumed), "routing": EXPERTS, "vocab_size": 1000}
        log = open_event_log(run_dir, "learner")
        setup = RunSetup("run", {}, str(run_dir), lineage)
        counts = StepCounts(version=version)
        made = cls(REAL_WORLD, setup, config, log, counts=counts, **parts)
        made.counts = counts
        return made


@asynccontextmanager
async def learning(
    run_dir: Path, lineage: Lineage, version: int, consumed: int = 0, *, kind: type[Heard] = Heard, **buffer: Any
) -> AsyncIterator[tuple[Heard, Way]]:
    """What a learner of that version receives."""
    reception = kind.at(run_dir, lineage, version, consumed, **buffer)
    endpoint = await asyncio.wait_for(reception.start(), LIMIT)
    try:
        yield reception, (endpoint, reception.keys_for_generators)
    finally:
        await asyncio.wait_for(reception.close(), LIMIT)


def waiting(actor: Heard) -> list[tuple[int, int, int]]:
    """Return group, lineage and version of each trajectory that waits for a step."""
    held = (t for group in actor.buffer._groups.values() for t, _ in group.values())
    return sorted((t.group_index, t.lineage, t.newest_version) for t in held)


def named(run_dir: Path, event: str) -> list[dict[str, Any]]:
    return [e for e in read_json_objects(run_dir / "events.jsonl") if e["event"] == event]


def spooled(run_dir: Path) -> int:
    return sum(p.stat().st_size for p in (run_dir / "spool").glob("*"))


async def send(way: Way, trajectories: list[Trajectory]) -> list[tuple[str, str]]:
    """Returns what was refused, with the reasons."""
    refused: list[tuple[str, str]] = []
    endpoint, keys = way
    async with sending(endpoint, keys=keys, on_reject=lambda t, why: refused.append((t.trajectory_id, why))) as sender:
        for trajectory in trajectories:
            await asyncio.wait_for(sender.send(trajectory), LIMIT)
        assert await sender.flush(LIMIT) == 0
    return refused


async def test_tokens_of_erased_weights_are_refused_also_when_their_number_is_reached_again(tmp_path):
    """Version 39 of the first timeline, a resume from 38, and the second timeline's version 39: not the same weights."""
    async with learning(tmp_path, Lineage(1), 40, consumed=38) as (actor, way):
        assert await send(way, [played(38, 0, 38, 1), played(39, 0, 39, 1), played(40, 0, 40, 1)]) == []
        assert waiting(actor) == [(38, 1, 38), (39, 1, 39), (40, 1, 40)]
    # Killed; the checkpoint is of version 38.
    async with learning(tmp_path, Lineage(2, 1, 38, {1: 38}), 38, consumed=38) as (actor, way):
        assert waiting(actor) == [(38, 1, 38)]
        assert actor.receiver.recovered == 3
        actor.counts.version = 39
        assert await send(way, [played(39, 0, 39, 2)]) == []
    refused = named(tmp_path, "trajectory_quarantined")
    assert [(e["trajectory_id"], e["lineage"]) for e in refused] == [(format_trajectory_id(g, 0), 1) for g in (39, 40)]
    assert "version 39 of lineage 1, which a resume took back" in refused[0]["reason"]
    assert [e["kept_as"] for e in refused] == sorted(str(p) for p in (tmp_path / "quarantine").glob("*.spool"))
    # Killed again before a checkpoint, resumed from the same one, and now at version 39 again when it starts.
    async with learning(tmp_path, Lineage(3, 1, 38, {1: 38, 2: 38}), 39, consumed=38) as (actor, way):
        assert waiting(actor) == [(38, 1, 38)]
        reasons = dict(await send(way, [played(39, 0, 39, 1), played(39, 1, 39, 3), played(40, 0, 38, 2)]))
        assert list(reasons) == [format_trajectory_id(39, 0)]
        assert "version 39 of lineage 1" in reasons[format_trajectory_id(39, 0)]
        assert waiting(actor) == [(38, 1, 38), (39, 3, 39), (40, 2, 38)]
    assert len(named(tmp_path, "trajectory_quarantined")) == 3


async def test_what_recovery_refuses_frees_its_disk_and_is_not_met_again(tmp_path):
    async with learning(tmp_path, Lineage(1), 5, consumed=2) as (actor, way):
        await send(way, [played(g, e, 5, 1) for g in (2, 3) for e in range(2)])
    kept = spooled(tmp_path)
    async with learning(tmp_path, Lineage(2, 1, 4, {1: 4}), 4, consumed=2) as (actor, _):
        assert waiting(actor) == []
        assert (actor.spool.nbytes, spooled(tmp_path)) == (0, 0)
    async with learning(tmp_path, Lineage(3, 1, 4, {1: 4, 2: 4}), 4, consumed=2) as (actor, _):
        assert actor.receiver.recovered == 0
    assert kept > 0
    assert sum(p.stat().st_size for p in (tmp_path / "quarantine").iterdir()) == kept
    assert len(named(tmp_path, "trajectory_quarantined")) == 4


async def test_one_bad_trajectory_of_a_group_leaves_the_others_of_its_file(tmp_path):
    spool = Spool(tmp_path / "spool", BufferConfig(durability="disk", fsync=True))
    for version, episode in ((4, 0), (5, 1)):
        trajectory = played(2, episode, version, 1)
        await spool.put_trajectory(trajectory, wire.encode_trajectory(trajectory), spill=False)
    await spool.close()
    async with learning(tmp_path, Lineage(2, 1, 4, {1: 4}), 4, consumed=2) as (actor, way):
        assert waiting(actor) == [(2, 1, 4)]
        assert await send(way, [played(2, 1, 4, 2)]) == []
        assert actor.spool.nbytes == spooled(tmp_path)
    async with learning(tmp_path, Lineage(3, 1, 4, {1: 4, 2: 4}), 4, consumed=2) as (actor, _):
        assert waiting(actor) == [(2, 1, 4), (2, 2, 4)]
        taken = [t.samples[0].table["token_ids"].tolist() for t in actor.buffer.take_groups([2])[0]]
        assert taken == [[1, 2, 4, 1], [1, 2, 4, 2]]
    assert len(named(tmp_path, "trajectory_quarantined")) == 1


def large(group: int, episode: int, lineage: int, reward: float = 1.0) -> Trajectory:
    """Of some 400 kB."""
    n = 6000
    table = played(0, 0, 5, 1).samples[0].table
    columns = {k: np.concatenate([np.resize(v[:1], (n - 4, *v.shape[1:])), v]) for k, v in table.items()}
    columns["token_ids"] = np.random.default_rng(1).integers(0, 900, n).astype(np.int32)
    name = format_trajectory_id(group, episode)
    made = msgspec.structs.replace(make_trajectory(group, episode), trajectory_id=name, lineage=lineage)
    turn = msgspec.structs.replace(made.turns[0], start=n - 2, stop=n, reward=reward)
    return msgspec.structs.replace(made, samples=[Sample(f"{name}s0", TokenTable(columns))], turns=[turn])


async def test_what_is_refused_was_never_stored_so_a_small_spool_is_not_wedged(tmp_path):
    """40 that the learner cannot take, of more bytes than the spool may hold."""
    bad = [large(100 + i, 0, 1) for i in range(16)]  # no slot
    bad += [large(g, e, 9) for g in (2, 3, 4, 5) for e in range(2)]  # a lineage that there is not
    bad += [large(g, e, 1, reward=1e39) for g in (2, 3, 4, 5) for e in range(2)]
    async with learning(tmp_path, Lineage(1), 5, consumed=2, disk_bytes=1_000_000) as (actor, way):
        refused = [await send(way, [trajectory]) for trajectory in [*bad, *bad[16:24]]]
        assert [len(each) for each in refused] == [1] * 40
        assert actor.spool.nbytes == spooled(tmp_path) == 0
        assert await send(way, [large(2, e, 1) for e in range(2)]) == []
        assert actor.buffer.choose_groups(1, 1, 0) == [2]
        assert 0 < actor.spool.nbytes == spooled(tmp_path) < 1_000_000
    reasons = [why for ((_, why),) in refused]
    assert sum("cannot have a slot" in why for why in reasons) == 16
    assert sum("not in the past of lineage 1" in why for why in reasons) == 16
    assert sum("rewards of 1e+39" in why for why in reasons) == 8
    async with learning(tmp_path, Lineage(2, 1, 5, {1: 5}), 5, consumed=2) as (actor, _):
        assert (actor.receiver.recovered, len(waiting(actor))) == (2, 2)


async def test_an_episode_that_is_here_under_another_name_is_not_stored_again(tmp_path):
    async with learning(tmp_path, Lineage(1), 5, consumed=2) as (actor, way):
        actor.receiver._group_size = None  # any name
        assert await send(way, [played(2, 0, 5, 1)]) == []
        before = spooled(tmp_path)
        assert await send(way, [msgspec.structs.replace(played(2, 0, 5, 1), trajectory_id="other")]) == []
        assert (spooled(tmp_path), actor.receiver.duplicates) == (before, 1)


async def test_an_unexpected_failure_after_storing_leaves_nothing_in_the_spool(tmp_path, caplog):
    async with learning(tmp_path, Lineage(1), 5, consumed=2) as (actor, way):

        def fail(trajectory: Trajectory, nbytes: int) -> bool:
            raise KeyError("a defect")

        actor.buffer.add = fail  # type: ignore[method-assign]
        ((name, reason),) = await send(way, [played(2, 0, 5, 1)])
        assert (name, "a defect" in reason) == (format_trajectory_id(2, 0), True)
        assert spooled(tmp_path) == 0
    assert len(named(tmp_path, "trajectory_quarantined")) == 1


async def test_what_validation_refuses_or_fails_on_is_nobody_elses_matter(tmp_path, caplog):
    together = []

    class Choosy(Heard):
        def find_invalid(self, trajectories: Sequence[Trajectory], **options: Any) -> dict[int, str]:
            names = [t.group_index for t in trajectories]
            together.append(len(names))
            if 2 in names:  # large, so this is a thread: the others arrive meanwhile
                time.sleep(0.2)
            if 4 in names:
                raise KeyError("oops")
            return {at: "not today" for at, name in enumerate(names) if name == 3}

    sent = [large(2, 0, 1), *(played(group, episode, 5, 1) for group in (3, 4, 5) for episode in range(2))]
    async with learning(tmp_path, Lineage(1), 5, consumed=2, kind=Choosy) as (actor, way):
        refused = dict(await send(way, sent))
        assert [group for group, *_ in waiting(actor)] == [2, 5, 5]
        assert actor.receiver.received == 3
    assert max(together) > 1
    why = {3: "not today", 4: "the learner failed to take it: KeyError: 'oops'"}
    assert refused == {format_trajectory_id(group, e): why[group] for group in (3, 4) for e in range(2)}
    assert {e["trajectory_id"]: e["reason"] for e in named(tmp_path, "trajectory_refused")} == refused
    assert "KeyError" in caplog.text


async def test_a_token_older_than_the_schedule_allows_is_refused_on_arrival(tmp_path):
    """It would end the run at its step, and with the spool every resume of it."""
    async with learning(tmp_path, Lineage(1), 9, consumed=2) as (_, way):
        ((_, reason),) = await send(way, [played(2, 0, 5, 1), played(2, 1, 6, 1)])
        assert "a token of version 5, the learner is at 9, and the schedule allows an age of 3" in reason
