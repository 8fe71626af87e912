"""CURVE keys of links between hosts: whom a binder lets in, and whom a dialer talks to.

A key set is a folder of ZeroMQ certificates. All binders (gateway, scheduler) share the server pair,
dialers (tokenizer, executor) have a client pair:

    server.key_secret   binders        server.key    dialers
    client.key_secret   dialers        client.key    binders

A binder lets in every public key in its folder's client*.key files.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

SERVER, CLIENT = "server", "client"
# Whose each file is, and so the folder it lies in where a key set is split.
_FILES = {"server.key_secret": "binder", "client.key": "binder", "client.key_secret": "dialer", "server.key": "dialer"}
# Far above any certificate; a wrong path may lead to anything.
_MAX_FILE_BYTES = 16_384
_LINE = re.compile(r'^\s*(public|secret)-key\s*=\s*"([0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40})"\s*$', re.MULTILINE)


class KeysError(OSError):
    """The keys cannot be used; the message names the setting and the file."""


class BinderKeys(NamedTuple):
    """`public_key` and `secret_key` in Z85 form; `clients` are the 32 bytes of each key that is let in."""

    public_key: bytes
    secret_key: bytes
    clients: frozenset[bytes]

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Before bind. Without a ZAP handler in the socket's context anybody would be let in."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"quartet")


class DialerKeys(NamedTuple):
    """All in Z85 form."""

    public_key: bytes
    secret_key: bytes
    server_key: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Before connect."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key)


def read_binder_keys(folder: str) -> BinderKeys:
    """Raises KeysError."""
    public_key, secret_key = _read_pair(Path(folder), SERVER)
    found = sorted(Path(folder).glob(f"{CLIENT}*.key"))
    if not found:
        raise KeysError(f"curve_keys: {folder} has no {CLIENT}.key, so nobody could dial in")
    return BinderKeys(public_key, secret_key, frozenset(z85.decode(_read_public(path)) for path in found))


def read_dialer_keys(folder: str) -> DialerKeys:
    """Raises KeysError."""
    public_key, secret_key = _read_pair(Path(folder), CLIENT)
    return DialerKeys(public_key, secret_key, _read_public(Path(folder) / f"{SERVER}.key"))


def generate(folder: str, *, split: bool = False) -> list[Path]:
    """Makes a new key set, readable by its owner only; raises KeysError rather than overwrite one.

    With `split`, in two folders in it: what binders need in binder/, what dialers need in dialer/.
    """
    written: list[Path] = []
    try:
        paths = _paths(folder, split)
        for path in paths.values():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for side in (SERVER, CLIENT):
            public_key, secret_key = zmq.curve_keypair()
            for path, secret in ((paths[f"{side}.key_secret"], secret_key), (paths[f"{side}.key"], b"")):
                _write(path, public_key, secret)
                written.append(path)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise KeysError(f"cannot make keys in {folder}: {error.filename or ''} {error.strerror or error}") from error
    return written


def has_keys(folder: str, *, split: bool = False) -> bool:
    """Whether a whole key set is there; raises KeysError when it is a part of one, or of several."""
    paths = _paths(folder, split)
    missing = [path for path in paths.values() if not path.exists()]
    if len(missing) == len(paths):
        return False
    if missing:
        raise KeysError(
            f"curve_keys: {folder} has a part of a key set, without {missing[0]}: remove it, or complete it"
        )
    binder = read_binder_keys(str(paths["server.key_secret"].parent))
    dialer = read_dialer_keys(str(paths["client.key_secret"].parent))
    if dialer.server_key != binder.public_key or z85.decode(dialer.public_key) not in binder.clients:
        raise KeysError(f"curve_keys: the keys in {folder} are of different key sets")
    return True


def _paths(folder: str, split: bool) -> dict[str, Path]:
    return {name: Path(folder, side if split else "", name) for name, side in _FILES.items()}


def answer_zap(frames: list[bytes], clients: frozenset[bytes]) -> tuple[list[bytes], str | None]:
    """What ZeroMQ's request (RFC 27) is answered, and the address of a peer that is not let in."""
    # [route, "", version, request_id, domain, address, routing_id, mechanism, credential]
    if len(frames) < 8:
        return [], None
    route, empty, version, request_id = frames[:4]
    known = len(frames) == 9 and frames[7] == b"CURVE" and frames[8] in clients
    code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
    refused = None if known else frames[5].decode(errors="replace")
    return [route, empty, version, request_id, code, text, b"", b""], refused


def _read_pair(folder: Path, side: str) -> tuple[bytes, bytes]:
    path = folder / f"{side}.key_secret"
    keys = _read(path, secret=True)
    if "secret" not in keys:
        raise _malformed(path, "secret-key")
    public_key = zmq.curve_public(keys["secret"])
    if keys.get("public", public_key) != public_key:
        raise KeysError(f"curve_keys: public-key and secret-key of {path} do not belong together")
    return public_key, keys["secret"]


def _read_public(path: Path) -> bytes:
    keys = _read(path, secret=False)
    if "public" not in keys:
        raise _malformed(path, "public-key")
    return keys["public"]


def _read(path: Path, *, secret: bool) -> dict[str, bytes]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            # As ssh has it: a file of someone else (a mounted secret) may be readable by this user's group.
            forbidden = 0o077 if status.st_uid == os.getuid() else 0o007
            if secret and stat.S_IMODE(status.st_mode) & forbidden:
                mode = stat.S_IMODE(status.st_mode)
                raise KeysError(f"curve_keys: others may read {path} (mode {mode:04o}): chmod 600 it")
            text = file.read(_MAX_FILE_BYTES).decode("ascii", errors="replace")
    except KeysError:
        raise
    except OSError as error:
        hint = "; quartet keys generate makes keys" if isinstance(error, FileNotFoundError) else ""
        raise KeysError(f"curve_keys: cannot read {path}: {error.strerror or error}{hint}") from None
    return {kind: key.encode() for kind, key in _LINE.findall(text)}


def _malformed(path: Path, key: str) -> KeysError:
    return KeysError(f'curve_keys: {path} is no key file: it has no line {key} = "..." with 40 characters of Z85')


def _write(path: Path, public_key: bytes, secret_key: bytes) -> None:
    lines = ["#   ZeroMQ CURVE certificate", "metadata", "curve", f'    public-key = "{public_key.decode()}"']
    if secret_key:
        lines.append(f'    secret-key = "{secret_key.decode()}"')
    with contextlib.closing(os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write("\n".join(lines) + "\n")
