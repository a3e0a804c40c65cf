"""Routes of rows that branch off, with weights that change between turns and within them, position by position."""

import itertools
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data.model_shape import RoutingShape
from r3async.data.versions import VersionSpan
from r3async.envs import Message
from r3async.rollout.engine import Generation, GenerationRequest
from r3async.rollout.samples import EpisodeSamples
from tests.helpers.templates import QWEN3, renderer
from tests.unit.test_rows import DRAWN, Told, episode_of, play

SHAPE = RoutingShape(layers=2, top_k=2, num_experts=300)


def route(salt: int, version: int, prefix: list[int]) -> np.ndarray:
    """`[layers, top_k]` of the last token of `prefix`, fed by `version` onto keys and values that began under `salt`."""
    seed = zlib.crc32(np.asarray([salt, version, *prefix], np.int64).tobytes())
    first = (seed + 7 * np.arange(SHAPE.layers)) % SHAPE.num_experts
    return np.stack([first, (first + 1 + seed % 200) % SHAPE.num_experts], -1).astype(np.uint16)


def answered(sampled: list[int], spans: list[VersionSpan], rows: np.ndarray | None, first: int) -> Generation:
    logprobs = np.full(len(sampled), -0.5, np.float32)
    return Generation(np.asarray(sampled, np.int32), logprobs, spans, rows, first, "stop")


class Updating:
    """An engine whose weights change when a call enters (`before` versions), and `within` an answer after so many tokens."""

    routing = SHAPE

    def __init__(self, answers, plan):
        self.version, self.answers, self.plan = 0, answers, plan
        self.calls: list[tuple[GenerationRequest, Generation]] = []
        self.passes: list[np.ndarray] = []
        """What each call's own forward passes chose, `[P + n - 1, layers, top_k]`, whatever of it was asked for."""

    async def generate(self, request: GenerationRequest) -> Generation:
        before, within = self.plan[len(self.calls) % len(self.plan)]
        sampled = self.answers[len(self.calls) % len(self.answers)][: request.max_tokens]
        self.version += before  # after the prompt was recorded as begun: only now does it enter
        salt, n, prompt = self.version, len(sampled), request.prompt_ids.tolist()
        spans = [VersionSpan(salt, 0, n)]
        if 0 < within < n:
            self.version += 1
            spans = [VersionSpan(salt, 0, within), VersionSpan(self.version, within, n)]
        seen, known = [*prompt, *sampled], len(prompt) + spans[0].stop - 1
        rows = [route(salt, salt if i < known else self.version, seen[: i + 1]) for i in range(len(seen) - 1)]
        self.passes.append(np.asarray(rows))
        first = request.resolve_routes_from(salt)
        out = answered(sampled, spans, np.asarray(rows)[first:], first)
        self.calls.append((request, out))
        return out


def check(trajectory, engine: Updating) -> None:
    """A position's row is that of the first call *of its own row of training* which fed it, and nobody else's."""
    expected = {s.sample_id: np.zeros((0, SHAPE.layers, SHAPE.top_k), np.uint16) for s in trajectory.samples}
    for turn, chosen in zip(trajectory.turns, engine.passes, strict=True):
        name = trajectory.samples[turn.sample].sample_id
        expected[name] = np.concatenate([expected[name], chosen[len(expected[name]) :]])
    for sample in trajectory.samples:
        recorded = sample.table["routing_recorded"]
        assert recorded.tolist() == [True] * (len(recorded) - 1) + [False]
        assert np.array_equal(sample.table["routed_experts"][:-1], expected[sample.sample_id])


