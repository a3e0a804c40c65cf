"""Routes in fewer bits: every set comes back, whatever the bytes."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r3async.data import packed_routes
from r3async.data.packed_routes import PackedRoutes, pack_routes, packed_size
from r3async.data.routes import CHUNK_ROWS, iter_sorted_columns, route_dtype
from r3async.data.tokens import SCHEMA, Sample, SchemaError, TokenTable, Trajectory
from r3async.data.wire import decode_trajectory, encode_trajectory

FAST = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])


def routes(tokens: int, layers: int, top_k: int, experts: int, seed: int = 0) -> np.ndarray:
    """`[tokens, layers, top_k]`: sets of experts, in any order."""
    rows = np.random.default_rng(seed).random((tokens * layers, experts)).argsort(axis=1)[:, :top_k]
    return rows.reshape(tokens, layers, top_k).astype(route_dtype(experts))


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(packed_routes, "MIN_PACKED_BYTES", 1)


def pack(rows: np.ndarray, form: packed_routes.RouteForm) -> np.ndarray:
    """There and back."""
    there = pack_routes(rows, form)
    return there.unpack_routes() if isinstance(there, PackedRoutes) else there


@FAST
@given(
    tokens=st.integers(0, 70),
    layers=st.integers(1, 5),
    experts=st.sampled_from([1, 2, 3, 8, 17, 60, 64, 128, 256, 257, 300, 512, 1000]),
    data=st.data(),
)
def test_routes_come_back_in_their_order(tokens, layers, experts, data):
    top_k = data.draw(st.integers(1, min(experts, 24)))
    rows = routes(tokens, layers, top_k, experts, seed=data.draw(st.integers(0, 99)))
    for form in ("plain", "bits"):
        back = pack(rows, form)
        assert (back.dtype, back.shape) == (rows.dtype, rows.shape)
        np.testing.assert_array_equal(back, rows)


@FAST
@given(
    bits=st.integers(1, 16), top_k=st.integers(1, 12), tokens=st.sampled_from([1, 2, 33, 400]), seed=st.integers(0, 99)
)
def test_rows_that_are_no_sets_come_back_too(bits, top_k, tokens, seed):
    """The wire carries what it is given; whether it can be a record of choices is for the validation to say."""
    dtype = np.uint8 if bits <= 8 else np.uint16
    rows = np.random.default_rng(seed).integers(0, 1 << bits, (tokens, 3, top_k), dtype=dtype)
    for values in (rows, rows[::2], rows.astype(rows.dtype.newbyteorder(">"))):
        np.testing.assert_array_equal(pack(values, "bits"), values)


@FAST
@given(
    bits=st.integers(0, 17), shape=st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 12)), data=st.data()
)
def test_any_bytes_of_the_right_size_are_ids_of_so_many_bits(bits, shape, data):
    try:
        size = packed_size("bits", bits, shape)
    except ValueError:
        return
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    rows = PackedRoutes("bits", bits, shape, np.dtype(np.uint8 if bits <= 8 else np.uint16), raw.copy())
    assert rows.unpack_routes().shape == rows.shape == shape
    assert rows.unpack_routes().max(initial=0) < 1 << bits
    with pytest.raises(ValueError, match="take"):
        PackedRoutes("bits", bits, shape, rows.dtype, np.zeros(size + 8, np.uint8))


@pytest.mark.parametrize(
    ("experts", "layers", "top_k", "of_bits"),
    [
        (128, 48, 8, 336),
        (256, 58, 8, 464),
        (64, 26, 6, 117),
        (32, 32, 4, 80),
        (512, 48, 10, 540),
    ],
)
def test_bytes_a_token(experts, layers, top_k, of_bits):
    """Of known models."""
    rows = routes(64, layers, top_k, experts)
    rows[0, 0, 0] = experts - 1
    assert pack_routes(rows, "bits").nbytes == 64 * of_bits


def test_what_gains_nothing_stays_as_it_is(monkeypatch):
    rows = routes(40, 4, 2, 8)
    assert pack_routes(rows, "plain") is rows
    assert pack_routes(np.full((9, 4, 2), 255, np.uint8), "bits").tolist() == np.full((9, 4, 2), 255).tolist()
    monkeypatch.setattr(packed_routes, "MIN_PACKED_BYTES", rows.nbytes + 1)
    assert pack_routes(rows, "bits") is rows


@FAST
@given(
    rows=st.sampled_from([0, 1, 5, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 3]),
    top_k=st.integers(1, 20),
    seed=st.integers(0, 9),
)
def test_sorted_columns_are_sorted_rows(rows, top_k, seed):
    values = np.random.default_rng(seed).integers(0, 60, (rows, top_k), dtype=np.uint8)
    found = np.full_like(values, 99)
    for part, columns in iter_sorted_columns(values):
        found[part] = np.stack(columns, axis=1)
    np.testing.assert_array_equal(found, np.sort(values, axis=-1))


def trajectory(rows: np.ndarray) -> Trajectory:
    table = TokenTable.from_tokens(np.arange(len(rows)))
    table = table.with_columns(routed_experts=rows, routing_recorded=np.ones(len(rows), bool))
    return Trajectory("t", 0, 0, 1, "g0", "eos", [], [Sample("s", table), Sample("u", table)])


@pytest.mark.parametrize("form", ["plain", "bits"])
def test_a_table_keeps_packed_routes_and_gives_them_out_as_rows(form):
    rows = routes(200, 6, 4, 64)
    sent = trajectory(rows)
    frames = [bytes(frame) for frame in encode_trajectory(sent, routes=form)]
    received = decode_trajectory(frames)
    table = received.samples[0].table
    assert isinstance(dict(table.stored_items())["routed_experts"], PackedRoutes) == (form != "plain")
    assert table.nbytes <= sent.samples[0].table.nbytes
    for same in (
        table,
        table.without_columns("routing_recorded"),
        table.with_columns(turn=table["turn"]),
        dict(table.items()),
    ):
        np.testing.assert_array_equal(same["routed_experts"], rows)
    np.testing.assert_array_equal(table.slice_rows(3, 9)["routed_experts"], rows[3:9])
    assert table.slice_rows(4, 4)["routed_experts"].shape == (0, 6, 4)
    np.testing.assert_array_equal(table.pad_to(210)["routed_experts"][:200], rows)
    both = TokenTable.concat([sample.table for sample in received.samples])
    np.testing.assert_array_equal(both["routed_experts"], np.concatenate([rows, rows]))
    again = [bytes(frame) for frame in encode_trajectory(received)]  # as a spool or a quarantine may
    assert again == frames
    assert decode_trajectory(again) == received


def test_a_column_that_is_no_choice_of_experts_is_never_packed():
    assert [name for name, column in SCHEMA.columns.items() if column.holds_choices] == ["routed_experts"]
    rows = PackedRoutes("bits", 1, (0, 1, 1), np.dtype(np.uint8), np.zeros(0, np.uint8))
    with pytest.raises(SchemaError, match="'token_ids' holds no choices"):
        TokenTable({"token_ids": rows})
