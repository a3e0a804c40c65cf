"""Routes of whole episodes, against a reference that is kept position by position."""

import asyncio
from dataclasses import dataclass, field

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from r3async.config import EpisodeConfig
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import TokenTable
from r3async.data.versions import VersionSpan
from r3async.envs import Message, StepResult
from r3async.rollout.engine import Generation, GenerationRequest
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.rollout.play_context import PlayContext
from r3async.rollout.samples import SampleBuilder
from r3async.rollout.scripted import SCRIPTED_ROUTING
from tests.helpers.serving import ready, renderer

SHAPE = RoutingShape(layers=2, top_k=2, num_experts=300)


@dataclass(frozen=True)
class Call:
    """How an engine answers one call."""

    sampled: int = 3
    known_too: bool = False
    """It returns rows from position 0, whatever it was asked for."""
    missing: int = 0
    """Rows that an abort kept back at the end."""
    returned: str = "rows"
    """`rows`, `none` (no array) or `empty` (an array of length 0 and of some dtype)."""
    dtype: str = "uint16"
    narrow: bool = False
    """All ids of this call fit uint8."""


calls = st.builds(
    Call,
    sampled=st.integers(0, 5),
    known_too=st.booleans(),
    missing=st.sampled_from([0, 0, 0, 1, 2, 7]),
    returned=st.sampled_from(["rows"] * 6 + ["none", "empty"]),
    dtype=st.sampled_from(["uint16", "int32", "int64"]),
    narrow=st.booleans(),
)


def answer(call: Call, prompt: int, routes_from: int, seed: int) -> Generation:
    """Every call chooses other experts, so that a prefill always disagrees with what is known."""
    rng = np.random.default_rng(seed)
    first = 0 if call.known_too else routes_from
    fed = prompt + call.sampled - 1 if call.sampled else prompt
    count = max(0, fed - first - call.missing)
    high = 200 if call.narrow else SHAPE.num_experts
    picks = [rng.permutation(high)[: SHAPE.top_k] for _ in range(count * SHAPE.layers)]
    rows = np.asarray(picks).reshape(count, SHAPE.layers, SHAPE.top_k)
    dtype = "uint8" if call.narrow and call.dtype == "uint16" else call.dtype
    return Generation(
        token_ids=rng.integers(0, 250, call.sampled).astype(np.int32),
        logprobs=-rng.random(call.sampled, np.float32) - 0.1,
        version_spans=[VersionSpan(seed, 0, call.sampled)] if call.sampled else [],
        routed_experts={"rows": rows.astype(dtype), "none": None, "empty": np.empty((0, 1), np.float64)}[call.returned],
        routes_from=first,
        stop_reason="abort" if call.missing or not call.sampled else "length",
    )


@dataclass
class Reference:
    """One sample, position by position: what the first of its calls that fed a position recorded of it, if anything. Every
    call has weights of its own, so a branch has nothing of the row that it left."""

    tokens: list[int] = field(default_factory=list)
    owned: dict[int, np.ndarray | None] = field(default_factory=dict)
    sampled: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    """Position: turn, log-prob, version."""

    def take(self, turn: int, generation: Generation) -> None:
        prompt, n = len(self.tokens), len(generation.token_ids)
        rows = generation.routed_experts if generation.routed_experts is not None else []
        by_position = {generation.routes_from + i: row for i, row in enumerate(rows)}
        for position in range(prompt + n - 1) if n else ():  # a call that sampled nothing owns nothing
            self.owned.setdefault(position, by_position.get(position))
        for i, token in enumerate(generation.token_ids.tolist()):
            self.tokens.append(token)
            self.sampled[prompt + i] = turn, float(generation.logprobs[i]), generation.version_spans[0].version

    def branch(self, length: int) -> "Reference":
        return Reference(self.tokens[:length])

    def check(self, table: TokenTable) -> None:
        assert table["token_ids"].tolist() == self.tokens
        assert np.flatnonzero(table["loss_mask"]).tolist() == sorted(self.sampled)
        for position, (turn, logprob, version) in self.sampled.items():
            assert table["turn"][position] == turn
            assert table["rollout_logprobs"][position] == np.float32(logprob)
            assert table["policy_version"][position] == version
        unsampled = ~table["loss_mask"]
        assert (table["policy_version"][unsampled] == -1).all()
        assert table["routed_experts"].dtype == np.uint16
        for position, row in enumerate(table["routed_experts"]):
            expected = self.owned.get(position)
            assert table["routing_recorded"][position] == (expected is not None)
            assert (row == (np.arange(SHAPE.top_k) if expected is None else expected)).all()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("observe"), st.integers(1, 6)),  # a prompt, an observation, an injected end of sequence
        st.tuples(st.just("answer"), calls),
        st.tuples(st.just("answer"), calls),
        st.tuples(st.just("branch"), st.floats(0, 1)),
    ),
    max_size=12,
)