plans = st.lists(st.tuples(st.sampled_from([0, 0, 1, 2]), st.integers(0, 4)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(*DRAWN, plans)
def test_a_row_that_branches_has_the_routes_of_its_own_call_whatever_changed_since(
    written, spoken, history, mode, plan
):
    chat, tokens, env, limits = episode_of(written, spoken, history, mode)
    engine = Updating(tokens, plan)
    check(play(env, engine, chat, limits), engine)


def played(plan, turns=4) -> Updating:
    """Thoughts are stripped, so every turn is a row of its own."""
    chat = renderer(QWEN3)
    engine = Updating([[*chat.encode("<think>\nhm\n</think>\n\nfive"), chat.eos_token_id]], plan)
    trajectory = play(Told([("say", [Message("user", f"{i}?")]) for i in range(turns - 1)]), engine, chat)
    assert len(trajectory.samples) == turns
    check(trajectory, engine)
    return engine


def test_under_the_same_weights_a_branch_moves_only_rows_that_are_not_known():
    first = [out.routes_from for _, out in played([(0, 0)]).calls]
    assert first[0] == 0
    assert all(b > a for a, b in itertools.pairwise(first))


def test_after_an_update_a_branch_moves_all_its_rows_and_the_next_one_shares_those():
    calls = played([(0, 0), (0, 0), (1, 0), (0, 0)]).calls
    assert [out.routes_from > 0 for _, out in calls] == [False, True, False, True]


def test_an_update_within_an_answer_is_one_between_it_and_its_branch():
    """Keys and values that began under older weights have another salt: nothing of them is found again."""
    assert [out.routes_from > 0 for _, out in played([(0, 3), (0, 0)]).calls][:2] == [False, False]


def generation(prompt: list[int], sampled: list[int], first: int, version: int, rows: bool = True) -> Generation:
    seen = [*prompt, *sampled]
    chosen = np.asarray([route(version, version, seen[: i + 1]) for i in range(len(seen) - 1)])[first:]
    return answered(sampled, [VersionSpan(version, 0, len(sampled))], chosen if rows else None, first)


def test_an_engine_that_keeps_rows_back_for_other_weights_leaves_them_unrecorded():
    """It was told for which version the rows are known, and did not mind: no row of older weights stands in for them."""
    rows = EpisodeSamples(SHAPE, "stepwise")
    rows.finish_call(rows.start_call([1, 2, 3]), generation([1, 2, 3], [4], 0, version=0))
    call = rows.start_call([1, 2, 3, 5])
    assert (call.routes_from, call.routes_version) == (3, 0)
    rows.finish_call(call, generation([1, 2, 3, 5], [6], 3, version=1))
    samples, _ = rows.build_samples("g", 1.0)
    assert samples[1].table["routing_recorded"].tolist() == [False, False, False, True, False]


def test_what_its_own_call_returned_goes_before_what_is_shared():
    rows = EpisodeSamples(SHAPE, "stepwise")
    rows.finish_call(rows.start_call([1, 2, 3]), generation([1, 2, 3], [4], 0, version=0))
    again = generation([1, 2, 3], [4], 0, version=0)
    other = (again.routed_experts + 1) % SHAPE.num_experts  # the same weights in another batch
    call = rows.start_call([1, 2, 3])
    rows.finish_call(call, Generation(again.token_ids, again.logprobs, again.version_spans, other, 0, "stop"))
    samples, _ = rows.build_samples("g", 1.0)
    assert np.array_equal(samples[1].table["routed_experts"][:3], other)


def test_positions_that_came_without_a_row_are_asked_for_by_the_branch():
    rows = EpisodeSamples(SHAPE, "stepwise")
    rows.finish_call(rows.start_call([1, 2, 3]), generation([1, 2, 3], [4], 0, version=0, rows=False))
    assert rows.start_call([1, 2, 3, 4]).routes_from == 0


def test_a_branch_that_failed_is_asked_again_for_rows_of_the_weights_that_answer_it():
    """Its first try was under the weights of the row it shares, its second under newer ones."""
    rows = EpisodeSamples(SHAPE, "stepwise")
    rows.finish_call(rows.start_call([1, 2, 3]), generation([1, 2, 3], [4], 0, version=0))
    rows.cancel_call(rows.start_call([1, 2, 3, 5]))
    call = rows.start_call([1, 2, 3, 5])
    assert (call.routes_from, call.routes_version) == (3, 0)
    request = GenerationRequest("r", np.asarray([1, 2, 3, 5], np.int32), 4, routes_from=3, routes_version=0)
    assert [request.resolve_routes_from(version) for version in (0, 1)] == [3, 0]
    own = generation([1, 2, 3, 5], [6], 0, version=1)
    rows.finish_call(call, own)
    samples, _ = rows.build_samples("g", 1.0)
    assert np.array_equal(samples[1].table["routed_experts"][:4], own.routed_experts)


def test_a_continued_row_keeps_its_rows_whatever_version_asks():
    rows = EpisodeSamples(SHAPE)
    rows.finish_call(rows.start_call([1, 2, 3]), generation([1, 2, 3], [4], 0, version=0))
    call = rows.start_call([1, 2, 3, 4, 5])
    assert (call.routes_from, call.routes_version) == (3, None)
