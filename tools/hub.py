"""Models by their name on the Hugging Face hub (`org/name`)."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from r3async.config import Config, ConfigError
from r3async.data.checkpoint_forms import list_weight_files

MODEL_FILE_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""Patterns of the files in a repository that a run reads."""
HUB_TIMEOUT_SECONDS = 10.0
"""Maximum seconds of a request to the hub."""


def is_hub_name(name: str) -> bool:
    """Return whether the name may be a model of the hub: it has that form, and no such
    directory exists here."""
    return (
        bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name))
        and not Path(name).exists()
    )


def resolve_hub_model(config: Config, *, download: bool) -> Config:
    """Return the configuration with a directory in place of a hub name in `model.path`.

    The directory is from the local cache, or with `download` from the network. Without `download`,
    a name that is not in the cache stays. Raises `ConfigError` with a remedy.
    """
    name = config.model.path
    if not name or not is_hub_name(name):
        return config
    directory = _find_cached(name)
    if download and (directory is None or not has_weights(directory)):
        directory = _download_model(name)
    if directory is None:
        return config
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, path=str(directory))
    )


def has_weights(directory: Path) -> bool:
    """Return whether all weight files of the index are there, or any if there is no index."""
    files = list_weight_files(directory)
    return bool(files) and all(file.exists() for file in files)


def _find_cached(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        return None


def _download_model(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        directory = Path(
            snapshot_download(
                name, allow_patterns=MODEL_FILE_PATTERNS, etag_timeout=HUB_TIMEOUT_SECONDS
            )
        )
    except Exception as error:
        # Of many kinds: no network, no such model, no permission, a full disk.
        raise _make_download_error(
            name, str(error).strip().partition("\n")[0] or type(error).__name__
        ) from error
    if not has_weights(directory):  # without a network, the cache is all there is
        raise _make_download_error(name, f"{directory} lacks files of weights")
    return directory


def _make_download_error(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"`model.path` = {name!r} is not a model directory (no config.json in it), and the hub's "
        f"model of that name cannot be fetched: {reason}. Where there is a network: hf download "
        f"{name} --local-dir {name.split('/')[1]}, and model.path={name.split('/')[1]}"
    )
