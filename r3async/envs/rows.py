"""Rows of the user's own: from files, directories of files, or the Hugging Face hub. Each is told by where it is."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from r3async.config import ConfigError, DataConfig, did_you_mean
from r3async.config.places import find_file
from r3async.untrusted import Malformed, decode_python_json

Row = dict[str, Any]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
VALUE_BYTES = 64
"""Of memory that a value takes besides what is in it."""
BATCH_ROWS = 256
PACKED_TIMES = 100
"""A column of a parquet file that is packed better than this is no text; its rows are made one by one."""
FREE_BYTES, MOST_TIMES = 64 * 2**20, 1000
"""Rows of a parquet file, or of the hub, may take the former, or so many times the bytes of their source."""
_TAKE_SOME = "`data.limit` takes the first rows, and `data.eval` a share or a file to evaluate"
INSTALL = "pip install 'r3async[data]'"


class Found(NamedTuple):
    """A row, and where it is: `file` and the number, from 1, of its `unit` (line or row)."""

    row: Row
    file: str
    unit: str
    number: int

    @property
    def where(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


def read_rows(data: DataConfig, path: str, split: str) -> list[Found]:
    """All rows of `path`, which is a file, a directory of files, or an id on the hub, in their order.

    Raises `ConfigError` that says what is missing, or names the line or row that is none.
    """
    found = find_file(path)
    if not found.exists():
        return _from_hub(data, path, split, found)
    if data.subset and path == data.path:
        raise ConfigError(
            f"`data.subset` = {data.subset!r}: {found} is not on the hub, and has no subsets: leave it out"
        )
    if found.is_dir():
        files = _files(found, split)
    elif split == DataConfig().split:
        files = [found]
    else:
        raise ConfigError(f"{found} is one file and has no split {split!r}: leave `data.split` out; {_TAKE_SOME}")
    rows = [each for file in files for each in _from_file(file)]
    if not rows:
        raise ConfigError(f"{found} has no rows")
    return rows


def stamps_of(place: Path) -> list[tuple[str, int, int]]:
    """Name, time and size of the files there: another list when one has changed."""
    files = [place, *sorted(place.iterdir())] if place.is_dir() else [place]
    return [(str(file), (found := file.stat()).st_mtime_ns, found.st_size) for file in files if file.exists()]


def _files(directory: Path, split: str) -> list[Path]:
    known = sorted(file for file in directory.iterdir() if file.suffix in READERS and not file.name.startswith("."))
    if not known:
        raise ConfigError(f"`data.path`: {directory} has no file that ends in {', '.join(READERS)}")
    chosen = [file for file in known if file.name.startswith(split)]
    if not chosen and split != DataConfig().split:
        names = ", ".join(file.name for file in known)
        raise ConfigError(f"no file of {directory} begins with the split {split!r}; it has {names}; {_TAKE_SOME}")
    return chosen or known


def _from_file(file: Path) -> Iterator[Found]:
    read = READERS.get(file.suffix)
    if read is None:
        raise ConfigError(f"`data.path`: {file} does not end in one of {', '.join(READERS)}")
    try:
        for unit, number, row in read(file):
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{file}, {unit} {number}: a row must be an object, such as {{'prompt': ..., 'answer': ...}}"
                )
            yield Found(row, str(file), unit, number)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error


# -- formats -----------------------------------------------------------------------------------------------------------

Numbered = Iterator[tuple[str, int, Any]]
"""Unit, number and row."""


def _jsonl(file: Path) -> Numbered:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield "line", number, decode_python_json(line)
            except Malformed as error:
                raise ConfigError(f"{file}, line {number}: not JSON: {error}") from error


def _json(file: Path) -> Numbered:
    try:
        rows = decode_python_json(file.read_bytes())
    except Malformed as error:
        hint = "; a file with an object a line must end in .jsonl" if "Extra data" in str(error) else ""
        raise ConfigError(f"{file}: not JSON: {error}{hint}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{file} must be a list of rows; a file with an object a line must end in .jsonl")
    yield from (("row", number, row) for number, row in enumerate(rows, 1))


def _csv(file: Path) -> Numbered:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    columns = len(reader.fieldnames or ())
                    raise ConfigError(
                        f"{file}, line {reader.line_num}: not the {columns} values that the first line names"
                    )
                yield "line", reader.line_num, row
        except csv.Error as error:
            raise ConfigError(f"{file}, line {reader.line_num}: not CSV: {error}") from error


def _parquet(file: Path) -> Numbered:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(f"{file} needs pyarrow, which is not installed: {INSTALL}") from error
    number, used, size = 0, 0, file.stat().st_size
    try:
        with ParquetFile(file) as table:
            groups = [table.metadata.row_group(at) for at in range(table.num_row_groups)]
            columns = [group.column(at) for group in groups for at in range(group.num_columns)]
            least = table.metadata.num_rows * VALUE_BYTES + sum(group.total_byte_size for group in groups)
            _check_size(file, size, least)
            packed = any(each.total_uncompressed_size > PACKED_TIMES * each.total_compressed_size for each in columns)
            for batch in table.iter_batches(1 if packed else BATCH_ROWS):
                rows = batch.to_pylist()
                _check_size(file, size, used := used + _memory_of(rows))
                for row in rows:
                    number += 1
                    yield "row", number, row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file} is no parquet file: {str(error).splitlines()[0]}") from error


def _check_size(source: Path | str, size: int, used: int) -> None:
    """Raise `ConfigError` for rows that take far more memory than their source has bytes: a few hundred can be gigabytes."""
    if used > max(FREE_BYTES, MOST_TIMES * size):
        raise ConfigError(
            f"`data.path`: {source} has {size} bytes and its rows take {used} and more, so it holds the same over and over: "
            "write the rows that you mean as .jsonl"
        )


def _memory_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return VALUE_BYTES + sum(map(_memory_of, value))
    return VALUE_BYTES + (len(value) if isinstance(value, str | bytes) else 0)


READERS: dict[str, Callable[[Path], Numbered]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


# -- the hub -----------------------------------------------------------------------------------------------------------


def _from_hub(data: DataConfig, path: str, split: str, file: Path) -> list[Found]:
    if not _HUB_ID.fullmatch(path) or Path(path).suffix in READERS:
        raise ConfigError(f"`data.path` = {path!r}: there is no file {file}")
    if "/" not in path:
        near = did_you_mean(path, [each.name for each in file.parent.glob("*")], "and an id on the hub is NAME/NAME")
        raise ConfigError(f"`data.path` = {path!r}: there is no file {file}; {near}")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"`data.path` = {path!r}: there is no file {file}, and to take it from the Hugging Face hub needs `datasets`, which "
            f"is not installed: {INSTALL}"
        ) from error
    found, used = [], 0
    try:
        rows = datasets.load_dataset(path, data.subset or None, split=split)
        for number, row in enumerate(rows, 1):
            _check_size(path, rows.download_size or 0, used := used + _memory_of(row))
            found.append(Found(dict(row), f"{path} ({split})", "row", number))
    except ConfigError:
        raise
    except Exception as error:  # whatever the hub, the network and the dataset's files raise
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"`data.path` = {path!r} cannot be loaded from the Hugging Face hub: {line}") from error
    if not found:
        raise ConfigError(f"{path} ({split}) has no rows")
    return found
