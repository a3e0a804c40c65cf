"""CURVE keys: which peers may connect to the learner, and how each end proves its identity.

Every connection has keys, loopback included. Each start of a run makes its own (`generate_keys`):
the learner keeps the server's, and the conductor hands the client's to the generators through Ray.
None of them is written to a file.

With `transport.keys` they are in a directory instead. It holds `learner.public`, `learner.secret`,
and the same two for each generator identity (`generator` by default). A file is one line, the key
in Z85. The learner needs its secret and every `*.public`: these are the keys it lets in. A
generator needs `learner.public` and its own secret. Secrets are created 0600, and refused
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from r3async.config import TransportConfig
from r3async.world import Files
from r3async.world.disk import SYSTEM_FILES

LEARNER_KEY_NAME = "learner"
GENERATOR_KEY_NAME = "generator"
KEY_CHARS = 40


class TransportError(RuntimeError):
    """A failure because of which sending or binding cannot continue; the message
    says what to change."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Keys of the learner.

    Attributes:
        secret_key: Its secret key, in Z85.
        allowed_public_keys: Public keys that may connect (raw, 32 bytes each).
    """

    secret_key: bytes = field(repr=False)
    allowed_public_keys: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Keys of a generator.

    Attributes:
        secret_key: Its secret key, in Z85.
        server_public_key: The learner's public key, in Z85.
    """

    secret_key: bytes = field(repr=False)
    server_public_key: bytes


def generate_keys() -> tuple[ServerKeys, ClientKeys]:
    """Return new keys of one learner and its generators."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    server = ServerKeys(server_secret, frozenset([z85.decode(client_public)]))
    return server, ClientKeys(client_secret, server_public)


def derive_public_key(secret: bytes) -> bytes:
    """Return the public key of a secret one, in Z85."""
    return zmq.curve_public(secret)


def decode_key(key: bytes) -> bytes:
    """Return the 32 bytes of a key in Z85."""
    return z85.decode(key)


def resolve_learner_keys(
    settings: TransportConfig, files: Files = SYSTEM_FILES
) -> tuple[ServerKeys, ClientKeys | None]:
    """Return the learner's keys, and those that it hands to generators: None if generators have
    their own from `transport.keys`.

    Raises `TransportError` that names the file.
    """
    return (
        (load_server_keys(Path(settings.keys), files), None) if settings.keys else generate_keys()
    )


def resolve_generator_keys(
    settings: TransportConfig, from_learner: ClientKeys | None, files: Files = SYSTEM_FILES
) -> ClientKeys:
    """Return the keys of `transport.keys`, if that is set, else those that the learner handed over
    (`from_learner`). Raises `TransportError`."""
    if settings.keys:
        return load_client_keys(Path(settings.keys), files=files)
    if from_learner is None:
        raise TransportError(
            "the learner has keys of `transport.keys`, and this generator does not: set it on both"
        )
    return from_learner


def create_key_files(
    directory: Path,
    names: tuple[str, ...] = (LEARNER_KEY_NAME, GENERATOR_KEY_NAME),
    files: Files = SYSTEM_FILES,
) -> list[Path]:
    """Create the directory (0700) and the keys in it that do not exist yet. Returns the files
    that were created.

    Never replaces a key: that would lock out everyone who has the old one. Raises `ValueError` for
    a name with other characters than letters, digits, - and _, before anything is created.
    """
    for name in names:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{name!r} is no name for a key: letters, digits, - and _")
    for path in [directory, *directory.parents][::-1]:
        if files.stat(path) is None:
            files.create_directory(path, 0o700 if path == directory else 0o777)
    made = []
    for name in names:
        secret_path = directory / f"{name}.secret"
        public_path = directory / f"{name}.public"
        if files.stat(secret_path) is None:
            _, secret = zmq.curve_keypair()
            _write_key_file(files, secret_path, secret, 0o600)
            made.append(secret_path)
        if files.stat(public_path) is None:
            _write_key_file(
                files,
                public_path,
                zmq.curve_public(_read_key_file(files, secret_path, secret=True)),
                0o644,
            )
            made.append(public_path)
    return made


def load_server_keys(directory: Path, files: Files = SYSTEM_FILES) -> ServerKeys:
    """Return the learner's keys from a directory. Raises `TransportError` that names the file."""
    secret = _read_key_file(files, directory / f"{LEARNER_KEY_NAME}.secret", secret=True)
    names = [
        name
        for name in files.list_names(directory)
        if name.endswith(".public") and name != f"{LEARNER_KEY_NAME}.public"
    ]
    return ServerKeys(
        secret, frozenset(z85.decode(_read_key_file(files, directory / name)) for name in names)
    )


def load_client_keys(
    directory: Path, name: str = GENERATOR_KEY_NAME, files: Files = SYSTEM_FILES
) -> ClientKeys:
    """Return a generator's keys from a directory. Raises `TransportError` that names the file."""
    secret = _read_key_file(files, directory / f"{name}.secret", secret=True)
    return ClientKeys(secret, _read_key_file(files, directory / f"{LEARNER_KEY_NAME}.public"))


def _write_key_file(files: Files, path: Path, key: bytes, mode: int) -> None:
    # The mode is the file's from its first moment, whatever the umask adds to it later.
    with files.open(path, exclusive=True, mode=mode) as file:
        file.append([key + b"\n"])


def _read_key_file(files: Files, path: Path, *, secret: bool = False) -> bytes:
    try:
        with files.open(path) as file:
            found = files.stat(path)
            if secret and (found is None or found.mode & 0o077):
                raise TransportError(f"{path} can be read by others: chmod 600 {path}")
            key = file.read(0, KEY_CHARS + 2).strip()
    except OSError as error:
        raise TransportError(
            f"cannot read the key {path}: {error.strerror}; "
            f"`python -m r3async.tools keys {path.parent}` makes it (transport.keys)"
        ) from error
    try:
        if len(z85.decode(key)) != 32:
            raise ValueError(f"{len(key)} characters, not {KEY_CHARS}")
    except Exception as error:
        raise TransportError(f"{path} holds no key: {error}") from error
    return key
