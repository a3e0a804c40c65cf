"""A run without engines, sockets and torch: the real scheduler, with generators and a learner that only keep books."""

from dataclasses import dataclass, field

import msgspec
import numpy as np

from r3async.config import ScheduleConfig
from r3async.data.tokens import SCHEMA, Sample, TokenTable, Trajectory
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.run_ahead import AdmissionController, max_groups_for_step, worst_case_staleness
from r3async.schedule.staleness_check import check_staleness, compute_staleness
from r3async.schedule.tasks import TaskCursor


@dataclass(frozen=True)
class Shape:
    """One configuration. `tokens`: number of tokens of a batch; 0 turns this off."""

    staleness: int = 1
    per_step: int = 2
    per_version: int = 1
    samples: int = 2
    window: int = 1
    versions: int = 4
    tokens: int = 0
    split: str = "idle"
    tasks: int | None = None

    @property
    def steps(self) -> int:
        return self.versions * self.per_version

    @property
    def bound(self) -> int:
        return worst_case_staleness(self.staleness, self.window, self.per_step * self.per_version)


@dataclass
class Player:
    """A generator. Episodes are (group, episode), each with the version that sampled its first token."""

    alive: bool = True
    version: int = 0
    reviving: int | None = None
    """Version that a restarted process is loading."""
    playing: dict[tuple[int, int], int] = field(default_factory=dict)
    outbox: dict[tuple[int, int], int] = field(default_factory=dict)
    held: dict[tuple[int, int], int] = field(default_factory=dict)
    """Episodes that are leased but not begun, with the version that they wait for."""
    frozen: bool = False
    """True while the process is stopped: nothing happens there until it thaws."""
    stray: dict[tuple[int, int], int] = field(default_factory=dict)
    """Episodes that were played or sent although the lease was taken back meanwhile: another may play the same."""
    held_stray: dict[tuple[int, int], int] = field(default_factory=dict)
    """Episodes that are held although the lease was taken back."""

    def get(self, version: int) -> None:
        """Load these weights, which sample the first tokens of the episodes that waited for them."""
        self.version = version
        for waiting, begun in ((self.held, self.playing), (self.held_stray, self.stray)):
            for key in [key for key, needed in waiting.items() if needed <= version]:
                del waiting[key]
                begun[key] = version


def episode(group: int, index: int, version: int, seed: int) -> Trajectory:
    """Return an episode of two tokens, of which the second is trained."""
    columns = {name: column.filled_rows(2) for name, column in SCHEMA.columns.items() if not column.optional}
    columns["loss_mask"] = np.array([False, True])
    columns["policy_version"] = np.array([-1, version], np.int32)
    name = f"g{group}e{index}"
    return Trajectory(name, group, index, seed, "", "env_done", [], [Sample(name, TokenTable(columns))])


