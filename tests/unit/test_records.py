"""One declaration of per-token columns, and every operation carries every column."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.data.tokens import SCHEMA, Column, SchemaError, TokenTable
from tests.helpers.wire import make_table

EXTRA = SCHEMA.with_column(Column("made_up", ("int16", "int32"), 7, inner_dims=("width",)))


@given(st.integers(0, 6), st.integers(0, 6), st.sampled_from([SCHEMA, EXTRA]))
def test_padding_appends_the_declared_fill_of_every_column(length, extra, schema):
    table = make_table(0, length, schema=schema)
    padded = table.pad_to(length + extra, fills={"token_ids": 99})
    assert padded.slice_rows(0, length) == table
    tail = padded.slice_rows(length, length + extra)
    for name, column in schema.columns.items():
        if column.holds_sets:
            assert not tail[name].recorded_mask.any()
            continue
        fill = 99 if name == "token_ids" else column.fill
        expected = np.arange(tail[name].shape[-1]) if fill == "arange" else fill
        assert (tail[name] == expected).all(), name
        assert tail[name].dtype == table[name].dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bogus": np.zeros(2)}, "unknown column 'bogus'"),
        ({"token_ids": np.zeros(2, np.int64)}, "dtype int64"),
        ({"token_ids": np.zeros((2, 1), np.int32)}, "shape"),
        ({"loss_mask": np.zeros(3, bool)}, "3 rows, expected 2"),
        ({"routed_experts": np.zeros((2, 4), np.uint8)}, "shape"),
    ],
)
def test_a_table_that_does_not_fit_the_schema_is_refused(change, message):
    with pytest.raises(SchemaError, match=message):
        make_table(0, 2).with_columns(**change)


def test_the_fingerprint_changes_with_the_declaration():
    assert SCHEMA.fingerprint != EXTRA.fingerprint
    assert EXTRA.fingerprint == SCHEMA.with_column(EXTRA.columns["made_up"]).fingerprint


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenTable.concat([make_table(0, 2), make_table(0, 2).without_columns("advantages")]), "advantages"),
        (lambda: make_table(0, 2).without_columns("token_ids"), "'token_ids' is missing"),
        (lambda: make_table(0, 3).pad_to(2), "cannot pad"),
        (lambda: SCHEMA.with_column(Column("token_ids", ("int32",), 0)), "declared twice"),
    ],
    ids=["on some tables only", "required", "shrinks", "twice"],
)
def test_columns_that_do_not_fit_together_are_refused_by_name(make, message):
    with pytest.raises(SchemaError, match=message):
        make()
