# SPDX-License-Identifier: Apache-2.0
"""Which processes belong to a run: those that hold its token.

    token, at least 128 random bits as hexadecimal digits → scrypt → secret
    secret → Ed25519 key, and a certificate signed with it: the same bytes on every machine, so none is ever sent
    TLS 1.3 at both ends: each shows that certificate and accepts no other

A process without the token cannot finish the handshake. With `trusted` nothing is encrypted (any machine on the network
can read the messages, and a machine between two others can change them), but each end still proves to the other that it
has the token. A process that connects without the token sees the certificate, or a proof; both are functions of the
token, so it can try tokens on them, at the cost of one scrypt each. That is why tokens that may be guessed are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestra.errors import ConfigError, Problem
from orchestra.runs import files
from orchestra.worlds.sockets.addresses import accept

_NAME = "orchestra"
_NONCE = 32
_FORM = re.compile("[0-9a-f]{32,1024}")  # 4 bits each: at least 128
_LONGEST = 4096  # bytes of a file with one
_VARIETY = 8  # different digits; 32 random ones have fewer once in 25 million tokens
_HOW = "make one with `openssl rand -hex 32`"


def new() -> str:
    """Return a new token that cannot be guessed."""
    return secrets.token_hex(32)


def checked(text: str, source: str, value: str = "...") -> str:
    """Return a token in its usual form, or refuse one that may be guessed; `source` says where it was found."""
    text = text.strip().lower()
    if not _FORM.fullmatch(text):
        what = f"holds {len(text)} characters that are not" if text else "is empty, not"
        message = f"{what} a token of at least 128 random bits, which is 32 or more hexadecimal digits: {_HOW}"
    elif len(set(text)) < _VARIETY:
        message = f"has only {len(set(text))} different digits, so it is not random and can be guessed: {_HOW}"
    else:
        return text
    raise ConfigError([Problem(source, value, message)])


@lru_cache(maxsize=8)
def _stretched(text: str) -> bytes:
    """Derive the secret of a token, once per process: about 50 ms and 16 MiB, also for each guess of an attacker."""
    return hashlib.scrypt(text.encode(), salt=b"orchestra:token", n=1 << 14, r=8, p=1, maxmem=1 << 26, dklen=32)


def read(path: Path) -> str:
    """Read a token from a file that only its owner can read."""
    try:
        mode = path.stat().st_mode
        text = files.read_bytes(path, most=_LONGEST).decode("ascii")
    except OSError as error:
        raise ConfigError([Problem("token_file", str(path), f"cannot be read: {error}")]) from None
    except UnicodeDecodeError:
        text = "?"  # not a token
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = f"can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 {path}, or make a new token"
        raise ConfigError([Problem("token_file", str(path), message)])
    return checked(text, "token_file", str(path))


_PLAIN = "the other end does not encrypt: --trusted-network must be given on every machine, or on none"


class WrongToken(ConnectionError):
    """The other end has a different token: trying again would not help."""

    def __init__(self) -> None:
        super().__init__("the other end has a different token")


class _Secured(ssl.SSLSocket):
    """A socket that is closed whenever the handshake fails.

    While ssl makes one, it checks whether the socket is connected, and does not close it if it is not any more. So this
    class answers that it is connected; the handshake then fails, and ssl closes the socket.
    """

    def getpeername(self) -> Any:
        """Return the address of the other end once it is authenticated."""
        return None if self.version() is None else super().getpeername()


class Token:
    """The keys and proofs that are derived from a run's token."""

    def __init__(self, text: str, *, trusted: bool = False) -> None:
        self._secret = _stretched(checked(text, "token"))
        self.trusted = trusted
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def run(self) -> int:
        """Return a number that tells one run's messages from another's."""
        return int.from_bytes(self._derive(b"run")[:8], "little")

    def secure(self, sock: socket.socket, *, server: bool, until: float | None = None) -> socket.socket:
        """Authenticate the other end and encrypt the connection. Raises OSError if the other end has not the token."""
        if self.trusted:
            self._prove(sock, server=server, until=until)
            return sock
        context = self._context(server=server)
        _set_timeout(sock, until)  # ssl takes it for the whole handshake
        try:
            return context.wrap_socket(sock, server_side=server, server_hostname=None if server else _NAME)
        except ssl.SSLCertVerificationError:
            raise WrongToken from None
        except ssl.SSLError as error:
            if error.reason != "WRONG_VERSION_NUMBER":
                raise
            raise ConnectionError(_PLAIN) from None

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, purpose, "sha256")

    # Without encryption.

    def _prove(self, sock: socket.socket, *, server: bool, until: float | None) -> None:
        """Answer the other end's challenge and check its answer; an answer of one role is of no use in the other."""
        mine, names = os.urandom(_NONCE), (b"server", b"client")
        me, other = names if server else names[::-1]
        sock.sendall(mine)
        theirs = exactly(sock, _NONCE, until)
        sock.sendall(self._derive(b"proof:" + me + theirs + mine))
        if not hmac.compare_digest(exactly(sock, 32, until), self._derive(b"proof:" + other + mine + theirs)):
            raise WrongToken

    # With encryption.

    def _context(self, *, server: bool) -> ssl.SSLContext:
        if server not in self._contexts:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.sslsocket_class = _Secured
            context.verify_mode = ssl.CERT_REQUIRED
            context.check_hostname = not server
            if server:
                context.num_tickets = 0  # every connection is authenticated by itself
            key, certificate = self._identity()
            context.load_verify_locations(cadata=certificate.decode("ascii"))
            # ssl reads keys from files only: this one is in memory, and never on a disk, even if the process is killed.
            with os.fdopen(os.memfd_create(_NAME), "wb") as file:
                file.write(key + certificate)
                file.flush()
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
            self._contexts[server] = context
        return self._contexts[server]

    def _identity(self) -> tuple[bytes, bytes]:
        """Return a key and a certificate that depend on the token alone."""
        from cryptography import x509  # only for runs on many machines
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.from_private_bytes(self._derive(b"identity"))
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(int.from_bytes(self._derive(b"serial")[:8], "big") | 1)
            .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
            .not_valid_after(datetime(2120, 1, 1, tzinfo=UTC))  # a run's token ends with the run
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, None)
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return private, certificate.public_bytes(serialization.Encoding.PEM)


