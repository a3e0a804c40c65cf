"""Rows from Arrow data: parquet files, and datasets of the library `datasets`, on disk or of the
Hugging Face hub.

Arrow gives all objects of a column the keys of each, with null where an object has no such key.
These keys are left out, so that an object is what was written, as it is in a file of JSON lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3async.config import ConfigError
from r3async.envs.row_values import to_plain_value
from r3async.untrusted import MalformedError, decode_python_json

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

Row = dict[str, Any]
VALUE_OVERHEAD_BYTES = 64
"""Bytes of memory that a value takes besides its content."""
BATCH_ROWS = 256
UNCHECKED_BYTES = 64 * 2**20
MAX_EXPANSION_RATIO = 1000
"""Limits of the memory that the rows of a parquet file or of the hub may take: the former in bytes,
or the latter times the bytes of their source, whichever is more."""
DATASET_FILE = "state.json"
DATASET_DICT_FILE = "dataset_dict.json"
"""Files that `save_to_disk` writes into the directory of a dataset, and of one
with several splits."""


def read_parquet_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a parquet file.

    Raises `ConfigError` for rows that take far more memory than the file has bytes. This is known
    before they are decoded: from the sizes in the file's metadata, and because a text that occurs
    often is decoded once.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    size = file.stat().st_size
    try:
        with ParquetFile(file) as table:
            groups = [table.metadata.row_group(at) for at in range(table.num_row_groups)]
            columns = [group.column(at) for group in groups for at in range(group.num_columns)]
            values = sum(column.num_values for column in columns)
            bytes_of_columns = sum(column.total_uncompressed_size for column in columns)
            check_expansion(file, size, values * VALUE_OVERHEAD_BYTES + bytes_of_columns)
            schema = table.schema
            texts = [schema.column(at) for at in range(len(schema))]
        # A dictionary has each text once, even where a row, or a list in a row, repeats it
        # a million times.
        paths = [text.path for text in texts if text.physical_type == "BYTE_ARRAY"]
        with ParquetFile(file, read_dictionary=paths) as table:
            yield from convert_batches(table.iter_batches(BATCH_ROWS), file, size)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file} is no parquet file: {str(error).splitlines()[0]}") from error


def read_dataset_rows(rows: Dataset, source: Path | str, size: int) -> Iterator[Row]:
    """Yield the rows of a dataset of the library `datasets`. Raises `ConfigError` as
    `convert_batches` does."""
    tables = rows.with_format("arrow").iter(BATCH_ROWS)
    batches = (batch for table in tables for batch in table.to_batches())
    yield from convert_batches(batches, source, size)


def is_saved_dataset(directory: Path) -> bool:
    """Return True if `datasets` saved a dataset in `directory`, with splits or without."""
    return any((directory / name).is_file() for name in (DATASET_FILE, DATASET_DICT_FILE))


def convert_batches(
    batches: Iterable[pyarrow.RecordBatch], source: Path | str, size: int
) -> Iterator[Row]:
    """Yield the rows of record batches as plain data. Raises `ConfigError` for rows that take far
    more memory than `source` has bytes (`size`)."""
    used = 0
    for batch in batches:
        columns = {
            name: _convert_array(batch.column(at)) for at, name in enumerate(batch.schema.names)
        }
        for at in range(batch.num_rows):
            row = {name: values[at] for name, values in columns.items()}
            used += estimate_memory(row)
            check_expansion(source, size, used)
            yield row


def _convert_array(array: pyarrow.Array) -> list[Any]:
    """Return the values of an array. Null keys of objects are left out."""
    import pyarrow

    kind = array.type
    types = pyarrow.types
    if isinstance(kind, pyarrow.JsonType):
        return [
            None if text is None else _decode_json_value(text)
            for text in _convert_array(array.storage)
        ]
    if types.is_dictionary(kind):
        used = array.indices.unique().drop_null()
        values = dict(
            zip(used.to_pylist(), _convert_array(array.dictionary.take(used)), strict=True)
        )
        return [values.get(index) for index in array.indices.to_pylist()]
    valid = array.is_valid().to_pylist()
    if types.is_struct(kind):
        fields = {
            field.name: _convert_array(inner)
            for field, inner in zip(kind, array.flatten(), strict=True)
        }
        objects = (
            {name: values[at] for name, values in fields.items() if values[at] is not None}
            for at in range(len(array))
        )
        return [inner if known else None for inner, known in zip(objects, valid, strict=True)]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        ends = array.offsets.to_pylist()
        first = ends[0]
        last = ends[-1]
        parts = (array.keys, array.items) if types.is_map(kind) else (array.values,)
        inner = [_convert_array(part.slice(first, last - first)) for part in parts]
        cut = [[part[a - first : b - first] for part in inner] for a, b in itertools.pairwise(ends)]
        made = [dict(zip(*each, strict=True)) if types.is_map(kind) else each[0] for each in cut]
        return [each if known else None for each, known in zip(made, valid, strict=True)]
    if types.is_fixed_size_list(kind):
        inner_values = iter(_convert_array(array.flatten()))
        return [
            [next(inner_values) for _ in range(kind.list_size)] if known else None
            for known in valid
        ]
    return [to_plain_value(value) for value in array.to_pylist()]


def _decode_json_value(text: str) -> Any:
    """Return the value of a text of JSON in a column of the type `arrow.json`."""
    try:
        return decode_python_json(text)
    except MalformedError as error:
        raise ConfigError(f"a value of a column of JSON is not JSON: {error}") from error


def check_expansion(source: Path | str, size: int, used: int) -> None:
    """Raise `ConfigError` for rows that take far more memory than their source has bytes: a few
    hundred bytes can become gigabytes."""
    if used > max(UNCHECKED_BYTES, MAX_EXPANSION_RATIO * size):
        raise ConfigError(
            f"`data.path`: {source} has {size} bytes and its rows take {used} and more, so it "
            "holds the same over and over: write the rows that you mean as .jsonl"
        )


def estimate_memory(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return VALUE_OVERHEAD_BYTES + sum(map(estimate_memory, value))
    return VALUE_OVERHEAD_BYTES + (len(value) if isinstance(value, str | bytes) else 0)
