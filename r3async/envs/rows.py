"""Rows of the user's own: from files, directories of files, or the Hugging Face hub. Each is told by where it is."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from r3async.config import ConfigError, DataConfig, did_you_mean
from r3async.config.places import resolve_user_path
from r3async.untrusted import MalformedError, decode_python_json

Row = dict[str, Any]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
VALUE_OVERHEAD_BYTES = 64
"""Of memory that a value takes besides what is in it."""
PARQUET_BATCH_ROWS = 256
MAX_COMPRESSION_RATIO = 100
"""A column of a parquet file that is packed better than this is no text; its rows are made one by one."""
UNCHECKED_BYTES, MAX_EXPANSION_RATIO = 64 * 2**20, 1000
"""Rows of a parquet file, or of the hub, may take the former, or so many times the bytes of their source."""
_SUBSET_HINT = "`data.limit` takes the first rows, and `data.eval` a share or a file to evaluate"
INSTALL_HINT = "pip install 'r3async[data]'"


class LocatedRow(NamedTuple):
    """A row, and where it is: `file` and the number, from 1, of its `unit` (line or row)."""

    row: Row
    file: str
    unit: str
    number: int

    @property
    def location(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


def read_rows(data: DataConfig, path: str, split: str) -> list[LocatedRow]:
    """All rows of `path`, which is a file, a directory of files, or an id on the hub, in their order.

    Raises `ConfigError` that says what is missing, or names the line or row that is none.
    """
    found = resolve_user_path(path)
    if not found.exists():
        return _load_hub_dataset(data, path, split, found)
    if data.subset and path == data.path:
        raise ConfigError(
            f"`data.subset` = {data.subset!r}: {found} is not on the hub, and has no subsets: leave it out"
        )
    if found.is_dir():
        files = _list_split_files(found, split)
    elif split == DataConfig().split:
        files = [found]
    else:
        raise ConfigError(f"{found} is one file and has no split {split!r}: leave `data.split` out; {_SUBSET_HINT}")
    rows = [each for file in files for each in _read_file(file)]
    if not rows:
        raise ConfigError(f"{found} has no rows")
    return rows


def collect_file_stamps(place: Path) -> list[tuple[str, int, int]]:
    """Name, time and size of the files there: another list when one has changed."""
    files = [place, *sorted(place.iterdir())] if place.is_dir() else [place]
    return [(str(file), (found := file.stat()).st_mtime_ns, found.st_size) for file in files if file.exists()]


def _list_split_files(directory: Path, split: str) -> list[Path]:
    known = sorted(
        file for file in directory.iterdir() if file.suffix in FILE_READERS and not file.name.startswith(".")
    )
    if not known:
        raise ConfigError(f"`data.path`: {directory} has no file that ends in {', '.join(FILE_READERS)}")
    chosen = [file for file in known if file.name.startswith(split)]
    if not chosen and split != DataConfig().split:
        names = ", ".join(file.name for file in known)
        raise ConfigError(f"no file of {directory} begins with the split {split!r}; it has {names}; {_SUBSET_HINT}")
    return chosen or known


def _read_file(file: Path) -> Iterator[LocatedRow]:
    read = FILE_READERS.get(file.suffix)
    if read is None:
        raise ConfigError(f"`data.path`: {file} does not end in one of {', '.join(FILE_READERS)}")
    try:
        for unit, number, row in read(file):
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{file}, {unit} {number}: a row must be an object, such as {{'prompt': ..., 'answer': ...}}"
                )
            yield LocatedRow(row, str(file), unit, number)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error


# -- formats -----------------------------------------------------------------------------------------------------------

NumberedRows = Iterator[tuple[str, int, Any]]
"""Unit, number and row."""


def _read_jsonl(file: Path) -> NumberedRows:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield "line", number, decode_python_json(line)
            except MalformedError as error:
                raise ConfigError(f"{file}, line {number}: not JSON: {error}") from error


def _read_json(file: Path) -> NumberedRows:
    try:
        rows = decode_python_json(file.read_bytes())
    except MalformedError as error:
        hint = "; a file with an object a line must end in .jsonl" if "Extra data" in str(error) else ""
        raise ConfigError(f"{file}: not JSON: {error}{hint}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{file} must be a list of rows; a file with an object a line must end in .jsonl")
    yield from (("row", number, row) for number, row in enumerate(rows, 1))


def _read_csv(file: Path) -> NumberedRows:
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


def _read_parquet(file: Path) -> NumberedRows:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(f"{file} needs pyarrow, which is not installed: {INSTALL_HINT}") from error
    number, used, size = 0, 0, file.stat().st_size
    try:
        with ParquetFile(file) as table:
            groups = [table.metadata.row_group(at) for at in range(table.num_row_groups)]
            columns = [group.column(at) for group in groups for at in range(group.num_columns)]
            least = table.metadata.num_rows * VALUE_OVERHEAD_BYTES + sum(group.total_byte_size for group in groups)
            _check_expansion(file, size, least)
            packed = any(
                each.total_uncompressed_size > MAX_COMPRESSION_RATIO * each.total_compressed_size for each in columns
            )
            for batch in table.iter_batches(1 if packed else PARQUET_BATCH_ROWS):
                rows = batch.to_pylist()
                _check_expansion(file, size, used := used + _estimate_memory(rows))
                for row in rows:
                    number += 1
                    yield "row", number, row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file} is no parquet file: {str(error).splitlines()[0]}") from error


def _check_expansion(source: Path | str, size: int, used: int) -> None:
    """Raise `ConfigError` for rows that take far more memory than their source has bytes: a few hundred can be gigabytes."""
    if used > max(UNCHECKED_BYTES, MAX_EXPANSION_RATIO * size):
        raise ConfigError(
            f"`data.path`: {source} has {size} bytes and its rows take {used} and more, so it holds the same over and over: "
            "write the rows that you mean as .jsonl"
        )


def _estimate_memory(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return VALUE_OVERHEAD_BYTES + sum(map(_estimate_memory, value))
    return VALUE_OVERHEAD_BYTES + (len(value) if isinstance(value, str | bytes) else 0)


FILE_READERS: dict[str, Callable[[Path], NumberedRows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


# -- the hub -----------------------------------------------------------------------------------------------------------


def _load_hub_dataset(data: DataConfig, path: str, split: str, file: Path) -> list[LocatedRow]:
    if not _HUB_ID.fullmatch(path) or Path(path).suffix in FILE_READERS:
        raise ConfigError(f"`data.path` = {path!r}: there is no file {file}")
    if "/" not in path:
        near = did_you_mean(path, [each.name for each in file.parent.glob("*")], "and an id on the hub is NAME/NAME")
        raise ConfigError(f"`data.path` = {path!r}: there is no file {file}; {near}")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"`data.path` = {path!r}: there is no file {file}, and to take it from the Hugging Face hub needs `datasets`, which "
            f"is not installed: {INSTALL_HINT}"
        ) from error
    found, used = [], 0
    try:
        rows = datasets.load_dataset(path, data.subset or None, split=split)
        for number, row in enumerate(rows, 1):
            _check_expansion(path, rows.download_size or 0, used := used + _estimate_memory(row))
            found.append(LocatedRow(dict(row), f"{path} ({split})", "row", number))
    except ConfigError:
        raise
    except Exception as error:  # whatever the hub, the network and the dataset's files raise
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"`data.path` = {path!r} cannot be loaded from the Hugging Face hub: {line}") from error
    if not found:
        raise ConfigError(f"{path} ({split}) has no rows")
    return found