def exactly(sock: socket.socket, count: int, until: float | None = None) -> bytes:
    """Receive exactly `count` bytes; raise if that takes until after a moment of the monotonic clock."""
    found = bytearray()
    while len(found) < count:
        _set_timeout(sock, until)
        more = sock.recv(count - len(found))
        if not more:
            raise ConnectionResetError("the other end closed the connection during the handshake")
        found += more
    return bytes(found)


def _set_timeout(sock: socket.socket, until: float | None) -> None:
    if until is not None:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left)


Admit = Callable[[socket.socket, socket.socket], None]


class Unauthenticated:
    """Connections that have not authenticated yet. At most `room`; when full, the oldest is dropped."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._handles: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()

    def receive(self, listening: socket.socket, admit: Admit) -> None:
        """Accept a connection and authenticate it in a thread of its own, by `admit`.

        `admit` gets a second handle of the connection as well, since TLS takes over the first.
        """
        with contextlib.ExitStack() as failing:
            sock = failing.enter_context(accept(listening))
            handle = failing.enter_context(sock.dup())
            self._add(handle)
            failing.callback(self.remove, handle)
            threading.Thread(target=admit, args=(sock, handle), name="authenticate", daemon=True).start()
            failing.pop_all()  # the thread closes them

    def _add(self, handle: socket.socket) -> None:
        with self._lock:
            if len(self._handles) >= self._room:
                self._drop_oldest()
            self._handles[handle] = None

    def remove(self, handle: socket.socket) -> None:
        """Forget a connection: it has authenticated, or is closed."""
        with self._lock:
            self._handles.pop(handle, None)
            handle.close()

    def drop(self, count: int = 1) -> None:
        """Close the oldest connections."""
        with self._lock:
            for _ in range(min(count, len(self._handles))):
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._handles))
        del self._handles[oldest]
        with contextlib.suppress(OSError), oldest:
            oldest.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