class Run:
    """All that happens between a lease and an installation, one event at a time. It checks what must always hold."""

    def __init__(
        self,
        shape: Shape,
        players: int = 2,
        admission: type[AdmissionController] = AdmissionController,
        buffer=GroupBuffer,
    ):
        self.shape, self.kind = shape, admission
        self.cursor = TaskCursor(0, shape.tasks)
        self.admission = self._admission()
        self.buffer = buffer(shape.samples, shape.window)
        self.players = {f"p{i}": Player() for i in range(players)}
        self.steps, self.learner_version, self.published = 0, 0, 0
        """Number of steps; the learner's version; the newest version that is written where engines find it."""
        self.since = [0, 0]
        self.trained: list[int] = []
        self.oldest = 0

    def _admission(self) -> AdmissionController:
        shape = self.shape
        schedule = ScheduleConfig(
            max_staleness=shape.staleness,
            prompts_per_step=shape.per_step,
            group_size=shape.samples,
            steps_per_publication=shape.per_version,
            window=shape.window,
            split=shape.split,
        )
        return self.kind(
            schedule,
            total_groups=None if shape.tokens else shape.steps * shape.per_step,
            choose_task=self.cursor.pick_task,
        )

    @property
    def done(self) -> bool:
        return self.steps == self.shape.steps

    # -- generators ----------------------------------------------------------------------------------------------

    def lease(self, name: str, at_once: int, among: int = 1) -> bool:
        player = self.players[name]
        room = at_once - len(player.playing) - len(player.held)
        if not player.alive or player.frozen or room < 1 or self.done:
            return False
        got = self.admission.lease_group(name, free_episodes=room, max_episodes=at_once, idle_owners=among)
        if got is None:
            return False
        assert 1 <= len(got.episode_indices) <= room
        assert got.task_seed == self.cursor.pick_task(got.group_index)
        for index in got.episode_indices:
            key = (got.group_index, index)
            owned = (held for p in self.players.values() for held in (p.playing, p.outbox, p.held))
            assert all(key not in held for held in owned), "two live owners"
            # Episodes that it still plays from before it was stopped are not begun again.
            if key in player.stray:
                player.playing[key] = player.stray.pop(key)
            else:
                player.held[key] = player.held_stray.pop(key, got.version)
        player.get(player.version)
        return True

    def finish(self, name: str, pick: int = 0) -> bool:
        """End one of the player's episodes."""
        player = self.players[name]
        if not player.playing or player.frozen:
            return False
        key = list(player.playing)[pick % len(player.playing)]
        player.outbox[key] = player.playing.pop(key)
        return True

    def arrive(self, name: str, pick: int = 0) -> bool:
        """Let one of the sent episodes reach the learner."""
        player = self.players[name]
        if not player.outbox or player.frozen:
            return False
        key = list(player.outbox)[pick % len(player.outbox)]
        self.buffer.add(episode(*key, player.outbox.pop(key), self.cursor.pick_task(key[0])), 1)
        return True

    def die(self, name: str) -> None:
        """Kill the process, and with it what it played and had not delivered."""
        player = self.players[name]
        last_words = dict(list(player.outbox.items())[:1])  # on the wire: arrives after the learner was asked
        player.playing, player.outbox, player.stray, player.held, player.held_stray = {}, {}, {}, {}, {}
        player.alive, player.frozen, player.reviving = False, False, None
        lacking = {g: self.buffer.missing_in_group(g) for g in self.admission.list_leased_groups(name)}
        for key, version in last_words.items():
            self.buffer.add(episode(*key, version, 0), 1)
        self.admission.requeue_leases(name, lambda g: lacking[g])
        assert self.admission.list_leased_groups(name) == []

    def freeze(self, name: str) -> bool:
        player = self.players[name]
        player.frozen = player.alive
        return player.frozen

    def thaw(self, name: str) -> None:
        self.players[name].frozen = False

    def take_back(self, name: str) -> bool:
        """Take back the leases of a player that is silent for too long; it plays on when it wakes."""
        player = self.players[name]
        if not player.frozen:
            return False
        self.admission.requeue_leases(name, self.buffer.missing_in_group)
        assert self.admission.list_leased_groups(name) == []
        player.stray |= player.playing | player.outbox
        player.held_stray |= player.held
        player.playing, player.outbox, player.held = {}, {}, {}
        return True

    def stray(self, name: str, pick: int = 0) -> bool:
        """Let an episode arrive whose lease was taken back, either first or as a duplicate."""
        player = self.players[name]
        if not player.stray or player.frozen:
            return False
        key = list(player.stray)[pick % len(player.stray)]
        version = player.stray.pop(key)
        fresh = bool(self.buffer.missing_in_group(key[0])) and key[1] in self.buffer.missing_in_group(key[0])
        assert self.buffer.add(episode(*key, version, self.cursor.pick_task(key[0])), 1) is fresh
        return True

    def begin_revival(self, name: str) -> bool:
        player = self.players[name]
        if player.alive or player.reviving is not None:
            return False
        player.reviving = self.published
        return True

    def end_revival(self, name: str) -> bool:
        """Finish loading the version that was the newest when the revival began; the player gets a newer one later."""
        player = self.players[name]
        if player.reviving is None:
            return False
        player.version, player.reviving, player.alive = player.reviving, None, True
        return True

    # -- learner and conductor -----------------------------------------------------------------------------------

    def batch(self) -> list[int]:
        shape = self.shape
        at_most = shape.per_step
        if shape.tokens:
            at_most = max_groups_for_step(
                slots=self.admission.slots,
                prompts_per_step=shape.per_step,
                steps_left=shape.per_version - self.since[0],
                consumed_since=self.since[1],
            )
            assert at_most >= shape.per_step
        return [] if self.done else self.buffer.choose_groups(shape.per_step, at_most, shape.tokens)

    def train(self) -> bool:
        indices = self.batch()
        if not indices:
            return False
        groups = self.buffer.take_groups(indices)
        check_staleness(groups, self.learner_version, self.shape.bound)
        self.oldest = max(
            self.oldest, *(int(compute_staleness(t, self.learner_version).max()) for g in groups for t in g)
        )
        assert [sorted(t.episode_index for t in g) for g in groups] == [list(range(self.shape.samples))] * len(groups)
        assert not set(indices) & set(self.trained), "consumed twice"
        self.trained += indices
        self.admission.step_trained(self.learner_version + 1, indices)
        self.steps += 1
        self.since = [self.since[0] + 1, self.since[1] + len(indices)]
        if self.since[0] == self.shape.per_version:
            self.learner_version, self.since = self.learner_version + 1, [0, 0]
            self.admission.version_published(self.learner_version)
        return True

    def publish(self) -> bool:
        if self.published == self.learner_version:
            return False
        self.published = self.learner_version
        return True

    def install(self, *names: str) -> bool:
        """Install the newest published version in every player that answers, or in the named ones alone."""
        chosen = [self.players[name] for name in names or self.players]
        behind = [p for p in chosen if p.alive and not p.frozen and p.version < self.published]
        for player in behind:
            player.get(self.published)
        return bool(behind)

    def restart_conductor(self) -> None:
        """Restart the conductor from what it wrote down. Its generators are new, too."""
        state = msgspec.json.decode(msgspec.json.encode(self.admission.state_dict()))
        version = self.admission.version
        self.admission = self._admission()
        self.admission.load_state_dict(state, self.buffer.consumed.head, sorted(self.buffer.consumed.beyond_head))
        assert self.admission.version == version
        for name in self.players:
            self.die(name)

    # -- invariants ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert self.admission.slots_taken <= self.admission.slots
        assert len(set(self.trained)) == len(self.trained)
        held = [key for p in self.players.values() for key in (*p.playing, *p.outbox, *p.held)]
        assert len(held) == len(set(held)), "an episode has two live owners"
        assert len({g for g, _ in held}) <= self.admission.slots

    def can_progress(self) -> bool:
        """Return True if, without a death, something can happen that brings the run nearer to its end."""
        if self.done or self.batch() or self.published < self.learner_version:
            return True
        players = self.players.values()
        if any(p.playing or p.outbox or p.stray or p.frozen or not p.alive for p in players):
            return True
        if any(p.version < self.published for p in players):
            return True
        return self.admission.can_lease()

    def finish_run(self, at_once: int) -> None:
        """Let every player do what it can, in turn, until the last step is made. Fails if that does not come."""
        limit = 50 + 40 * (len(self.players) + 1) * (self.shape.samples + 2) * (self.shape.steps + 2) * 4
        for _ in range(limit):
            if self.done:
                break
            for name in self.players:
                self.begin_revival(name)
                self.end_revival(name)
                self.take_back(name)  # those that are stopped stay so, as long as another one lives
                if all(p.frozen for p in self.players.values()):
                    self.thaw(name)
                while self.lease(name, at_once):
                    pass
                self.finish(name)
                self.arrive(name)
            self.train()
            self.publish()
            self.install()
        assert self.done, "the run cannot be finished from here"
        if not self.shape.tokens:
            assert sorted(self.trained) == list(range(self.shape.steps * self.shape.per_step)), "a group was lost"
            assert self.admission.is_exhausted