@given(steps)
def test_rows_equal_a_position_by_position_reference(history):
    builders, references = [SampleBuilder(SHAPE)], [Reference()]
    for seed, (what, value) in enumerate([("observe", 4), *history]):
        builder, reference = builders[-1], references[-1]
        if what == "observe":
            builder.append_context([seed] * value)
            reference.tokens += [seed] * value
        elif what == "answer":
            generation = answer(value, len(builder), builder.routes_from, seed)
            builder.append_answer(seed, generation)
            reference.take(seed, generation)
        else:  # The row that is left behind stays as it is, whatever the new one does.
            length = round(value * len(builder))
            builders.append(builder.branch_at(length))
            references.append(reference.branch(length))
        if len(builders) > 1 and seed % 3 == 0:  # Several rows grow in turns.
            builders.insert(0, builders.pop())
            references.insert(0, references.pop())
    for builder, reference in zip(builders, references, strict=True):
        if reference.sampled:  # a prompt that never got its answer is no row of training
            reference.check(builder.build_table())


class Told:
    """An environment of as many turns as there are lengths: how long each observation is."""

    def __init__(self, lengths):
        self.lengths = list(lengths)

    async def reset(self, task_seed):
        return [Message("user", "go")]

    async def step(self, action):
        return StepResult(0.5, [Message("user", "x" * self.lengths.pop(0))], done=not self.lengths)


class Recorded:
    """An engine that answers as it is told and keeps the reference itself, from what it was fed."""

    version, routing = 0, SHAPE

    def __init__(self, told):
        self.told, self.reference, self.requests = list(told), Reference(), []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        assert request.prompt_ids[: len(self.reference.tokens)].tolist() == self.reference.tokens
        assert request.routes_from == max(self.reference.owned, default=-1) + 1  # asked once for each position
        self.reference.tokens = request.prompt_ids.tolist()
        turn = len(self.requests) - 1
        generation = answer(self.told[turn], len(request.prompt_ids), request.routes_from, seed=turn)
        generation = msgspec.structs.replace(generation, stop_reason="length")
        self.reference.take(turn, generation)
        return generation


turns = st.lists(st.tuples(st.integers(0, 9), calls.filter(lambda call: call.sampled)), min_size=1, max_size=6)


@given(turns)
def test_whole_episodes_equal_a_position_by_position_reference(told):
    engine = Recorded([call for _, call in told])
    limits = EpisodeConfig(max_turns=9, max_new_tokens=8, max_prompt_tokens=1000, max_total_tokens=1024)
    chat = renderer()
    trajectory = asyncio.run(
        EpisodePlayer(
            EpisodeTask(0, 0, 0), Told([length for length, _ in told]), limits, PlayContext(engine, chat)
        ).play_episode()
    )
    assert len(trajectory.turns) == len(engine.requests) == len(told)
    engine.reference.check(trajectory.samples[0].table)


async def test_a_long_episode_moves_and_holds_each_row_once():
    """300 turns: all rows that the engine returned, and all that the builder holds, are the positions that were fed."""
    engine = await ready([[7] * 5])
    builder, moved, returned = SampleBuilder(SCRIPTED_ROUTING), 0, []
    for turn in range(300):
        builder.append_context([3] * 4)
        prompt = np.asarray(builder.token_ids, np.int32)
        request = GenerationRequest(f"t{turn}", prompt, 5, routes_from=builder.routes_from)
        generation = await engine.generate(request)
        builder.append_answer(turn, generation)
        moved += len(generation.routed_experts)
        returned.append(generation.routed_experts)
    assert moved == len(builder) - 1
    for rows in returned:
        rows[:] = rows[..., ::-1].copy()  # so all that is a view of it changes
    table = builder.build_table()
    np.testing.assert_array_equal(table["routed_experts"][:-1], np.concatenate(returned))
    recorded = table["routing_recorded"]
    assert recorded[:-1].all()
    assert not recorded[-1]
