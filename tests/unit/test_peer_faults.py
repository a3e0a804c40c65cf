"""Faults that other frameworks had from the engine to the routers. Each test is named after what must not happen again.

Whatever the engine returned goes the whole way: builder, trajectory, wire, validation on arrival, packed micro-batches.
"""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r3async.config.generator import GeneratorConfig
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import SCHEMA, Column, Sample, TokenSchema, TokenTable, Trajectory, Turn
from r3async.data.versions import VersionSpan
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.micro_batches import MicroBatch, collate_samples, make_padding_batch, pack_samples
from r3async.learner.replay import RoutingReplay
from r3async.learner.train_step import agree_on_counts, forward_backward
from r3async.rollout.engine import Generation
from r3async.rollout.samples import SampleBuilder
from r3async.rollout.vllm.engine import VllmEngine
from r3async.rollout.vllm.running_requests import RunningRequest
from r3async.schedule.validation import validate_trajectories
from tests.helpers import models as hm
from tests.helpers.engine import prompt, request
from tests.helpers.learner import LENGTHS, gradients, logits, replace_columns
from tests.helpers.parity import config
from tests.helpers.wire import make_table, make_trajectory

SHAPE = RoutingShape(layers=2, top_k=2, num_experts=300)


def chosen(count: int, seed: int, high: int = SHAPE.num_experts, shape: RoutingShape = SHAPE) -> np.ndarray:
    """Distinct experts, never those of an unrecorded row."""
    chance = np.random.default_rng(seed)
    picks = [2 + chance.permutation(high - 2)[: shape.top_k] for _ in range(count * shape.layers)]
    return np.asarray(picks, np.int64).reshape(count, shape.layers, shape.top_k)


def generation(sampled: int, rows: np.ndarray | None, routes_from: int = 0, stop_reason: str = "stop") -> Generation:
    return Generation(
        token_ids=np.arange(1, sampled + 1, dtype=np.int32),
        logprobs=np.full(sampled, -0.5, np.float32),
        version_spans=[VersionSpan(0, 0, sampled)] if sampled else [],
        routed_experts=rows,
        routes_from=routes_from,
        stop_reason=stop_reason,
    )


def one_turn(prompt_tokens: int, answer: Generation, shape: RoutingShape = SHAPE) -> TokenTable:
    builder = SampleBuilder(shape)
    builder.append_context([9] * prompt_tokens)
    builder.append_answer(0, answer)
    return builder.build_table()


def turns_of(table: TokenTable) -> list[Turn]:
    """Each turn that the tokens name, from its first to its last sampled token."""
    places = {int(turn): np.flatnonzero(table["turn"] == turn) for turn in np.unique(table["turn"]) if turn >= 0}
    return [Turn(turn, 0, int(at[0]), int(at[-1]) + 1, 0.5, "eos") for turn, at in places.items()]


def to_the_batch(
    tables: list[TokenTable], max_tokens: int = 10_000, shape: RoutingShape = SHAPE, schema: TokenSchema = SCHEMA
) -> list[MicroBatch]:
    """Through a trajectory each, over the wire, validated and packed."""
    samples = []
    for i, table in enumerate(tables):
        sent = Trajectory(f"t{i}", 0, i, 0, "g", "turns", turns_of(table), [Sample(f"s{i}", table)])
        frames = [bytes(frame) for frame in encode_trajectory(sent, schema)]
        received = decode_trajectory(frames, schema)
        validate_trajectories([received], vocab_size=300, learner_version=0, max_tokens=10_000, routing=shape)
        samples += received.samples
    return pack_samples(samples, max_tokens)


def of_sample(batches: list[MicroBatch], name: str) -> TokenTable:
    for batch in batches:
        if name in batch.sample_ids:
            index = batch.sample_ids.index(name)
            return batch.table.slice_rows(*batch.cu_seqlens[index : index + 2])
    raise AssertionError(f"sample {name} is in no micro-batch")


