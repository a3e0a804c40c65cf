"""The next step is prepared while this one trains: the same groups, and bit by bit the same training, as without."""

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.actors.rank_actor import LocalRank
from r3async.actors.trajectory_inbox import NextStep, TrajectoryInbox
from r3async.config import config_from_dict
from r3async.data.tokens import Trajectory
from r3async.learner.micro_batch_plan import CostModel
from r3async.learner.trainer import StepOutcome, Trainer
from r3async.record.trained_trajectories import checksum_tokens
from r3async.schedule.groups import GroupBuffer
from r3async.tools.replay import NullReporter
from r3async.world.real import REAL_WORLD
from tests.helpers import checkpoint as hc
from tests.helpers import models as hm
from tests.unit.test_buffer import make_trajectory

LIMIT = 30.0


class Received(TrajectoryInbox):
    """Groups of one trajectory in a buffer, without a socket."""

    def __init__(self, window: int, prompts_per_step: int, tokens: int = 0):
        schedule = {"prompts_per_step": prompts_per_step, "window": window, "tokens_per_step": tokens}
        self._config = config_from_dict({"schedule": {"group_size": 2, "max_staleness": 3, **schedule}})
        self.buffer, self._slot_count, self._arrival = GroupBuffer(1, window), 4 * prompts_per_step, asyncio.Event()

    def receive(self, trajectory: Trajectory) -> None:
        self.buffer.add(trajectory, 1)
        self.wake_waiters()


class AtOnce:
    """A lane that notes the groups of each call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    async def run(self, function, groups):
        self.calls.append([g[0].group_index for g in groups])
        return function(groups)

    async def close(self):
        pass


async def steps(arrivals: list[list[int]], window: int, tokens: int, ahead: bool) -> tuple[list[list[int]], AtOnce]:
    """Of a step's time each: what arrived before it began, and while it trained. Returns the groups of each step."""
    reception, lane, never = Received(window, 2, tokens), AtOnce(), asyncio.Event()
    guess = NextStep(reception, lane, lambda groups: [t.trajectory_id for group in groups for t in group])
    trained: list[list[int]] = []
    for before, meanwhile in zip(arrivals[::2], arrivals[1::2], strict=False):
        for group in before:
            reception.receive(make_trajectory(group))
        indices = reception.buffer.choose_groups(2, 2 if not tokens else 4, tokens)
        if not indices:
            indices = reception.buffer.choose_groups(1, 1, 0)
        if not indices:
            continue
        groups = reception.buffer.take_groups(indices)
        assert await guess.get_result(indices, groups) == [f"g{i}e0" for i in indices]
        trained.append(indices)
        looking = asyncio.create_task(guess.prefetch((0, 0), never)) if ahead else None
        await asyncio.sleep(0)
        for group in meanwhile:
            reception.receive(make_trajectory(group))
        for _ in range(4):
            await asyncio.sleep(0)
        if looking is not None:
            looking.cancel()
    return trained, lane


@settings(max_examples=60)
@given(
    late=st.lists(st.integers(0, 4), min_size=16, max_size=16),
    cuts=st.lists(st.integers(0, 16), min_size=9, max_size=9).map(sorted),
    window=st.integers(1, 4),
    tokens=st.sampled_from([0, 5]),
)
def test_the_groups_of_each_step_are_those_of_a_learner_that_looks_at_none_ahead(late, cuts, window, tokens):
    """`late`: how many groups may overtake each."""
    order = sorted(range(16), key=lambda group: (group + late[group], group))
    arrivals = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 16], strict=True)]
    with_guesses, _ = asyncio.run(steps(arrivals, window, tokens, ahead=True))
    without, plain = asyncio.run(steps(arrivals, window, tokens, ahead=False))
    assert with_guesses == without == plain.calls


def test_a_guess_that_comes_true_is_made_once_and_one_that_does_not_is_made_again():
    trained, lane = asyncio.run(steps([[0, 1, 2, 3], [], [], []], 1, 0, ahead=True))
    assert trained == lane.calls == [[0, 1], [2, 3]]
    trained, lane = asyncio.run(steps([[0, 1, 3, 4], [], [2], []], 3, 0, ahead=True))
    assert trained == [[0, 1], [2, 3]]
    assert lane.calls == [[0, 1], [3, 4], [2, 3]]


async def test_what_was_prepared_ahead_is_not_taken():
    reception, lane = Received(1, 1), AtOnce()
    guess = NextStep(reception, lane, len)
    reception.receive(make_trajectory(0))
    await asyncio.wait_for(guess.prefetch((0, 0), asyncio.Event()), LIMIT)
    await asyncio.sleep(0)
    assert lane.calls == [[0]]
    assert len(reception.buffer.consumed) == 0
    assert reception.buffer.choose_groups(1, 1, 0) == [0]


async def test_a_defect_found_ahead_is_raised_in_its_own_step():
    def broken(groups):
        raise ValueError("cannot be packed")

    reception = Received(1, 1)
    guess = NextStep(reception, REAL_WORLD.threads.new_worker("packer"), broken)
    reception.receive(make_trajectory(0))
    await asyncio.wait_for(guess.prefetch((0, 0), asyncio.Event()), LIMIT)
    groups = reception.buffer.take_groups([0])
    with pytest.raises(ValueError, match="cannot be packed"):
        await guess.get_result([0], groups)


class NoTrace:
    def should_trace(self, samples):
        return False

    def write_trace(self, step, samples, result):
        pass


def played(step: int) -> list[list]:
    """Two groups of four episodes with rewards that differ; in every second step one episode cannot be trained."""
    groups = [[make_trajectory(2 * step + g, e, reward=float((e + step) % 3)) for e in range(4)] for g in range(2)]
    if step % 2:
        bad = groups[0][1].samples[0]
        bad.table = bad.table.with_columns(rewards=np.full(4, np.inf, np.float32))
    return groups


def stand_in(t):
    return make_trajectory(t.group_index, t.episode_index, loss_mask=np.zeros(4, bool), turn=np.full(4, -1, np.int32))


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_steps_prepared_while_others_train_are_bit_by_bit_the_same(learners, tmp_path, backend):
    path, config = hm.make_hf_model(tmp_path, num_hidden_layers=2), hc.settings(backend)

    def run(beside: bool) -> list[StepOutcome]:
        rank = LocalRank(config, learners(config, path))
        trainer = Trainer(config, CostModel(), rank, NoTrace(), NullReporter(), stand_in)
        done, ready = [], {0: trainer.prepare_step(played(0))}

        def prepare(step: int) -> None:
            ready[step] = trainer.prepare_step(played(step))

        for step in range(5):
            thread = threading.Thread(target=prepare, args=[step + 1])
            if beside:
                thread.start()
            done.append(trainer.update_weights(step + 1, step, ready.pop(step)))
            if not beside:
                thread.start()
            thread.join(LIMIT)
        return done

    apart, beside = run(beside=False), run(beside=True)
    assert [d.metrics for d in beside] == [d.metrics for d in apart]
    assert any(d.metrics["optimizer/updates"] for d in apart)
    assert [[u.trajectory.trajectory_id for u in d.rejected] for d in beside] == [[], ["g2e1"], [], ["g6e1"], []]
    ids = [[[checksum_tokens(t) for t in group] for group in d.groups] for d in beside]
    assert ids == [[[checksum_tokens(t) for t in group] for group in d.groups] for d in apart]
