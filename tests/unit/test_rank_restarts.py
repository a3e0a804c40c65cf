"""A rank of the learner is lost at any of its calls: whoever calls the learner sees nothing of it. Ranks are stand-ins here; real
ones are in `tests/ray/test_ranks_lost.py`."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from r3async.actors.rank_actor import LocalRank
from r3async.actors.rank_calls import RankCalls, RankLost
from r3async.actors.rank_recovery import RankCall, RecoveryLog
from r3async.actors.ranks import RemoteRanks
from r3async.config import load_config
from r3async.learner import LearnerError
from r3async.world import ActorLostError, ClusterNode
from r3async.world.real import RealWorld
from tests.helpers.world import Reports

HOST = "here"
KILLED = ActorLostError("it was killed")
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"


class Rank:
    """Its state is what it trained, in order."""

    hosts = HOST, HOST

    def __init__(self, pid):
        self.pid, self.lost = pid, False
        self.state, self.snapshots, self.held = [], None, None

    def describe_process(self):
        return self.pid, self.hosts[self.pid % 2]

    def open_store(self, alone):
        return "127.0.0.1", 1

    def load_model(self, address, port, alone):
        return 7

    def call_method(self, name, *args, **kwargs):
        return getattr(self, name)(*args, **kwargs)

    def train_supervised(self, shares):
        self.state.append(shares)
        return {"steps": len(self.state)}

    def snapshot_weights(self, version):
        assert self.snapshots is None, f"version {self.snapshots} has not been written"
        self.snapshots = (version, list(self.state)) if self.pid % 2 == 0 else None  # the first one has them all

    def write_version(self, reading):
        snapshot, self.snapshots = self.snapshots, None
        assert snapshot is not None, "there is no snapshot to write"
        return snapshot

    def discard_snapshot(self):
        self.snapshots = None

    def stage_checkpoint(self):
        self.held = list(self.state)

    def write_checkpoint(self, directory):
        held, self.held = self.held, None
        assert held is not None, "nothing is held"
        return [held]

    def estimate_copy_bytes(self):
        return 8

    def stage_recovery_copy(self):
        self.copied = list(self.state)

    def take_recovery_copy(self):
        return self.copied

    def restore_from_copies(self, *copies):
        self.state = list(copies[self.pid % 2])

    def count_updates(self):
        return len(self.state)

    def set_weight_transport(self, backend, together):
        pass


class Actors:
    """Of this process. A call is made when it is begun. `fate(number, name)`: its actor is lost `before` it or `after` it."""

    def __init__(self, fate=lambda number, name: "", store=1e9):
        self.fate, self.begun, self.pids, self.store = fate, 0, 0, store
        self.ranks, self.killed = {}, []
        """The newest actor of each rank, and the processes that were killed."""
        self.lock = threading.Lock()

    def spawn_actor(self, actor_class, rank, *args, name, actor_options):
        self.pids += 1
        self.ranks[rank] = Rank(2 * self.pids + rank)
        return self.ranks[rank]

    def begin_call(self, actor, method, *args, concurrency_group="", **kwargs):
        with self.lock:
            self.begun += 1
            # References arrive as what they are of.
            args = [a.value if isinstance(a, SimpleNamespace) else a for a in args]
            name = args[0] if method == "call_method" else method
            fate = "" if actor.lost else self.fate(self.begun, name)
            actor.lost = actor.lost or fate == "before"
            if actor.lost:
                return SimpleNamespace(error=KILLED)
            try:
                value = getattr(actor, method)(*args, **kwargs)
            except AssertionError as error:
                return SimpleNamespace(error=error)
            actor.lost = fate == "after"
            return SimpleNamespace(error=KILLED if actor.lost else None, value=value)

    def wait_for_call(self, calls, timeout=None):
        return list(calls[:1]), list(calls[1:])

    def get(self, call, timeout=None):
        if call.error is not None:
            raise call.error
        return call.value

    def put(self, value):
        return value

    def kill_actor(self, actor, restart=False):
        actor.lost = True

    def list_nodes(self):
        return [ClusterNode("key", HOST, 8, 0, 8, 0, object_store_bytes=self.store)]


class Cluster(RealWorld):
    def __init__(self, actors):
        self.actors = actors
        self.processes = SimpleNamespace(kill_process=lambda *process: actors.killed.append(process))


@pytest.fixture(autouse=True)
def many_restarts(monkeypatch):
    monkeypatch.setattr("r3async.actors.ranks.MAX_CONSECUTIVE_RESTARTS", 100)


def learner_of(actors, tmp_path, told=None, **supervise):
    settings = ["learner.parallel.dp=2", f"weights.directory={tmp_path}"]
    config = load_config("quickstart", [*settings, *(f"supervise.{k}={v}" for k, v in supervise.items())])
    report = Reports() if told is None else told
    return RemoteRanks.load(config, tmp_path, tmp_path, world=Cluster(actors), report_event=report)


def play(learner, tmp_path, steps=5):
    """Steps, versions that are written after the step that follows them, and checkpoints; what is seen of them."""
    directory, seen, version, stored = tmp_path / "part", [], None, True
    directory.mkdir(exist_ok=True)
    for step in range(steps):
        seen.append(learner.train_supervised([[step], [10 + step]]))
        if version is not None:
            seen.append(learner.write_version())
        version = step
        learner.snapshot_weights(version)
        if not stored:
            seen.append(learner.write_checkpoint(directory))
        stored = step % 2 == 0
        if not stored:
            learner.stage_checkpoint()
    seen += [learner.write_version(), learner.count_updates()]
    return seen


@pytest.mark.parametrize("copy_steps", [1, 2, 3])
def test_a_rank_that_is_lost_at_any_call_changes_nothing_that_is_seen(tmp_path, copy_steps):
    actors = Actors()
    expected = play(learner_of(actors, tmp_path, copy_steps=copy_steps), tmp_path)
    assert expected[-1] == 5
    first = 6  # calls of the start
    for number in range(first + 1, actors.begun + 1):
        for when in ("before", "after"):
            told = Reports()
            faulty = Actors(lambda n, name, number=number, when=when: when if n == number else "")
            learner = learner_of(faulty, tmp_path, told, copy_steps=copy_steps)
            assert play(learner, tmp_path) == expected, (number, when)
            lost = [event for event, _ in told]
            assert lost in (["rank_lost", "ranks_restarted"], []), (number, when)
            assert learner.restarts == len(lost) // 2
            # One that is lost after its last call is not asked again.
            assert lost or number >= actors.begun - 1


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_are_lost_again_and_again_also_while_they_start_change_nothing(tmp_path, seed):
    expected = play(learner_of(Actors(), tmp_path), tmp_path)
    rng, starts = random.Random(seed), 6
    faulty = Actors(lambda n, name: rng.choice(["before", "after"]) if n > starts and rng.random() < 0.04 else "")
    assert play(learner_of(faulty, tmp_path), tmp_path) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_version_that_is_written_beside_a_step_in_which_a_rank_is_lost_is_that_version(tmp_path, seed):
    rng = random.Random(seed)
    faulty = Actors(lambda n, name: rng.choice(["before", "after"]) if n > 6 and rng.random() < 0.05 else "")
    learner, written = learner_of(faulty, tmp_path), []
    with ThreadPoolExecutor(1) as writer:
        writing = None
        for step in range(12):
            assert learner.train_supervised([[step], [10 + step]]) == {"steps": step + 1}
            if writing is not None:
                written.append(writing.result(20))
            learner.snapshot_weights(step)
            writing = writer.submit(learner.write_version)
        written.append(writing.result(20))
    assert [version for version, _ in written] == list(range(12))
    for version, state in written:
        assert state == [[[step]] for step in range(version + 1)]


def test_a_rank_that_is_lost_too_often_without_a_step_ends_the_learner(tmp_path, monkeypatch):
    told, trained = Reports(), [0]

    def fate(number, name):
        if name == "load_model":
            trained[0] = 0
        trained[0] += name == "train_supervised"
        return "before" if name == "train_supervised" and trained[0] > 2 else ""

    monkeypatch.setattr("r3async.actors.ranks.MAX_CONSECUTIVE_RESTARTS", 3)
    learner = learner_of(Actors(fate), tmp_path, told)
    learner.train_supervised([[0], [1]])  # by two ranks, and again after each start: its copy is not here yet
    with pytest.raises(RankLost, match="was lost"):
        learner.train_supervised([[2], [3]])
    assert learner.restarts == 3
    assert [event for event, _ in told].count("rank_lost") == 4


def test_without_copies_or_where_they_do_not_fit_the_loss_of_a_rank_is_the_callers(tmp_path):
    fate = []
    for actors, settings in (
        (Actors(lambda n, name: fate and fate[0]), {"copy_steps": 0}),
        (Actors(lambda n, name: fate and fate[0], store=31), {}),
    ):
        told = Reports()
        learner = learner_of(actors, tmp_path, told, **settings)
        learner.train_supervised([[0], [1]])
        fate.append("before")
        with pytest.raises(RankLost):
            learner.train_supervised([[2], [3]])
        fate.clear()
        assert learner.restarts == 0
        assert [event for event, _ in told] == (["rank_lost"] if settings else ["ranks_not_copied", "rank_lost"])


def test_ranks_of_several_hosts_and_those_of_nccl_are_not_started_again(tmp_path, monkeypatch):
    on_one_host, on_two = Actors(), Actors()
    here = learner_of(on_one_host, tmp_path)
    here.set_weight_transport("nccl")
    monkeypatch.setattr(Rank, "hosts", (HOST, "there"))
    for actors, learner in ((on_one_host, here), (on_two, learner_of(on_two, tmp_path))):
        learner.train_supervised([[0], [1]])
        actors.ranks[1].lost = True
        with pytest.raises(RankLost, match="rank 1 of the learner was lost: it was killed"):
            learner.count_updates()
        learner.close()


def test_processes_of_lost_ranks_are_killed_also_if_they_are_paused(tmp_path):
    actors = Actors()
    learner = learner_of(actors, tmp_path)
    before = list(learner.processes)
    actors.ranks[1].lost = True
    assert learner.train_supervised([[0], [1]]) == {"steps": 1}
    assert actors.killed == before
    assert not set(before) & set(learner.processes)


def test_a_learner_that_is_closed_starts_no_ranks(tmp_path):
    actors = Actors()
    learner = learner_of(actors, tmp_path)
    learner.train_supervised([[0], [1]])
    learner.close()
    started = actors.pids
    with pytest.raises(RankLost):
        learner.count_updates()
    assert actors.pids == started


def test_a_rank_that_fails_by_itself_is_not_started_again(tmp_path):
    learner = learner_of(Actors(), tmp_path)
    learner.snapshot_weights(0)
    with pytest.raises(LearnerError, match="rank 0 of the learner failed: version"):
        learner.snapshot_weights(1)
    assert learner.restarts == 0


def test_a_file_that_one_rank_cannot_write_ends_no_rank(tmp_path):
    learner = learner_of(Actors(), tmp_path)
    (tmp_path / "part").mkdir()
    learner.train_supervised([[0], [1]])
    with pytest.raises(LearnerError, match="nothing is held"):
        learner.write_checkpoint(tmp_path / "part")
    assert learner.train_supervised([[2], [3]]) == {"steps": 2}
    assert learner.restarts == 0


def test_a_checkpoint_that_is_given_up_before_it_is_written_does_not_keep_all_steps_since(tmp_path):
    actors, told = Actors(), Reports()
    learner = learner_of(actors, tmp_path, told)
    learner.stage_checkpoint()
    for step in range(4):
        learner.train_supervised([[step], [step]])
    actors.ranks[1].lost = True
    assert learner.count_updates() == 4
    (restarted,) = (facts for event, facts in told if event == "ranks_restarted")
    assert restarted["steps_again"] == 1, "of which the copy was being handed over"


# -- which failure is the loss of a rank -------------------------------------------------------------------------------


class Answers:
    """Calls that end in this order."""

    def __init__(self, *answers):
        self.answers, self.killed = answers, 0

    def begin_call(self, actor, method, *args, concurrency_group="", **kwargs):
        return actor

    def wait_for_call(self, calls, timeout=None):
        ready = [call for call in calls if self.answers[call] is not None]
        return ready[:1], [call for call in calls if call not in ready[:1]]

    def get(self, call, timeout=None):
        if isinstance(self.answers[call], Exception):
            raise self.answers[call]
        return self.answers[call]

    def kill_actor(self, actor, restart=False):
        self.killed += 1


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ((RuntimeError(GLOO), KILLED), RankLost, "rank 1 of the learner was lost: it was killed"),
        ((KILLED, RuntimeError(GLOO)), RankLost, "rank 0 of the learner was lost: it was killed"),
        ((RuntimeError(GLOO), RuntimeError(GLOO)), RankLost, "rank 0 of the learner waited in vain for another"),
        ((RuntimeError("NCCL watchdog"), None), RankLost, "rank 0 of the learner waited in vain for another"),
        ((ValueError("a bad row"), None), LearnerError, "rank 0 of the learner failed: a bad row"),
    ],
)
def test_what_ranks_fail_with_says_whether_one_was_lost(answers, kind, message):
    actors = Answers(*answers)
    with pytest.raises(LearnerError, match=message) as raised:
        RankCalls(actors, range(2)).call_all("run_minibatches")
    assert type(raised.value) is kind
    assert actors.killed == 2


def test_the_base_waits_for_copies_that_are_not_written():
    log = RecoveryLog(copy_steps=1)
    train, snapshot, stage = LocalRank.run_minibatches, LocalRank.snapshot_weights, LocalRank.stage_checkpoint
    for change in (RankCall(train), RankCall(snapshot, (1,)), RankCall(train), RankCall(stage)):
        log.add(change)
    assert log.is_copy_due
    log.begin_copy()
    log.set_copies(["copy"])
    assert (log.base, log.repeated_steps, log.is_copy_due) == (None, 2, False)
    log.add(RankCall(train))
    log.mark_written(snapshot)
    assert (log.base, log.repeated_steps) == (None, 3)
    log.mark_written(stage)
    assert (log.base, [change.method for change in log.calls], log.is_copy_due) == (("copy",), [train], True)


def test_a_log_that_keeps_nothing_holds_nothing():
    log = RecoveryLog(copy_steps=0)
    log.add(RankCall(LocalRank.run_minibatches))
    assert (log.calls, log.is_copy_due) == ([], False)