def check(table: TokenTable, expected: dict[int, np.ndarray]) -> None:
    """Exactly these rows are recorded; the others are marked and name distinct experts."""
    assert np.flatnonzero(table["routing_recorded"]).tolist() == sorted(expected)
    for position, row in enumerate(table["routed_experts"]):
        assert row.tolist() == (expected[position].tolist() if position in expected else [[0, 1]] * SHAPE.layers)


@pytest.mark.parametrize("nothing", [None, np.empty((0, 2, 2), np.uint8), np.empty(0, np.float64)])
@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_response_without_routes_does_not_shift_those_of_the_others(without, nothing):
    rows = [chosen(4, seed=i) for i in range(3)]
    returned = [nothing if i == without else rows[i] for i in range(3)]
    batches = to_the_batch([one_turn(2, generation(3, r)) for r in returned])
    for i in range(3):
        check(of_sample(batches, f"s{i}"), {} if i == without else dict(enumerate(rows[i])))
    builder = SampleBuilder(SHAPE)  # and the same for the turns of one episode
    expected: dict[int, np.ndarray] = {}
    for turn in range(3):
        builder.append_context([9] * 2)
        first = builder.routes_from
        assert first == (len(builder) - 3 if turn else 0)  # What was fed without a row is not asked for again.
        fresh = chosen(len(builder) + 3 - 1 - first, seed=10 + turn)
        builder.append_answer(turn, generation(3, nothing if turn == without else fresh, first))
        if turn != without:
            expected.update(enumerate(fresh, first))
    check(of_sample(to_the_batch([builder.build_table()]), "s0"), expected)


@pytest.mark.parametrize("from_the_start", [False, True])
def test_turn_two_does_not_overwrite_the_routes_of_turn_one(from_the_start):
    """The last token of turn one, which only turn two feeds, is turn two's; nothing else before it is."""
    first, second = chosen(4, seed=1), chosen(9, seed=2)
    builder = SampleBuilder(SHAPE)
    builder.append_context([9, 9])
    builder.append_answer(0, generation(3, first))
    builder.append_context([8, 8])
    start = 0 if from_the_start else builder.routes_from
    builder.append_answer(1, generation(3, second[start:], start))
    table = of_sample(to_the_batch([builder.build_table()]), "s0")
    check(table, dict(enumerate(np.concatenate([first, second[4:]]))))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("where", ["turns", "samples"])
def test_ids_above_255_do_not_wrap(where, order):
    """One part whose ids all fit uint8 and comes in it, one in uint16: as turns of one sample, and as samples of one batch."""
    low = chosen(3, seed=1, high=200).astype(np.uint8)
    high = chosen(3, seed=2).astype(np.uint16)
    high[:, 0] = [256, 299]
    parts = [(low, high)[i] for i in order]
    if where == "turns":
        builder = SampleBuilder(SHAPE)
        for turn, part in enumerate(parts):
            builder.append_context([9] * (2 if turn == 0 else 1))
            builder.append_answer(turn, generation(2, part, builder.routes_from))
        table = of_sample(to_the_batch([builder.build_table()]), "s0")
        check(table, dict(enumerate(np.concatenate([p.astype(int) for p in parts]))))
    else:
        tables = [one_turn(2, generation(2, part)) for part in parts]
        narrow = order.index(0)  # A generator that keeps the narrow dtype is as good.
        tables[narrow] = tables[narrow].with_columns(routed_experts=tables[narrow]["routed_experts"].astype(np.uint8))
        batches = to_the_batch(tables)
        assert batches[0].table["routed_experts"].dtype == np.uint16
        for i, part in enumerate(parts):
            check(of_sample(batches, f"s{i}"), dict(enumerate(part.astype(int))))


ADDED = SCHEMA.with_column(Column("made_up", ("int16", "int32"), 7, inner_dims=("width",)))


