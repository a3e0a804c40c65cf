"""One definition of what may be trained: where a trajectory is made, where it arrives, and in the step, which no data can end."""

import asyncio
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.actors.leasing import LeaseAnswer, LeaseCall
from r3async.actors.run_setup import RunSetup
from r3async.config import Config, config_from_dict, config_to_dict, load_config
from r3async.data.tokens import Sample, Trajectory, Turn
from r3async.data.versions import Lineage
from r3async.data.wire import encode_trajectory
from r3async.learner import prepare, trainer
from r3async.learner.micro_batch_plan import CostModel
from r3async.learner.prepare import PreparedStep, prepare_minibatches
from r3async.learner.trainer import Trainer
from r3async.rollout.engine import Generation, GenerationRequest
from r3async.rollout.scripted import ScriptedEngine
from r3async.schedule.run_ahead import GroupLease
from r3async.schedule.task_failures import EpisodeEnd, TrajectoryQuarantine
from r3async.schedule.tasks import training_seed
from r3async.schedule.validation import (
    InvalidTrajectory,
    check_trajectories,
    check_trajectory,
    find_invalid,
    validate_trajectories,
)
from r3async.weights.interfaces import TransferOffer
from r3async.weights.manifest import WeightManifest
from r3async.world.real import REAL_WORLD
from tests.helpers.playing import GeneratorOnEngine
from tests.helpers.serving import renderer
from tests.helpers.transport import CLIENT_KEYS, LIMIT, Inbox, receiving
from tests.helpers.world import StandIn
from tests.unit.test_buffer import ROUTING, make_trajectory

ESTIMATORS = ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline"]


def changed(**fields: Any) -> Trajectory:
    return msgspec.structs.replace(make_trajectory(), **fields)


def turned(*turns: Turn) -> Trajectory:
    return changed(turns=list(turns))


def tempered(temperature: float) -> Trajectory:
    return changed(samples=[Sample("s", make_trajectory().samples[0].table, temperature)])


def column(**columns: np.ndarray) -> Trajectory:
    sample = make_trajectory().samples[0]
    return changed(samples=[Sample(sample.sample_id, sample.table.with_columns(**columns))])


def rewarded(reward: float) -> Trajectory:
    return turned(Turn(0, 0, 2, 4, reward, "stop"))


POISON = {
    "unknown turn": (turned(Turn(1, 0, 2, 4, 1.0, "stop")), "a token of turn 0, but its trajectory has no such turn"),
    "no turns": (turned(), "a token of turn 0, but its trajectory has no such turn"),
    "turn twice": (turned(*[Turn(0, 0, 2, 4, 1.0, "stop")] * 2), "has turn 0 twice"),
    "absent turn": (column(turn=np.full(4, -1, np.int32)), "trains a token of no turn"),
    "negative turn": (turned(Turn(0, 0, 2, 4, 1.0, "stop"), Turn(-2, 0, 0, 0, 1.0, "stop")), "has turn -2"),
    "turn of no sample": (turned(Turn(0, 1, 2, 4, 1.0, "stop")), "of sample 1, which are not there"),
    "turn past the end": (turned(Turn(0, 0, 2, 5, 1.0, "stop")), "at tokens 2:5 of sample 0, which are not there"),
    "token outside its turn": (turned(Turn(0, 0, 3, 4, 1.0, "stop")), "a token of turn 0 outside of tokens 3:4"),
    "negative group": (changed(group_index=-1), "has group_index -1"),
    "negative episode": (changed(episode_index=-1), "has episode_index -1"),
    "reward of 1e39": (rewarded(1e39), "rewards of 1e\\+39 together: beyond 1e\\+15"),
    "rewards whose sum is infinite": (
        turned(Turn(0, 0, 2, 4, 1.7e308, "stop"), Turn(1, 0, 4, 4, 1.7e308, "stop")),
        "reward that is not finite",
    ),
    "token rewards": (column(rewards=np.full(4, 3e38, np.float32)), "rewards of 1.2e\\+39 together"),
    "temperature that is 0 in float32": (tempered(1e-60), "has temperature 1e-60"),
    "temperature that is infinite in float32": (tempered(1e39), "has temperature 1e\\+39"),
    "log-prob above 0": (
        column(rollout_logprobs=np.asarray([0, 0, 0.1, -1], np.float32)),
        "a token of log-prob 0.1: no",
    ),
    "log-prob that float32 cannot square": (
        column(rollout_logprobs=np.asarray([0, 0, -1, 1e30], np.float32)),
        "a token of log-prob 1e\\+30: no distribution",
    ),
    "column of the learner": (column(old_logprobs=np.zeros(4, np.float32)), "column 'old_logprobs', which only"),
    "two samples of one name": (changed(samples=make_trajectory().samples * 2), "two samples of one name"),
}


@pytest.mark.parametrize("logprob", [0.0, -0.0, 1e-9, 1e-5, -0.5, -40.0, -1e4, np.nan, -np.inf, np.inf])
def test_a_logprob_that_a_distribution_gives_or_that_the_loss_drops_is_let_pass(logprob: float) -> None:
    check_trajectory(column(rollout_logprobs=np.asarray([7, 7, logprob, -0.5], np.float32)))


