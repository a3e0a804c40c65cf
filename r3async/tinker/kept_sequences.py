"""Sampled sequences with their routes and the version of their weights, kept until they are trained
on.

Clients get back tokens and log-probs, and send tokens to be trained. What they cannot carry is kept
here under the sequence's id. From SDK 0.38 on, a datum names the sequences that its tokens come
from (provenance spans); without spans they are found by their tokens. Either way the tokens decide:
a row of routes belongs to a token only if all tokens up to it are those of the sequence.

Sequences are appended to files of records (`container.py`), with packed routes; memory has an index
and the tokens. Beyond `max_bytes` the oldest file goes. All methods block, and belong to one thread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from r3async.data.container import FramedRecord, RecordFormat, map_file
from r3async.data.tokens import UNSAMPLED_VERSION, Sample, TokenTable, Trajectory
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.data.wire_frames import WireError
from r3async.tinker.protocol import ApiError, Datum, ProvenanceSpan
from r3async.world import Buffer, Files
from r3async.world.files import make_directory
from r3async.world.real import REAL_WORLD

KEPT_FORMAT = RecordFormat(b"r3tinkr1")
_FILE_NAME = re.compile(r"kept-(\d{8,})\.sequences")
FILES_KEPT = 16
"""Files that `max_bytes` are divided into."""


class KeptSequence(NamedTuple):
    """A sampled sequence with its routes and version.

    Attributes:
        model_id: The model that sampled it; the base model has the empty one.
        version: The version of that model's weights.
        tokens: int32 `[P + T]`, the first `prompt_length` of which are the prompt.
        routes: `[P + T - 1, layers, top_k]`; None if nothing recorded them.
        recorded: bool `[P + T - 1]`.
    """

    sequence_id: str
    model_id: str
    version: int
    prompt_length: int
    tokens: np.ndarray
    routes: np.ndarray | None
    recorded: np.ndarray


class _FilePlace(NamedTuple):
    """The place of a sequence in a file, and the keys by which it is found."""

    path: Path
    offset: int
    length: int
    tokens: np.ndarray
    prompt_length: int
    prompt_digest: int


class RoutedDatum(NamedTuple):
    """A datum with what is known of its tokens.

    Attributes:
        routes: `[n, layers, top_k]`; None where no token has any.
        recorded: bool `[n]`: the rows of `routes` that are a record.
        versions: int32 `[n]`: the version of this model that sampled each target;
            `UNSAMPLED_VERSION` where none did, or where it is not known.
    """

    datum: Datum
    routes: np.ndarray | None
    recorded: np.ndarray
    versions: np.ndarray


class KeptSequences:
    """The sequences in `directory`, those of earlier processes too."""

    def __init__(self, directory: Path, *, max_bytes: int, files: Files = REAL_WORLD.files):
        self._directory = directory
        self._max_bytes = max_bytes
        self._disk = files
        self._places: dict[str, _FilePlace] = {}
        self._by_prompt: dict[int, list[str]] = {}
        self._prompt_lengths: Counter[int] = Counter()
        self._files: dict[Path, int] = {}
        """The size of each file's whole records, oldest file first."""
        make_directory(directory, files=files)
        for name in files.list_names(directory):
            if _FILE_NAME.fullmatch(name):
                self._read_index(directory / name)
        self._current = self._next_path()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(self._files.values())

    def put(self, kept: KeptSequence) -> None:
        """Keep a sequence, which survives this process from then on. Raises `OSError`."""
        size = self._files.get(self._current, 0)
        if size >= self._max_bytes // FILES_KEPT:
            self._current = self._next_path()
            size = 0
        offset, length = KEPT_FORMAT.append_record(
            self._current, _encode(kept), fsync=False, valid_bytes=size, files=self._disk
        )
        self._files[self._current] = offset + length
        self._add_place(kept, self._current, offset, length)
        while self.nbytes > self._max_bytes and len(self._files) > 1:
            self._drop_file(next(iter(self._files)))

    def find(self, sequence_id: str) -> KeptSequence | None:
        """Return a sequence; None if it is not known, or no more."""
        place = self._places.get(sequence_id)
        if place is None:
            return None
        view = map_file(place.path, place.offset, place.length, files=self._disk)
        record = next(KEPT_FORMAT.iter_records(view))
        return _decode(record) if isinstance(record, FramedRecord) else None

    def match_datum(self, index: int, datum: Datum, model_id: str) -> RoutedDatum:
        """Return a datum with the routes of its tokens. Raises `ApiError` for a span that names
        other tokens than the datum has."""
        targets = datum.inputs["target_tokens"]
        whole = np.append(datum.tokens, targets[-1] if targets.ndim == 1 else -1)
        if datum.token_spans or datum.target_spans:
            self._check_spans(index, "model_input", datum.token_spans, datum.tokens)
            self._check_spans(index, "target_tokens", datum.target_spans, targets)
            spans = [*datum.token_spans, *datum.target_spans]
            names: Iterable[str] = dict.fromkeys(span.sequence_id for span in spans)
        else:
            names = self._find_by_tokens(whole)
        length = len(datum.tokens)
        routes: np.ndarray | None = None
        recorded = np.zeros(length, bool)
        versions = np.full(length, UNSAMPLED_VERSION, np.int32)
        shifted = targets.ndim == 1 and np.array_equal(targets[:-1], datum.tokens[1:])
        for kept in map(self.find, names):
            if kept is None:
                continue
            common = _common_prefix(whole, kept.tokens)
            if shifted and kept.model_id == model_id:
                sampled = versions[max(kept.prompt_length - 1, 0) : max(common - 1, 0)]
                sampled[sampled == UNSAMPLED_VERSION] = kept.version
            if kept.routes is None:
                continue
            # The first sequence that fed a position owns its row, as in an episode of several turns.
            rows = min(common, length, len(kept.recorded))
            new = kept.recorded[:rows] & ~recorded[:rows]
            found = kept.routes[:rows]
            if routes is None:
                routes = np.zeros((length, *found.shape[1:]), found.dtype)
                routes[:] = np.arange(found.shape[-1], dtype=found.dtype)
            routes[:rows][new] = found[new]
            recorded[:rows] |= new
        return RoutedDatum(datum, routes, recorded, versions)

    def _check_spans(
        self, index: int, field: str, spans: Sequence[ProvenanceSpan], tokens: np.ndarray
    ) -> None:
        if not spans:
            return
        where = f"datum {index}: the provenance spans of {field}"
        if tokens.ndim != 1 or sum(span.length for span in spans) != len(tokens):
            raise ApiError(f"{where} do not add up to its {len(tokens)} tokens")
        at = 0
        for span in spans:
            claimed = tokens[at : at + span.length]
            at += span.length
            kept = self._places.get(span.sequence_id)
            if kept is None:
                continue
            begin = span.offset + (kept.prompt_length if span.sampled else 0)
            end = len(kept.tokens) if span.sampled else kept.prompt_length
            if not np.array_equal(claimed, kept.tokens[begin:end][: span.length]):
                raise ApiError(
                    f"{where} name tokens {span.offset} to {span.offset + span.length} of "
                    f"{'what was sampled as' if span.sampled else 'the prompt of'} "
                    f"{span.sequence_id}, which are other tokens"
                )

    def _find_by_tokens(self, whole: np.ndarray) -> list[str]:
        """Return the sequences whose prompt begins the datum and whose sampled tokens follow in it,
        shorter prompts first. Of equal ones the newest."""
        found = []
        data = whole.astype(np.int32)
        for length in sorted(n for n in self._prompt_lengths if n < len(data)):
            for name in reversed(self._by_prompt.get(_digest(data[:length]), [])):
                kept = self._places[name]
                if kept.prompt_length == length and _common_prefix(data, kept.tokens) == min(
                    len(data), len(kept.tokens)
                ):
                    found.append(name)
                    break
        return found

    # -- files -------------------------------------------------------------------------------------

    def _next_path(self) -> Path:
        newest = max(self._files, default=None)
        found = None if newest is None else _FILE_NAME.fullmatch(newest.name)
        return self._directory / f"kept-{int(found[1]) + 1 if found else 0:08d}.sequences"

    def _read_index(self, path: Path) -> None:
        self._files[path] = 0
        for record in KEPT_FORMAT.iter_records(map_file(path, files=self._disk)):
            # A file that a killed process left ends with half a record.
            kept = _decode(record) if isinstance(record, FramedRecord) else None
            if kept is None or not isinstance(record, FramedRecord):
                break
            length = sum(map(len, KEPT_FORMAT.encode_record(record.frames)))
            self._files[path] = record.offset + length
            self._add_place(kept, path, record.offset, length)

    def _add_place(self, kept: KeptSequence, path: Path, offset: int, length: int) -> None:
        name = kept.sequence_id
        digest = _digest(kept.tokens[: kept.prompt_length])
        self._remove_place(name)
        tokens = kept.tokens.astype(np.int32)  # a copy, which keeps no file mapped
        self._places[name] = _FilePlace(path, offset, length, tokens, kept.prompt_length, digest)
        self._by_prompt.setdefault(digest, []).append(name)
        self._prompt_lengths[kept.prompt_length] += 1

    def _remove_place(self, sequence_id: str) -> None:
        place = self._places.pop(sequence_id, None)
        if place is None:
            return
        names = self._by_prompt[place.prompt_digest]
        names.remove(sequence_id)
        if not names:
            del self._by_prompt[place.prompt_digest]
        self._prompt_lengths[place.prompt_length] -= 1
        if not self._prompt_lengths[place.prompt_length]:
            del self._prompt_lengths[place.prompt_length]

    def _drop_file(self, path: Path) -> None:
        for sequence_id in [name for name, place in self._places.items() if place.path == path]:
            self._remove_place(sequence_id)
        self._disk.remove(path)
        del self._files[path]


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _digest(tokens: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int32).data)