@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1), st.booleans()), min_size=1, max_size=5),
    st.sampled_from([SCHEMA, ADDED]),
    st.integers(0, 4),
)
def test_no_field_is_lost_in_slice_merge_split_pad_pack_or_on_the_wire(pieces, schema, padding):
    """Every declared column, one that is declared here among them, has every token's value after each of them."""
    tables = [make_table(seed, length, schema=schema, wide=wide) for seed, (length, _, wide) in enumerate(pieces)]
    halves = [
        (table.slice_rows(0, cut), table.slice_rows(cut, len(table)))
        for table, (length, part, _) in zip(tables, pieces, strict=True)
        for cut in [round(part * length)]
    ]
    merged = TokenTable.concat([half for pair in halves for half in pair])
    padded = [TokenTable.concat(pair).pad_to(len(pair[0]) + len(pair[1]) + padding) for pair in halves]
    sent = make_trajectory(tables=padded)
    received = decode_trajectory([bytes(f) for f in encode_trajectory(sent, schema)], schema)
    batches = pack_samples([msgspec.structs.replace(s, sample_id=f"s{i}") for i, s in enumerate(received.samples)], 16)
    at = 0
    for i, table in enumerate(tables):
        packed = of_sample(batches, f"s{i}")
        assert list(packed) == list(merged) == list(schema.columns)
        for name, column in schema.columns.items():
            if column.holds_sets:
                assert merged[name][at : at + len(table)] == table[name] == packed[name][: len(table)]
                assert not packed[name][len(table) :].recorded_mask.any()
                continue
            assert np.array_equal(merged[name][at : at + len(table)], table[name]), name
            assert np.array_equal(packed[name][: len(table)], table[name]), name
            fill = np.arange(table[name].shape[-1]) if column.fill == "arange" else column.fill
            assert (packed[name][len(table) :] == fill).all(), name
        at += len(table)


@pytest.mark.parametrize(
    ("finish_reason", "returned", "kept"),
    [
        ("length", None, 0),
        ("length", 0, 0),
        ("length", 5, 0),  # It has fed 7 positions: which two are missing is not known.
        ("length", 9, 0),
        ("length", 7, 7),
        ("abort", None, 0),
        ("abort", 5, 5),  # Rows come in order; the last ones had not come.
    ],
)
async def test_a_preempted_request_without_routes_is_unrecorded_and_not_expert_zero(
    tiny_model, finish_reason, returned, kept
):
    engine = VllmEngine(str(tiny_model), GeneratorConfig(dtype="float32", concurrency=1), max_model_len=64)
    assert engine.routing is not None
    shape = RoutingShape(layers=3, top_k=2, num_experts=8)  # vLLM returns rows of all layers, the second one is dense
    layers = chosen(9, seed=3, high=8, shape=shape).astype(np.uint8)
    rows = None if returned is None else layers[:returned]
    running = RunningRequest("r", 0)
    running.tokens, running.finish_reason = [1, 2, 3, 4], finish_reason
    running.routes = [] if rows is None else [rows]
    routes, _ = engine._build_routes(request(prompt(4), 4), running, 0)
    assert engine.collect_stats()["unrecorded_rows"] == 7 - kept
    answer = generation(4, routes, stop_reason=finish_reason)
    table = of_sample(to_the_batch([one_turn(4, answer, engine.routing)], shape=engine.routing), "s0")
    assert table["routing_recorded"].tolist() == [True] * kept + [False] * (8 - kept)
    assert np.array_equal(table["routed_experts"][:kept], layers[:kept, [0, 2]])
    assert (table["routed_experts"][kept:] == np.arange(2)).all()


@pytest.fixture
def build(model_path):
    """Build learners of the model; none of their steps is taken, so the weights stay."""
    return lambda **options: MegatronLearner.from_pretrained(config(**options), model_path)


def step_gradients(learner: MegatronLearner, micro_batches) -> dict[str, torch.Tensor]:
    """Gradients of one step, which is not taken."""
    forward_backward(learner, agree_on_counts(learner, micro_batches))
    taken = {n: g.clone() for n, g in gradients(learner).items()}
    learner.optimizer.zero_grad()
    return taken