def stand_in(trajectory: Trajectory) -> Trajectory:
    sample = trajectory.samples[0]
    table = make_trajectory().samples[0].table.slice_rows(0, 1)
    return msgspec.structs.replace(trajectory, group_index=0, turns=[], samples=[Sample(sample.sample_id, table)])


def prepare_step(groups: list[list[Trajectory]], config: Config | None = None) -> PreparedStep:
    config = config_from_dict({}) if config is None else config
    unused: Any = None  # nothing is trained
    return Trainer(config, CostModel(), unused, unused, unused, stand_in).prepare_step(groups)


@pytest.mark.parametrize("name", POISON)
def test_the_step_trains_the_group_without_what_it_cannot_train(name: str) -> None:
    poison, _ = POISON[name]
    good = make_trajectory(0, 1, reward=0.0)
    prepared = prepare_step([[poison, good]])
    assert [u.trajectory for u in prepared.rejected] == [poison]
    assert prepared.groups[0][1] is good
    assert prepared.groups[0][0].turns == []
    trained = [s for s in prepared.samples if s.table["loss_mask"].any()]
    assert [s.sample_id for s in trained] == ["g0e1s0"]


def test_a_group_that_fails_though_nobody_in_it_is_to_blame_is_skipped_and_a_defect_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = [[make_trajectory(g, e) for e in range(2)] for g in range(2)]
    groups[0][0] = column(rewards=np.asarray([0, 0, np.inf, 0], np.float32))

    def refuse_first_group(some: Any, config: Config) -> Any:
        if any(t.turns and t.group_index == 0 for group in some for t in group):
            raise FloatingPointError("no")
        return prepare_minibatches(some, config)

    monkeypatch.setattr(trainer, "prepare_minibatches", refuse_first_group)
    monkeypatch.setattr(prepare, "prepare_minibatches", refuse_first_group)
    prepared = prepare_step(groups)
    reasons = {u.trajectory.trajectory_id: u.reason for u in prepared.rejected}
    assert len(prepared.rejected) == 2
    assert "reward" in reasons["g0e0"], "its own defect says more than that of its group"
    assert reasons["g0e1"] == "its group cannot be trained: FloatingPointError: no"
    assert prepared.groups[1] == groups[1]
    assert [t.turns for t in prepared.groups[0]] == [[], []]

    def broken(some: Any, config: Config) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(trainer, "prepare_minibatches", broken)
    monkeypatch.setattr(prepare, "prepare_minibatches", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        prepare_step(groups)


@pytest.mark.parametrize("name", POISON)
def test_poison_among_others_is_named_and_nobody_else(name: str) -> None:
    poison, reason = POISON[name]
    known = {"vocab_size": 10, "learner_version": 3, "max_tokens": 8, "routing": ROUTING}
    some = [make_trajectory(0, 0), poison, make_trajectory(0, 2), poison]
    found = find_invalid(some, lambda them: validate_trajectories(them, **known))
    assert sorted(found) == [1, 3]
    assert all(re.search(reason, str(error)) for error in found.values())


floats = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-3, 3) | st.sampled_from([1e15, -1e15, 1e39, 0.0])
ints = st.integers(-2, 5)


@st.composite
def members(draw: Any, index: int) -> Trajectory:
    """An episode of up to three turns in up to two samples, in which anything may be wrong."""
    trajectory = make_trajectory(0, index)
    table = trajectory.samples[0].table
    samples = []
    for at in range(draw(st.integers(1, 2))):
        turn = np.asarray(draw(st.lists(st.sampled_from([-1, at, at, at, 2]), min_size=4, max_size=4)), np.int32)
        mask = (turn >= 0) & (np.arange(4) > draw(st.sampled_from([-1, 0, 0, 0])))
        rewards = np.asarray(draw(st.lists(floats, min_size=4, max_size=4)), np.float64)
        with np.errstate(over="ignore"):
            rewards = rewards.astype(np.float32)
        logprobs = np.asarray(
            draw(st.lists(st.sampled_from([-0.5, -0.5, -0.5, 0.0, np.nan, 2.0]), min_size=4, max_size=4))
        )
        columns = {"turn": turn, "loss_mask": mask, "rewards": rewards, "rollout_logprobs": logprobs.astype(np.float32)}
        temperature = draw(st.sampled_from([1.0, 1.0, 1e-60, 0.5]))
        samples.append(Sample(f"g0e{index}s{at}", table.with_columns(**columns), temperature))
    turns = [Turn(at, at, 0, 4, draw(floats), "stop") for at in range(len(samples))]
    if draw(st.integers(0, 5)) == 0:
        turns.append(Turn(draw(ints), draw(ints), draw(ints), draw(ints), draw(floats), "stop"))
    return msgspec.structs.replace(trajectory, turns=turns, samples=samples)