def _encode(kept: KeptSequence) -> Sequence[Buffer]:
    """Return a sequence as the frames of a trajectory, whose generator is the model."""
    sampled = np.arange(len(kept.tokens)) >= kept.prompt_length
    columns: dict[str, np.ndarray] = {
        "loss_mask": sampled,
        "policy_version": np.where(sampled, kept.version, UNSAMPLED_VERSION).astype(np.int32),
    }
    if kept.routes is not None and len(kept.routes):
        # The last token was not fed forward. Its row stands for none.
        columns["routed_experts"] = np.concatenate([kept.routes, kept.routes[-1:]])
        columns["routing_recorded"] = np.append(kept.recorded, False)
    table = TokenTable.from_tokens(kept.tokens).with_columns(**columns)
    sample = Sample(kept.sequence_id, table)
    trajectory = Trajectory(kept.sequence_id, 0, 0, 0, kept.model_id, "", [], [sample])
    return encode_trajectory(trajectory, routes="bits")


def _decode(record: FramedRecord) -> KeptSequence | None:
    """Return the sequence of a record; None for bytes that are none, which only a disk can have
    made of it."""
    try:
        trajectory = decode_trajectory(record.frames)
    except WireError:
        return None
    table = trajectory.samples[0].table
    recorded = np.zeros(len(table) - 1, bool)
    routes = None
    if "routed_experts" in table:
        routes = table["routed_experts"][:-1]
        recorded = table["routing_recorded"][:-1]
    return KeptSequence(
        trajectory.trajectory_id,
        trajectory.generator_id,
        trajectory.newest_version,
        int((~table["loss_mask"]).sum()),
        table["token_ids"],
        routes,
        recorded,
    )