def assert_bit_equal(found, exact) -> None:
    assert set(found) == set(exact)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_no_replay_is_stale_on_a_padding_micro_batch(build):
    """Not longer, not shorter than what came before it, and no trace of it in gradients or figures."""
    learner, real = build(), collate_samples(hm.make_samples(2, [20]))
    exact = step_gradients(learner, [real])
    alone = learner.replay.pop_counts()
    # As on one rank of several: padding is fed forward and back like everything else.
    learner.config.learner.parallel = config(dp=2).learner.parallel
    for tokens in (1, 20, 33):
        padding = make_padding_batch(real, tokens)
        minibatch = agree_on_counts(learner, [real, padding, real])
        assert minibatch.micro_batches[1] is padding
        forward_backward(learner, minibatch)
        found = {n: g.clone() for n, g in gradients(learner).items()}
        learner.optimizer.zero_grad()
        counts = learner.replay.pop_counts()
        for name, gradient in exact.items():
            # The denominator is twice as large, and the same tokens are there twice.
            assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-8), name
        assert torch.equal(counts.expert_load, 2 * alone.expert_load)
        assert torch.equal(counts.compared_tokens, 2 * alone.compared_tokens)
        with learner.replay.bind_routes(padding):
            bound = logits(learner, padding)
        assert torch.equal(bound, logits(learner, padding))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_forward_only_pass_is_not_consumed_by_a_later_backward(build, recompute):
    """Scoring, recording and a forward pass without a backward, of other micro-batches, change no bit of the gradient."""
    micro_batches = pack_samples(hm.make_samples(3, LENGTHS), 48)
    learner = build(recompute=recompute)
    exact = step_gradients(learner, micro_batches)
    others = pack_samples(hm.make_samples(4, [31, 7, 40]), 48)
    learner.logprobs(others)
    learner.record_learner_routes(others)
    learner.score_sequence(np.arange(20))
    with learner.replay.bind_routes(others[0]):
        logits(learner, others[0])  # with gradients, and no backward
    assert_bit_equal(step_gradients(learner, micro_batches), exact)
    learner.logprobs(others)
    assert_bit_equal(step_gradients(learner, micro_batches), exact)


def test_ids_above_255_reach_the_router_unwrapped():
    replay = RoutingReplay(
        RoutingShape(2, 2, 512),
        [0, 1],
        is_enabled=True,
        device=torch.device("cpu"),
    )
    rows = np.asarray([[[511, 256], [255, 300]], [[1, 257], [258, 2]]], np.uint16)
    (sample,) = hm.make_samples(6, [2], layers=2)
    sample = replace_columns(sample, routed_experts=rows, routing_recorded=np.ones(2, bool))
    own = torch.tensor([[0, 1], [2, 3]])
    with replay.bind_routes(collate_samples([sample])) as routes:
        for layer in range(2):
            assert routes.choose_experts(layer, own).tolist() == np.sort(rows[:, layer]).tolist()
    assert replay.pop_counts().expert_load[0].nonzero()[:, 0].tolist() == [1, 256, 257, 511]


def test_routers_of_multi_token_prediction_are_not_replayed(build):
    """A layer beside the decoder, with experts of its own: it is in no record, so its router stays Megatron's."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import build_module

    from r3async.learner.megatron.model import build_layer_spec
    from r3async.learner.megatron.routers import attach_replay

    learner = build()
    model = learner.model
    aside = build_module(
        build_layer_spec(model.config, learner.shape, moe=True), config=model.config, layer_number=hm.LAYERS + 1
    )
    assert isinstance(aside.mlp, MoELayer)
    model.mtp = torch.nn.ModuleList([aside])
    again = attach_replay(
        model,
        moe_layers=[1, 2, 3],
        shard=(0, 1),
        top_k=hm.TOP_K,
        num_experts=hm.EXPERTS,
        is_enabled=True,
        device=torch.device("cpu"),
    )
    assert again.moe_layer_indices == [0, 1, 2]
    assert aside.mlp.router.router_replay is None
    assert all(layer.mlp.router.router_replay is not None for layer in model.decoder.layers)
    torch.nn.init.normal_(aside.mlp.router.weight, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(7, 1, model.config.hidden_size)
    with torch.no_grad():
        plain = aside.mlp.router(hidden)
        with again.bind_routes(collate_samples(hm.make_samples(7, [7]))):
            bound = aside.mlp.router(hidden)
    assert all(torch.equal(a, b) for a, b in zip(plain, bound, strict=True))
