"""Weights that clients save, under `tinker://MODEL/weights/NAME` with the optimizer, and
`tinker://MODEL/sampler_weights/NAME` for sampling.

Each is a directory, written aside and renamed: it is whole, or it is not there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from r3async.tinker.protocol import ApiError, LoraConfig
from r3async.untrusted import MalformedError, decode_json
from r3async.world import Files
from r3async.world.files import make_directory, read_file
from r3async.world.real import REAL_WORLD

WeightsKind = Literal["weights", "sampler_weights"]
DESCRIPTION_FILE = "tinker.json"
PREFIX = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:-]{0,199}")


class SavedWeights(msgspec.Struct, frozen=True):
    """The description of saved weights. `seq_id` is the number of the request that saved them."""

    tinker_path: str
    model_id: str
    kind: WeightsKind
    name: str
    base_model: str
    lora: LoraConfig | None
    version: int
    seq_id: int | None
    created_at: float
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None

    def describe(self) -> dict[str, Any]:
        """Return what the SDK reads of weights before it loads them."""
        lora = self.lora
        return {
            "base_model": self.base_model,
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora.rank,
            "train_unembed": None if lora is None else lora.train_unembed,
            "train_mlp": None if lora is None else lora.train_mlp,
            "train_attn": None if lora is None else lora.train_attn,
        }


class WeightsDirectory:
    """All saved weights, in `directory`. All methods block."""

    def __init__(self, directory: Path, *, files: Files = REAL_WORLD.files):
        self._directory = directory
        self._disk = files

    def locate(self, saved: SavedWeights) -> Path:
        return self._directory / saved.model_id / saved.kind / saved.name

    def begin(self, saved: SavedWeights, *, overwrite: bool) -> Path | None:
        """Return a new directory for the files of `saved`; None if the same request saved them
        already. Raises `ApiError` if the name is taken."""
        if not _NAME.fullmatch(saved.name):
            raise ApiError(f"{saved.name!r} is no name: letters, digits, '.', '_' and '-'")
        found = self._read(self.locate(saved))
        if found is not None and not overwrite:
            if found.seq_id is not None and found.seq_id == saved.seq_id:
                return None
            raise ApiError(f"{saved.tinker_path} is there already: save with overwrite=True")
        partial = self.locate(saved).with_name(saved.name + ".partial")
        self._disk.remove_tree(partial)
        make_directory(partial, files=self._disk)
        return partial

    def commit(self, saved: SavedWeights, partial: Path) -> None:
        """Make what was written into `partial` the saved weights."""
        target = self.locate(saved)
        with self._disk.open(partial / DESCRIPTION_FILE, create=True) as file:
            file.append([msgspec.json.encode(saved)])
            file.fsync()
        self._disk.fsync_directory(partial)
        self._disk.remove_tree(target)
        self._disk.rename(partial, target)
        self._disk.fsync_directory(target.parent)

    def find(self, tinker_path: str, kind: WeightsKind, now: float) -> SavedWeights:
        """Return saved weights. Raises `ApiError` for a path that names none of that kind."""
        parts = tinker_path.removeprefix(PREFIX).split("/")
        if not tinker_path.startswith(PREFIX) or len(parts) != 3 or parts[1] != kind:
            raise ApiError(f"{tinker_path!r} is no path {PREFIX}MODEL/{kind}/NAME")
        saved = None
        if _MODEL_ID.fullmatch(parts[0]) and _NAME.fullmatch(parts[2]):
            saved = self._read(self._directory / parts[0] / parts[1] / parts[2])
        if saved is None or (saved.expires_at is not None and saved.expires_at < now):
            raise ApiError(f"there is nothing at {tinker_path}", status=404)
        return saved

    def list_all(self, now: float, model_id: str | None = None) -> list[SavedWeights]:
        """Return all saved weights, newest first. What has expired is removed."""
        models = self._disk.list_names(self._directory) if model_id is None else [model_id]
        found = []
        for model in filter(_MODEL_ID.fullmatch, models):
            for kind in ("weights", "sampler_weights"):
                parent = self._directory / model / kind
                for name in filter(_NAME.fullmatch, self._disk.list_names(parent)):
                    saved = self._read(parent / name)
                    if saved is None:
                        continue
                    if saved.expires_at is not None and saved.expires_at < now:
                        self.delete(saved)
                        continue
                    found.append(saved)
        return sorted(found, key=lambda saved: -saved.created_at)

    def delete(self, saved: SavedWeights) -> None:
        self._disk.remove_tree(self.locate(saved))

    def _read(self, directory: Path) -> SavedWeights | None:
        path = directory / DESCRIPTION_FILE
        if directory.suffix == ".partial" or self._disk.stat(path) is None:
            return None
        try:
            return decode_json(read_file(path, files=self._disk), SavedWeights)
        except MalformedError:
            return None
