"""Which files of a folder are likely to hold keys or passwords, by their names: other jobs can read
a job's package."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

SECRET_DIRECTORIES = frozenset(
    {
        ".ssh",
        ".aws",
        ".azure",
        ".gcloud",
        ".gcp",
        ".oci",
        ".kube",
        ".gnupg",
        ".docker",
        ".huggingface",
        ".modal",
    }
    | {"secrets", ".secrets", "credentials", ".credentials"}
)
SECRET_FILES = (
    *(
        ".env*",
        "*.env",
        "*.env.*",
        "*.secret",
        "*.pem",
        "*.key",
        "*.p12",
        "*.pfx",
        "*.jks",
        "*.keystore",
        "*.kdbx",
    ),
    *(
        "id_rsa*",
        "id_dsa*",
        "id_ecdsa*",
        "id_ed25519*",
        "*.ppk",
        "*.ovpn",
        ".netrc",
        "_netrc",
        ".pypirc",
        ".npmrc",
    ),
    *(".git-credentials", ".pgpass", ".htpasswd", ".boto", ".s3cfg", "kubeconfig*", "*.kubeconfig"),
    *("secrets.*", "service-account*.json", "service_account*.json", "client_secret*.json"),
)
"""Patterns of file names, in any case of letters."""
_SECRET_WORDS = re.compile(r"token|secret|credential|passw|api.?key|private.?key|access.?key")
_TOKENIZER_FILES = re.compile(r"tokeniz|(special|added)_tokens")
HARMLESS_SUFFIXES = frozenset(
    {
        ".py",
        ".pyi",
        ".pyx",
        ".c",
        ".cc",
        ".cpp",
        ".cu",
        ".cuh",
        ".h",
        ".hpp",
        ".rs",
        ".go",
        ".js",
        ".ts",
        ".jinja",
    }
    | {".md", ".rst", ".parquet", ".arrow", ".jsonl", ".npy", ".npz", ".public"}
)
"""Suffixes of code, documents and rows: their names may have the words of secrets."""


def is_likely_secret(name: str) -> bool:
    """Return whether a file of that name is likely to hold a key or a password."""
    name = name.lower()
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in SECRET_FILES):
        return True
    if os.path.splitext(name)[1] in HARMLESS_SUFFIXES or _TOKENIZER_FILES.search(name):
        return False
    return _SECRET_WORDS.search(name) is not None


def find_likely_secrets(directory: Path, *, skipped: Collection[str] = ()) -> list[str]:
    """Return the likely secrets of a folder, relative to it and sorted; those that are
    directories end in `/`.

    Args:
        skipped: Names of directories that are not looked into.
    """
    return sorted(_walk(directory, "", frozenset(skipped), frozenset()))


def _walk(
    directory: Path, prefix: str, skipped: frozenset[str], above: frozenset[str]
) -> Iterator[str]:
    # Links are followed, as Ray follows them, and may lead in a circle.
    real = os.path.realpath(directory)
    try:
        names = [] if real in above else os.listdir(directory)
    except OSError:
        return
    for name in names:
        path = f"{prefix}{name}"
        if not os.path.isdir(directory / name):
            if is_likely_secret(name):
                yield path
        elif name.lower() in SECRET_DIRECTORIES:
            yield f"{path}/"
        elif name not in skipped:
            yield from _walk(directory / name, f"{path}/", skipped, above | {real})


def make_exclude_pattern(path: str) -> str:
    """Return the pattern, as in a `.gitignore`, that excludes this path of the folder
    and nothing else."""
    return "/" + re.sub(r"([\\*?\[\]! #])", r"\\\1", path)