@settings(max_examples=80)
@given(st.lists(members(0), max_size=4))
def test_what_is_checked_together_is_judged_as_it_is_alone(some: list[Trajectory]) -> None:
    alone = {at: str(error) for at, t in enumerate(some) for error in find_invalid([t], check_trajectories).values()}
    assert {at: str(error) for at, error in find_invalid(some, check_trajectories).items()} == alone


@settings(max_examples=100)
@given(st.data(), st.sampled_from(ESTIMATORS), st.sampled_from(["turn", "trajectory", "token"]))
@pytest.mark.long
def test_what_is_trainable_is_prepared_with_finite_advantages_and_the_rest_is_named(
    data: Any, advantage: str, credit: str
) -> None:
    group = [data.draw(members(index)) for index in range(4)]
    config = config_from_dict({"algorithm": {"advantage": advantage, "credit": credit}})
    bad = set()
    for trajectory in group:
        try:
            check_trajectory(trajectory)
        except InvalidTrajectory:
            bad.add(trajectory.trajectory_id)
    with np.errstate(all="raise", under="ignore"):
        prepared = prepare_step([group], config)
    named = {u.trajectory.trajectory_id for u in prepared.rejected}
    if advantage == "maxrl" and any("is for rewards >= 0" in u.reason for u in prepared.rejected):
        bad = {t.trajectory_id for t in group}  # its estimator takes no group with a negative score
    assert named == bad
    for sample in prepared.samples:
        assert np.isfinite(sample.table["advantages"]).all()
        assert np.isfinite(np.square(sample.table["advantages"])).all()
    assert all(np.isfinite(value) for value in prepared.metrics.values())


class WrongOnce(ScriptedEngine):
    """An engine whose first answer has a log-prob that no distribution gives."""

    async def generate(self, request: GenerationRequest) -> Generation:
        answer = await super().generate(request)
        if request is self.requests[0]:
            answer.logprobs[0] = 1e30
        return answer


class LeaseOnce(StandIn):
    """A conductor with one group to play. It keeps what a generator reports."""

    def __init__(self, lease: GroupLease):
        self.leases, self.ended = [lease], list[EpisodeEnd]()

    async def lease_groups(self, message: bytes) -> bytes:
        call = msgspec.msgpack.decode(message, type=LeaseCall)
        self.ended += call.ended
        leases, self.leases = self.leases, []
        return msgspec.msgpack.encode(LeaseAnswer(leases, more=False))


async def test_a_generators_own_mistake_is_named_there_and_its_group_is_played_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr("r3async.actors.generator.prepare_process", lambda *args: None)
    config = config_to_dict(load_config("quickstart", ["schedule.group_size=2"]))
    chat, conductor = renderer(), LeaseOnce(GroupLease(0, training_seed(0, 0), (0, 1)))
    setup = RunSetup("run", config, str(tmp_path), Lineage(3))
    actor = GeneratorOnEngine(WrongOnce([[65, chat.eos_token_id]]), chat, REAL_WORLD, setup, "g0", "model")
    inbox = Inbox()
    async with receiving(inbox) as (_, endpoint):
        await actor.start()
        await actor.connect_to_learner(endpoint, "shared_memory", CLIENT_KEYS)
        await actor.install_version(TransferOffer(WeightManifest(3, "", {}, 0, lineage=3), ()))
        await asyncio.wait_for(actor.run(conductor), LIMIT)
        await actor.stop()
    sent = {t.trajectory_id: (len(t.turns) > 0, t.lineage) for t in inbox.trajectories}
    assert sent == {"g00000000e0000": (False, 3), "g00000000e0001": (True, 3)}
    (failure,) = (end for end in conductor.ended if end.failed_by == "learner")
    reason = "g0 made it wrong: sample g00000000e0000s0 trains a token of log-prob 1e+30"
    assert reason in failure.error
    text = (tmp_path / "events.jsonl").read_text()
    assert "trajectory_rejected" in text
    assert reason in text


def test_the_quarantine_stays_below_its_limit_and_names_all(tmp_path):
    reported: list[dict[str, Any]] = []
    one = sum(memoryview(f).nbytes for f in encode_trajectory(make_trajectory())) + 400
    quarantine = TrajectoryQuarantine(
        tmp_path / "q", 3 * one, lambda event, **facts: reported.append({"event": event, **facts})
    )
    for index in range(8):
        quarantine.add_trajectory(make_trajectory(index), f"reason {index}")
    assert {t["event"] for t in reported} == {"trajectory_quarantined"}
    assert [t["reason"] for t in reported] == [f"reason {i}" for i in range(8)]
    left = sorted(p.name for p in (tmp_path / "q").iterdir())
    assert 2 <= len(left) < 8
    assert left[-1].startswith("000000007-")
    assert sum(p.stat().st_size for p in (tmp_path / "q").iterdir()) <= 3 * one
    TrajectoryQuarantine(tmp_path / "none", 10, lambda event, **facts: reported.append(facts)).add_trajectory(
        make_trajectory(9), "small"
    )
    assert reported[-1]["kept_as"] == ""
    assert not (tmp_path / "none").exists()
