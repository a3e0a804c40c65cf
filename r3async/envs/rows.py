"""The user's rows, read from files or from the Hugging Face hub."""

from __future__ import annotations

import csv
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from r3async.config import ConfigError, DataConfig, did_you_mean
from r3async.config.paths import resolve_user_path
from r3async.envs.arrow_rows import Row, is_saved_dataset, read_dataset_rows, read_parquet_rows
from r3async.envs.passed_objects import get_pickled_object, is_object_name
from r3async.untrusted import MalformedError, decode_python_json

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SUBSET_HINT = "`data.limit` takes the first rows, and `data.eval` a share or a file to evaluate"
INSTALL_HINT = "pip install 'r3async[data]'"


class LocatedRow(NamedTuple):
    """A row and its location: `file`, and the number, from 1, of its `unit` (line or row)."""

    row: Row
    file: str
    unit: str
    number: int

    @property
    def location(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


def read_rows(data: DataConfig, path: str, split: str) -> list[LocatedRow]:
    """Return all rows of `path`, in order; `path` is a file, a directory of files, an id on the
    hub, or names rows that a program gave.

    Raises `ConfigError` that says what is missing, or names the line or row that is not valid.
    """
    if is_object_name(path):
        return _read_given_rows(path, split)
    found = resolve_user_path(path)
    if not found.exists():
        return _load_hub_dataset(data, path, split, found)
    if data.subset and path == data.path:
        raise ConfigError(
            f"`data.subset` = {data.subset!r}: {found} is not on the hub, and has no "
            "subsets: leave it out"
        )
    if found.is_dir():
        if is_saved_dataset(found):
            rows = _load_saved_dataset(found, split)
        else:
            rows = [each for file in _list_split_files(found, split) for each in _read_file(file)]
    elif split == DataConfig().split:
        rows = list(_read_file(found))
    else:
        raise ConfigError(
            f"{found} is one file and has no split {split!r}: leave `data.split` "
            f"out; {_SUBSET_HINT}"
        )
    if not rows:
        raise ConfigError(f"{found} has no rows")
    return rows


def collect_source_stamps(source: str) -> list[tuple[str, int, int]]:
    """Return name, modification time and size of the files at `source`, or the hash of rows that a
    program gave. The list differs when they have changed."""
    if is_object_name(source):
        return [(source, hash(get_pickled_object(source, "data")), 0)]
    place = resolve_user_path(source)
    inner = (
        place.rglob("*") if is_saved_dataset(place) else place.iterdir() if place.is_dir() else ()
    )
    files = [place, *sorted(inner)]
    return [
        (str(file), (found := file.stat()).st_mtime_ns, found.st_size)
        for file in files
        if file.exists()
    ]


_SPLIT_NAMES = (
    "train",
    "test",
    "validation",
    "valid",
    "val",
    "dev",
    "eval",
    "evaluation",
    "holdout",
    "heldout",
)
_SPLIT_WORD = re.compile(
    rf"(?<![a-z])(?:(?:train|test|valid)[a-z]*|{'|'.join(_SPLIT_NAMES)})(?:_[a-z]\w*)?(?![a-z])",
    re.IGNORECASE,
)
"""A word that names a split in the name of a file, with what qualifies it: `train`,
`testmini`, `train_prefs`."""


def _list_split_files(directory: Path, split: str) -> list[Path]:
    """Return the files of a directory whose names have `split` as a word; all files if no name has
    any split's word, and the training split is asked for."""
    known = sorted(
        file
        for file in directory.iterdir()
        if file.suffix in FILE_READERS and not file.name.startswith(".")
    )
    if not known:
        raise ConfigError(
            f"`data.path`: {directory} has no file that ends in {', '.join(FILE_READERS)}"
        )
    word = re.compile(
        rf"(?<![a-z]){re.escape(split)}(?P<qualifier>_[a-z]\w*)?(?![a-z])", re.IGNORECASE
    )
    named: dict[str, list[Path]] = {}
    for file in known:
        found = word.search(file.stem)
        if found and not (split in _SPLIT_NAMES and _names_another_split(file.stem, split)):
            named.setdefault((found["qualifier"] or "").lower(), []).append(file)
    if "" in named or len(named) == 1:
        return named.get("") or next(iter(named.values()))
    names = ", ".join(file.name for file in known)
    if named:
        splits = ", ".join(f"{split}{qualifier}" for qualifier in sorted(named))
        raise ConfigError(
            f"`data.split` = {split!r} is any of {splits} in {directory}: name one of them"
        )
    if split == DataConfig().split and not any(_SPLIT_WORD.search(file.stem) for file in known):
        return known
    raise ConfigError(
        f"no file of {directory} has the split {split!r} in its name; it has {names}: name a file "
        f"with `data.path`, or its split with `data.split`; {_SUBSET_HINT}"
    )


def _names_another_split(name: str, split: str) -> bool:
    words = {found[0].lower() for found in re.finditer(r"[a-z]+", name, re.IGNORECASE)}
    return bool(words.intersection(_SPLIT_NAMES) - {split})


def _read_file(file: Path) -> Iterator[LocatedRow]:
    read = FILE_READERS.get(file.suffix)
    if read is None:
        raise ConfigError(f"`data.path`: {file} does not end in one of {', '.join(FILE_READERS)}")
    try:
        for unit, number, row in read(file):
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{file}, {unit} {number}: a row must be an object, such as {{'prompt': "
                    "..., 'answer': ...}"
                )
            yield LocatedRow(row, str(file), unit, number)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error


# -- formats ---------------------------------------------------------------------------------------

NumberedRows = Iterator[tuple[str, int, Any]]
"""Iterator over rows, as unit, number and row."""


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
        hint = (
            "; a file with an object a line must end in .jsonl"
            if "Extra data" in str(error)
            else ""
        )
        raise ConfigError(f"{file}: not JSON: {error}{hint}") from error
    if not isinstance(rows, list):
        raise ConfigError(
            f"{file} must be a list of rows; a file with an object a line must end in .jsonl"
        )
    yield from (("row", number, row) for number, row in enumerate(rows, 1))


def _read_csv(file: Path) -> NumberedRows:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    columns = len(reader.fieldnames or ())
                    raise ConfigError(
                        f"{file}, line {reader.line_num}: not the {columns} values that the "
                        "first line names"
                    )
                yield "line", reader.line_num, row
        except csv.Error as error:
            raise ConfigError(f"{file}, line {reader.line_num}: not CSV: {error}") from error


def _read_parquet(file: Path) -> NumberedRows:
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{file} needs pyarrow, which is not installed: {INSTALL_HINT}")
    yield from (("row", number, row) for number, row in enumerate(read_parquet_rows(file), 1))


FILE_READERS: dict[str, Callable[[Path], NumberedRows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _read_given_rows(path: str, split: str) -> list[LocatedRow]:
    """Return the rows that a program gave r3async.train; they are lines of JSON."""
    if split != DataConfig().split:
        raise ConfigError(
            f"`data` was given as rows, which have no split {split!r}: leave it out; {_SUBSET_HINT}"
        )
    lines = get_pickled_object(path, "data").splitlines()
    try:
        return [
            LocatedRow(decode_python_json(line), "data", "row", number)
            for number, line in enumerate(lines, 1)
        ]
    except MalformedError as error:  # text that is no Unicode, or lists too deep
        raise ConfigError(f"`data`: a row cannot be kept as JSON: {error}") from error


# -- the library `datasets` ------------------------------------------------------------------------


def _load_saved_dataset(directory: Path, split: str) -> list[LocatedRow]:
    """Return the rows that `save_to_disk` of `datasets` wrote into a directory, of one split
    where it has several."""
    datasets = _import_datasets(
        f"`data.path` = {str(directory)!r} is a directory that `datasets` wrote"
    )
    try:
        saved = datasets.load_from_disk(str(directory))
    except Exception as error:  # the files may raise anything
        raise ConfigError(
            f"{directory} cannot be loaded by `datasets`: {_first_line(error)}"
        ) from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ConfigError(
                f"{directory} has no split {split!r}; it has {', '.join(saved)}; {_SUBSET_HINT}"
            )
        saved = saved[split]
    elif split not in (DataConfig().split, str(saved.split)):
        raise ConfigError(
            f"{directory} is one split and has no split {split!r}: leave it out; {_SUBSET_HINT}"
        )
    size = sum(file.stat().st_size for file in directory.rglob("*.arrow"))
    rows = read_dataset_rows(saved, directory, size)
    return [LocatedRow(row, str(directory), "row", number) for number, row in enumerate(rows, 1)]


def _load_hub_dataset(data: DataConfig, path: str, split: str, file: Path) -> list[LocatedRow]:
    if not _HUB_ID.fullmatch(path) or Path(path).suffix in FILE_READERS:
        raise ConfigError(f"`data.path` = {path!r}: there is no file {file}")
    if "/" not in path:
        near = did_you_mean(
            path, [each.name for each in file.parent.glob("*")], "and an id on the hub is NAME/NAME"
        )
        raise ConfigError(f"`data.path` = {path!r}: there is no file {file}; {near}")
    datasets = _import_datasets(
        f"`data.path` = {path!r}: there is no file {file}, and to take it from the Hugging Face hub"
    )
    try:
        found = datasets.load_dataset(path, data.subset or None, split=split)
        rows = list(read_dataset_rows(found, path, found.download_size or 0))
    except ConfigError:
        raise
    except Exception as error:  # the hub, the network and the dataset's files may raise anything
        name = path.split("/")[1]
        elsewhere = (
            f". Where there is a network: hf download {path} --repo-type dataset --local-dir "
            f"{name}, and set `data.path` to the folder of its files here, such as {name}/data"
        )
        raise ConfigError(
            (
                f"`data.path` = {path!r} cannot be loaded from the Hugging Face hub: "
                f"{_first_line(error)}"
            )
            + elsewhere * isinstance(error, ConnectionError)
        ) from error
    if not rows:
        raise ConfigError(f"{path} ({split}) has no rows")
    return [
        LocatedRow(row, f"{path} ({split})", "row", number) for number, row in enumerate(rows, 1)
    ]


def _import_datasets(purpose: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs `datasets`, which is not installed: {INSTALL_HINT}"
        ) from error
    return datasets


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
