"""Weights on disk, each under `tinker://MODEL/KIND/NAME`.

Clients save `weights`, with the optimizer, and `sampler_weights`. The server saves `states`, from
which a model is restored, and `snapshots`, which engines that start again read. Each is a
directory, written aside and renamed: it is whole, or it is not there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from r3async.tinker.protocol import ApiError, LoraConfig
from r3async.untrusted import MalformedError, decode_json
from r3async.world import Files
from r3async.world.files import make_directory, read_file, replace_directory, replace_file
from r3async.world.real import REAL_WORLD

WeightsKind = Literal["weights", "sampler_weights", "states", "snapshots"]
DESCRIPTION_FILE = "tinker.json"
PREFIX = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:-]{0,199}")


class SavedWeights(msgspec.Struct, frozen=True):
    """The description of saved weights. `seq_id` is the number of the request that saved them, or
    the last one that a state has in it."""

    model_id: str
    kind: WeightsKind
    name: str
    base_model: str
    lora: LoraConfig | None
    version: int
    seq_id: int
    created_at: float
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None
    overwrite: bool = False

    @property
    def tinker_path(self) -> str:
        return f"{PREFIX}{self.model_id}/{self.kind}/{self.name}"

    def describe(self) -> dict[str, Any]:
        """Return what the SDK reads of weights before it loads them."""
        return {
            "base_model": self.base_model,
            "is_lora": self.lora is not None,
            "lora_rank": None if self.lora is None else self.lora.rank,
            "train_unembed": None if self.lora is None else self.lora.train_unembed,
            "train_mlp": None if self.lora is None else self.lora.train_mlp,
            "train_attn": None if self.lora is None else self.lora.train_attn,
        }


class WeightsDirectory:
    """All saved weights, in `directory`. Methods that take a `SavedWeights`, or return some,
    block."""

    def __init__(self, directory: Path, *, files: Files = REAL_WORLD.files):
        self._directory = directory
        self._disk = files

    def locate(self, tinker_path: str) -> Path:
        return self._directory / tinker_path.removeprefix(PREFIX)

    def begin(self, saved: SavedWeights) -> Path | None:
        """Return a new directory for the files of `saved`; None if the same request saved them
        already. Raises `ApiError` if the name is taken."""
        if not _NAME.fullmatch(saved.name) or saved.name.endswith(".partial"):
            raise ApiError(f"{saved.name!r} is no name: letters, digits, '.', '_' and '-'")
        target = self.locate(saved.tinker_path)
        found = self._read(target)
        if found is not None and found.seq_id == saved.seq_id:
            return None
        if found is not None and not saved.overwrite:
            raise ApiError(f"{saved.tinker_path} is there already: save with overwrite=True")
        partial = target.with_name(f"{saved.name}.partial")
        self._disk.remove_tree(partial)
        make_directory(partial, files=self._disk)
        return partial

    def commit(self, saved: SavedWeights, partial: Path) -> None:
        """Make what was written into `partial` the saved weights."""
        replace_file(partial / DESCRIPTION_FILE, msgspec.json.encode(saved), files=self._disk)
        replace_directory(partial, self.locate(saved.tinker_path), files=self._disk)

    def find(self, tinker_path: str, kind: WeightsKind, now: float) -> SavedWeights:
        """Return saved weights. Raises `ApiError` for a path that names none of that kind."""
        parts = tinker_path.removeprefix(PREFIX).split("/")
        if not tinker_path.startswith(PREFIX) or len(parts) != 3 or parts[1] != kind:
            raise ApiError(f"{tinker_path!r} is no path {PREFIX}MODEL/{kind}/NAME")
        saved = None
        if _MODEL_ID.fullmatch(parts[0]) and _NAME.fullmatch(parts[2]):
            saved = self._read(self.locate(tinker_path))
        if saved is None or (saved.expires_at is not None and saved.expires_at < now):
            raise ApiError(f"there is nothing at {tinker_path}", status=404)
        return saved

    def list_all(self, now: float, model_id: str | None = None) -> list[SavedWeights]:
        """Return all that clients saved, newest first. What has expired is removed."""
        models = self._disk.list_names(self._directory) if model_id is None else [model_id]
        kinds: tuple[WeightsKind, ...] = ("weights", "sampler_weights")
        found = []
        for model in filter(_MODEL_ID.fullmatch, models):
            for saved in [saved for kind in kinds for saved in self.list_kind(model, kind)]:
                if saved.expires_at is not None and saved.expires_at < now:
                    self.delete(saved.tinker_path)
                else:
                    found.append(saved)
        return sorted(found, key=lambda saved: -saved.created_at)

    def list_kind(self, model_id: str, kind: WeightsKind) -> list[SavedWeights]:
        """Return the saved weights of one kind, oldest first."""
        parent = self._directory / model_id / kind
        found = [self._read(parent / name) for name in self._disk.list_names(parent)]
        return sorted(filter(None, found), key=lambda saved: saved.created_at)

    def delete(self, tinker_path: str) -> None:
        """Remove saved weights, or with `MODEL/KIND` all of a kind."""
        self._disk.remove_tree(self.locate(tinker_path))

    def _read(self, directory: Path) -> SavedWeights | None:
        path = directory / DESCRIPTION_FILE
        if not _NAME.fullmatch(directory.name) or directory.suffix == ".partial":
            return None
        try:
            return decode_json(read_file(path, files=self._disk), SavedWeights)
        except (FileNotFoundError, MalformedError):
            return None
