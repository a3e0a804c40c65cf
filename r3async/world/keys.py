"""CURVE keys: who may talk to the learner, and how an end shows which one it is.

Every connection has keys, loopback included. Each start of a run makes its own (`generate_keys`): the learner keeps the server's,
and the conductor hands the client's to the generators through Ray. None of them is written to a file.

Who sets `transport.keys` has them in a directory instead. It holds `learner.public`, `learner.secret`, and the same two
for each generator identity (`generator` if nothing else is asked for). A file is one line, the key in Z85. The learner
needs its secret and every `*.public`: these are the keys it lets in. A generator needs `learner.public` and its own
secret. Secrets are created 0600, and refused otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from r3async.config import TransportConfig
from r3async.world import Files
from r3async.world.real import REAL_WORLD

LEARNER_KEY_NAME = "learner"
GENERATOR_KEY_NAME = "generator"
KEY_CHARS = 40


class TransportError(RuntimeError):
    """Sending or binding cannot continue; the message says what to change."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The learner's: `allowed_public_keys` are the public keys (raw, 32 bytes) that may connect."""

    secret_key: bytes = field(repr=False)
    allowed_public_keys: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A generator's."""

    secret_key: bytes = field(repr=False)
    server_public_key: bytes


def generate_keys() -> tuple[ServerKeys, ClientKeys]:
    """Keys of one learner and its generators, never seen before."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    server = ServerKeys(server_secret, frozenset([z85.decode(client_public)]))
    return server, ClientKeys(client_secret, server_public)


def derive_public_key(secret: bytes) -> bytes:
    """That of a secret one, in Z85."""
    return zmq.curve_public(secret)


def decode_key(key: bytes) -> bytes:
    """32 bytes of a key in Z85."""
    return z85.decode(key)


def resolve_learner_keys(
    settings: TransportConfig, files: Files = REAL_WORLD.files
) -> tuple[ServerKeys, ClientKeys | None]:
    """The learner's keys, and those that it hands to generators: None where they have their own from `transport.keys`.

    Raises `TransportError` that names the file.
    """
    return (load_server_keys(Path(settings.keys), files), None) if settings.keys else generate_keys()


def resolve_generator_keys(
    settings: TransportConfig, from_learner: ClientKeys | None, files: Files = REAL_WORLD.files
) -> ClientKeys:
    """Those of `transport.keys`, if that is set, else what the learner `from_learner` over. Raises `TransportError`."""
    if settings.keys:
        return load_client_keys(Path(settings.keys), files=files)
    if from_learner is None:
        raise TransportError("the learner has keys of `transport.keys`, and this generator does not: set it on both")
    return from_learner


def create_key_files(
    directory: Path, names: tuple[str, ...] = (LEARNER_KEY_NAME, GENERATOR_KEY_NAME), files: Files = REAL_WORLD.files
) -> list[Path]:
    """Make the directory (0700) and the keys in it that do not exist yet. Returns the files that were made.

    Never replaces a key: that would lock out everyone who has the old one.
    """
    for path in [directory, *directory.parents][::-1]:
        if files.stat(path) is None:
            files.create_directory(path, 0o700 if path == directory else 0o777)
    made = []
    for name in names:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{name!r} is no name for a key: letters, digits, - and _")
        secret_path, public_path = directory / f"{name}.secret", directory / f"{name}.public"
        if files.stat(secret_path) is None:
            _, secret = zmq.curve_keypair()
            _write_key_file(files, secret_path, secret, 0o600)
            made.append(secret_path)
        if files.stat(public_path) is None:
            _write_key_file(
                files, public_path, zmq.curve_public(_read_key_file(files, secret_path, secret=True)), 0o644
            )
            made.append(public_path)
    return made


def load_server_keys(directory: Path, files: Files = REAL_WORLD.files) -> ServerKeys:
    """Raises `TransportError` that names the file."""
    secret = _read_key_file(files, directory / f"{LEARNER_KEY_NAME}.secret", secret=True)
    names = [
        name
        for name in files.list_names(directory)
        if name.endswith(".public") and name != f"{LEARNER_KEY_NAME}.public"
    ]
    return ServerKeys(secret, frozenset(z85.decode(_read_key_file(files, directory / name)) for name in names))


def load_client_keys(directory: Path, name: str = GENERATOR_KEY_NAME, files: Files = REAL_WORLD.files) -> ClientKeys:
    """Raises `TransportError` that names the file."""
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
            f"cannot read the key {path}: {error.strerror}; `r3async keys {path.parent}` makes it (transport.keys)"
        ) from error
    try:
        if len(z85.decode(key)) != 32:
            raise ValueError(f"{len(key)} characters, not {KEY_CHARS}")
    except Exception as error:
        raise TransportError(f"{path} holds no key: {error}") from error
    return key
