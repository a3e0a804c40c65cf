"""The basic data types: per-token columns, samples, trajectories.

A per-token column is declared once, in `SCHEMA`. Every operation on token data (slice, concat, pad,
encode, decode) is derived from that declaration, so that none of them can forget a column: adding
one takes one line here. Arrays are NumPy, rows are tokens, and a table is never changed in place.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.data.packed_routes import PackedRoutes
from r3async.data.supports import SupportSets

UNSAMPLED_VERSION = -1
"""The `policy_version` of a token that no policy sampled (prompt, observation, injected
end-of-sequence)."""


ColumnData = np.ndarray | PackedRoutes | SupportSets
"""A column as a table stores it."""


class SchemaError(ValueError):
    """Error for token data that does not fit its declaration: wrong name, dtype,
    shape or length."""


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """Return `dtype.name`, cached, because NumPy puts it together each time.

    Without the cache, this takes a fifth of encoding or decoding a short trajectory.
    """
    return dtype.name


class Column(msgspec.Struct, frozen=True):
    """Declaration of one per-token column.

    Attributes:
        dtypes: Dtypes it may have, narrowest first (values of mixed tables are
            widened, never wrapped).
        fill: Value of a token that has none; `"arange"` gives `0..K-1` along the last
            dimension (distinct ids).
        inner_dims: Names of the dimensions after the token dimension; their sizes are free but
            equal within a concat.
        optional: True if it may be absent, on all samples of a batch or on none.
        compressible: True if it has one value a token and is nearly constant: it travels packed.
            The first column of a schema is not compressible.
        holds_choices: True if ids along the last dimension are a set, whose order carries no
            information: they may be `PackedRoutes`.
        holds_sets: True if each token has a set of token ids, or none: the column is `SupportSets`,
            and nothing else.
    """

    name: str
    dtypes: tuple[str, ...]
    fill: float | int | bool | str
    inner_dims: tuple[str, ...] = ()
    optional: bool = False
    compressible: bool = False
    holds_choices: bool = False
    holds_sets: bool = False

    def filled_rows(
        self, length: int, inner_shape: tuple[int, ...] = (), dtype: str | np.dtype | None = None
    ) -> Any:
        """Return `[length, *inner_shape]` of the fill value, or `length` tokens without a set
        if it holds sets."""
        if self.holds_sets:
            return SupportSets.unrecorded(length)
        dtype = np.dtype(dtype or self.dtypes[0])
        if self.fill == "arange":
            row = np.arange(inner_shape[-1], dtype=dtype)
            return np.ascontiguousarray(np.broadcast_to(row, (length, *inner_shape)))
        return np.full((length, *inner_shape), self.fill, dtype=dtype)


class TokenSchema:
    """An ordered set of column declarations. Immutable; `with_column` returns a larger one."""

    def __init__(self, columns: Iterable[Column]):
        self.columns: dict[str, Column] = {}
        for column in columns:
            if column.name in self.columns:
                raise SchemaError(f"column {column.name!r} is declared twice")
            if column.compressible and (column.inner_dims or not self.columns):
                raise SchemaError(
                    f"column {column.name!r} is declared compressible: it is the first, or has "
                    "inner dimensions"
                )
            self.columns[column.name] = column
        declaration = msgspec.msgpack.encode(
            [msgspec.structs.astuple(c) for c in self.columns.values()]
        )
        self.fingerprint = f"{zlib.crc32(declaration):08x}"

    def with_column(self, column: Column) -> TokenSchema:
        return TokenSchema([*self.columns.values(), column])


SCHEMA = TokenSchema(
    [
        Column("token_ids", ("int32",), 0),
        Column("loss_mask", ("bool",), False, compressible=True),
        # Log-prob under the policy that sampled the token, after temperature: of the distribution
        # really sampled from.
        Column("rollout_logprobs", ("float32",), 0.0),
        Column("policy_version", ("int32",), UNSAMPLED_VERSION, compressible=True),
        # Turn that sampled the token; -1 where not sampled.
        Column("turn", ("int32",), -1, compressible=True),
        Column("rewards", ("float32",), 0.0, compressible=True),
        # The next seven are added by the learner. Number of the token's episode in the minibatch,
        # `0..E - 1`; -1: none.
        Column("episode", ("int32",), -1, optional=True, compressible=True),
        # Number of a trained token in the minibatch, episode by episode, wherever it is packed; -1
        # for other tokens.
        Column("place", ("int32",), -1, optional=True),
        Column("advantages", ("float32",), 0.0, optional=True, compressible=True),
        # Factor of the token's terms of the loss: 1 / the denominator of `algorithm.reduction`.
        Column("loss_weights", ("float32",), 0.0, optional=True, compressible=True),
        # True if served drift is measured on the token's episode.
        Column("probed", ("bool",), False, optional=True, compressible=True),
        # Log-probs of the learner before the step's first update, and of the frozen
        # reference model.
        Column("old_logprobs", ("float32",), 0.0, optional=True),
        Column("reference_logprobs", ("float32",), 0.0, optional=True),
        # Experts chosen when this token was fed forward; MoE layers only, in layer order.
        Column(
            "routed_experts",
            ("uint8", "uint16"),
            "arange",
            ("layers", "top_k"),
            optional=True,
            holds_choices=True,
        ),
        Column("routing_recorded", ("bool",), False, optional=True, compressible=True),
        # Gates of those experts, in the order of their ids in the record.
        Column("routed_weights", ("float32",), 0.0, ("layers", "gates"), optional=True),
        # Tokens that could have been sampled in its place, where that was not the whole vocabulary.
        Column("support", ("uint8",), 0, optional=True, holds_sets=True),
    ]
)

ROUTE_COLUMNS = ("routed_experts", "routing_recorded", "routed_weights")
"""Columns of recorded routes; the last one only if gates are recorded."""


def _check_column(declaration: Column, array: Any) -> ColumnData:
    """Return the array if it fits its declaration. Raises `SchemaError` if not."""
    name = declaration.name
    if declaration.holds_sets or isinstance(array, SupportSets):
        if declaration.holds_sets and isinstance(array, SupportSets):
            return array
        raise SchemaError(
            f"column {name!r} "
            f"{'has to be sets' if declaration.holds_sets else 'holds no sets'} of token ids"
        )
    if not isinstance(array, PackedRoutes):
        array = np.asarray(array)
    elif not declaration.holds_choices:
        raise SchemaError(f"column {name!r} holds no choices, and cannot be packed as they are")
    if dtype_name(array.dtype) not in declaration.dtypes:
        raise SchemaError(
            f"column {name!r} has dtype {array.dtype.name}, expected "
            f"{' or '.join(declaration.dtypes)}"
        )
    if array.ndim != 1 + len(declaration.inner_dims):
        raise SchemaError(
            f"column {name!r} has shape {array.shape}, expected "
            f"[T{''.join(', ' + d for d in declaration.inner_dims)}]"
        )
    return array


class TokenTable:
    """Columns of one length `T`, checked against a schema when built.

    A `PackedRoutes` column stays packed, and is unpacked each time that it is read. Raises
    `SchemaError` for an unknown, missing, mistyped, misshapen or mis-sized column.
    """

    __slots__ = ("_columns", "_length", "schema")

    def __init__(self, columns: Mapping[str, ColumnData], schema: TokenSchema = SCHEMA):
        self.schema = schema
        unknown = sorted(set(columns) - set(schema.columns))
        if unknown:
            raise SchemaError(
                f"unknown column {unknown[0]!r}; the schema has {', '.join(schema.columns)}"
            )
        self._columns: dict[str, ColumnData] = {}
        self._length = -1
        for name, declared in schema.columns.items():
            if name not in columns:
                if not declared.optional:
                    raise SchemaError(f"column {name!r} is missing")
                continue
            array = self._columns[name] = _check_column(declared, columns[name])
            if self._length < 0:
                self._length = len(array)
            elif len(array) != self._length:
                raise SchemaError(f"column {name!r} has {len(array)} rows, expected {self._length}")

    @staticmethod
    def from_checked(
        columns: dict[str, ColumnData], length: int, schema: TokenSchema
    ) -> TokenTable:
        """Return a table of columns that are known to fit the schema, in its order, with
        `length` rows each."""
        table = TokenTable.__new__(TokenTable)
        table._columns = columns
        table._length = length
        table.schema = schema
        return table

    @staticmethod
    def from_tokens(token_ids: np.ndarray) -> TokenTable:
        """Return a table of tokens that nobody sampled. `token_ids` is int `[T]`; other required
        columns hold fills."""
        needed = {
            n: c.filled_rows(len(token_ids)) for n, c in SCHEMA.columns.items() if not c.optional
        }
        return TokenTable(needed | {"token_ids": np.asarray(token_ids).astype(np.int32)})

    def __len__(self) -> int:
        return self._length

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        """Return a column as an array, or as `SupportSets`."""
        column = self._columns[name]
        return column.unpack_routes() if isinstance(column, PackedRoutes) else column

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenTable)
            and list(self) == list(other)
            and all(_columns_equal(self[n], other[n]) for n in self)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenTable({len(self)} tokens: {', '.join(self)})"

    def column_shape(self, name: str) -> tuple[int, ...]:
        return self._columns[name].shape

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._columns.values())

    def items(self) -> ItemsView[str, Any]:
        return {name: self[name] for name in self}.items()

    def stored_items(self) -> ItemsView[str, ColumnData]:
        """Return the columns as they are stored."""
        return self._columns.items()

    def slice_rows(self, start: int, stop: int) -> TokenTable:
        """Return rows `start:stop` of every column, as views; packed routes are unpacked first."""
        return TokenTable({n: a[start:stop] for n, a in self.stored_items()}, self.schema)

    def with_columns(self, **columns: ColumnData) -> TokenTable:
        """Return the table with columns added or replaced; only these are checked."""
        declared = self.schema.columns
        if not self._columns or not declared.keys() >= columns.keys():
            return TokenTable({**self._columns, **columns}, self.schema)
        new = {name: _check_column(declared[name], array) for name, array in columns.items()}
        for name, array in new.items():
            if len(array) != self._length:
                raise SchemaError(f"column {name!r} has {len(array)} rows, expected {self._length}")
        joined = {**self._columns, **new}
        return TokenTable.from_checked(
            {name: joined[name] for name in declared if name in joined}, self._length, self.schema
        )

    def without_columns(self, *names: str) -> TokenTable:
        return TokenTable({n: a for n, a in self.stored_items() if n not in names}, self.schema)

    def pad_to(self, length: int, fills: Mapping[str, Any] | None = None) -> TokenTable:
        """Return the table with rows of fill values appended up to `length`.

        `fills` overrides fill values (the pad token id, say). Raises `SchemaError` if the
        table is longer.
        """
        extra = length - len(self)
        if extra < 0:
            raise SchemaError(f"cannot pad {len(self)} tokens to {length}")
        tail = {}
        for name, array in self.stored_items():
            tail[name] = self.schema.columns[name].filled_rows(extra, array.shape[1:], array.dtype)
            if fills and name in fills:
                tail[name][:] = fills[name]
        return TokenTable.concat([self, TokenTable(tail, self.schema)])

    @staticmethod
    def concat(
        tables: Sequence[TokenTable], skip_rows: Sequence[int] | np.ndarray | None = None
    ) -> TokenTable:
        """Return a table of all rows in order, without the first `skip_rows` of each table.

        Narrow dtypes are widened to the widest present, never wrapped. A column of sets may be
        missing on some tables, whose tokens then have no sets. Raises `SchemaError` if there
        is no table, if any other optional column is on some tables and not on others, or if
        inner shapes differ.
        """
        if not tables:
            raise SchemaError("nothing to concatenate")
        schema = tables[0].schema
        given = {name for table in tables for name in table}
        sets = {name for name in given if schema.columns[name].holds_sets}
        names = [name for name in schema.columns if name in sets or name in tables[0]]
        for i, table in enumerate(tables):
            if [
                n for n in names if n in sets or n in table
            ] != names or table._columns.keys() - names:
                different = sorted((set(names) ^ set(table)) - sets)
                raise SchemaError(
                    f"column {different[0]!r} is on some tables and not on others (table {i} "
                    f"of {len(tables)})"
                )
        first = [0] * len(tables) if skip_rows is None else [int(n) for n in skip_rows]
        edges = list(
            itertools.accumulate(
                (len(t) - n for t, n in zip(tables, first, strict=True)), initial=0
            )
        )
        columns: dict[str, ColumnData] = {}
        for name in names:
            if name in sets:
                has = [t[name] if name in t else SupportSets.unrecorded(len(t)) for t in tables]
                columns[name] = SupportSets.concat(
                    [column[skip:] for column, skip in zip(has, first, strict=True)]
                )
                continue
            kept = [t._columns[name] for t in tables]
            shapes = {a.shape[1:] for a in kept}
            if len(shapes) > 1:
                raise SchemaError(f"column {name!r} has different inner shapes {sorted(shapes)}")
            present = {dtype_name(a.dtype) for a in kept}
            widest = next(d for d in reversed(schema.columns[name].dtypes) if d in present)
            columns[name] = joined = np.empty((edges[-1], *kept[0].shape[1:]), widest)
            for table, skip, (start, stop) in zip(
                tables, first, itertools.pairwise(edges), strict=True
            ):
                joined[start:stop] = table[name][skip:]
        return TokenTable(columns, schema)


def _columns_equal(a: Any, b: Any) -> bool:
    """Return whether two columns are equal, dtypes included."""
    return (
        bool(a == b) if isinstance(a, SupportSets) else a.dtype == b.dtype and np.array_equal(a, b)
    )


class GrowingTokens:
    """Append-only token ids, each copied a few times at most. Arrays that were handed out
    earlier stay unchanged."""

    __slots__ = ("_array", "_length")

    def __init__(self, token_ids: Sequence[int] | np.ndarray = ()):
        self._array = np.array(token_ids, np.int32)
        self._length = len(self._array)

    def __len__(self) -> int:
        return self._length

    @property
    def array(self) -> np.ndarray:
        """The token ids, int32 `[T]`, as a view that cannot be written to."""
        view = self._array[: self._length]
        view.flags.writeable = False
        return view

    def extend(self, token_ids: Sequence[int] | np.ndarray) -> None:
        length = self._length + len(token_ids)
        if length > len(self._array):
            grown = np.empty(2 * length, np.int32)
            grown[: self._length] = self._array[: self._length]
            self._array = grown
        self._array[self._length : length] = token_ids
        self._length = length


class Turn(msgspec.Struct, frozen=True):
    """One answer of the policy: sampled tokens `start:stop` of sample number
    `sample`, and its reward."""

    index: int
    sample: int
    start: int
    stop: int
    reward: float
    stop_reason: str


class Sample(msgspec.Struct):
    """A token sequence that was fed to one model context. `temperature` scales the logits."""

    sample_id: str
    table: TokenTable
    temperature: float = 1.0


def format_trajectory_id(group_index: int, episode_index: int) -> str:
    """Return the trajectory id of an episode: the same for every attempt, so that a repeated
    one is recognised."""
    return f"g{group_index:08d}e{episode_index:04d}"


def is_trajectory_of_group(group_index: int, trajectory_id: str, group_size: int) -> bool:
    """Return whether `trajectory_id` is that of an episode of this group."""
    _, _, episode = trajectory_id.rpartition("e")
    # A longer number belongs to no episode, and takes time to parse.
    index = int(episode) if len(episode) <= 9 and episode.isascii() and episode.isdigit() else -1
    return (
        0 <= index < group_size
        and group_index >= 0
        and trajectory_id == format_trajectory_id(group_index, index)
    )


class Trajectory(msgspec.Struct):
    """One finished episode.

    Attributes:
        group_index: Number of the group, which counts leases.
        episode_index: Number of the episode among the G episodes of one prompt.
        lineage: Lineage in which the versions of its tokens are counted (0: unknown). All processes
            of a start belong to one lineage, and so does an episode.
        metrics: Metrics that the environment reported of the turns, summed by name.
    """

    trajectory_id: str
    group_index: int
    episode_index: int
    task_seed: int
    generator_id: str
    stop_reason: str
    turns: list[Turn]
    samples: list[Sample]
    started_at: float = 0.0
    finished_at: float = 0.0
    preview: list[dict[str, str]] = []
    lineage: int = 0
    metrics: dict[str, float] = {}

    @property
    def reward(self) -> float:
        """The sum of the turns' rewards."""
        return float(sum(t.reward for t in self.turns))

    @property
    def num_tokens(self) -> int:
        return sum(len(s.table) for s in self.samples)

    @property
    def newest_version(self) -> int:
        """The newest version of the weights that sampled a trained token; -1 if there
        is no such token."""
        sampled = (s.table["policy_version"][s.table["loss_mask"]] for s in self.samples)
        return max(
            (int(versions.max(initial=UNSAMPLED_VERSION)) for versions in sampled),
            default=UNSAMPLED_VERSION,
        )
