# SPDX-License-Identifier: Apache-2.0
"""Who belongs to a run: whoever holds its token.

    token, at least 128 random bits as hexadecimal digits → scrypt → secret
    secret → Ed25519 key, and a certificate signed with it: the same bytes on every machine, so none is ever sent
    TLS 1.3 at both ends: each shows that certificate and accepts no other

A stranger without the token cannot finish the handshake. With `trusted` nothing is encrypted (everybody on the network
can read, and a machine between two others can change what they say), but each end still proves to the other that it has
the token. A stranger that connects sees the certificate, or a proof, and both are functions of the token: it can try
tokens on them, at the cost of one scrypt each. That is why tokens that may be guessed are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import socket
import ssl
import stat
import time
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestra.errors import ConfigError, Problem
from orchestra.runs import files

_NAME = "orchestra"
_NONCE = 32
_FORM = re.compile("[0-9a-f]{32,1024}")  # 4 bits each: at least 128
_LONGEST = 4096  # bytes of a file with one
_VARIETY = 8  # different digits; 32 random ones have fewer once in 25 million tokens
_HOW = "make one with `openssl rand -hex 32`"


def new() -> str:
    """Make a token that cannot be guessed."""
    return secrets.token_hex(32)


def checked(text: str, source: str, value: str = "...") -> str:
    """Give a token in its usual form, or refuse one that may be guessed; `source` says where it was found."""
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
    """Derive the secret of a token, once per process; each try of a stranger costs as much: about 50 ms and 16 MiB."""
    return hashlib.scrypt(text.encode(), salt=b"orchestra:token", n=1 << 14, r=8, p=1, maxmem=1 << 26, dklen=32)


def read(path: Path) -> str:
    """A token from a file that only its owner can read."""
    try:
        mode = path.stat().st_mode
        text = files.read_bytes(path, most=_LONGEST).decode("ascii")
    except OSError as error:
        raise ConfigError([Problem("token_file", str(path), f"cannot be read: {error}")]) from None
    except UnicodeDecodeError:
        text = "?"  # which is no token
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = f"can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 {path}, or make a new token"
        raise ConfigError([Problem("token_file", str(path), message)])
    return checked(text, "token_file", str(path))


_PLAIN = "the other end does not encrypt: --trusted-network must be said on every machine, or on none"


class WrongToken(ConnectionError):
    """Somebody answered, and has another token: to ask again would not help."""

    def __init__(self) -> None:
        super().__init__("the token there is another than the one here")


class _Secured(ssl.SSLSocket):
    """Is closed when the handshake fails, whenever that is.

    While it is made ssl asks whether it is connected, and forgets to close it if it is not any more. So it says that it
    is, and the handshake finds out: then ssl closes it.
    """

    def getpeername(self) -> Any:
        """Who is at the other end, once that is proven."""
        return None if self.version() is None else super().getpeername()


class Token:
    """What a token is used for."""

    def __init__(self, text: str, *, trusted: bool = False) -> None:
        self._secret = _stretched(checked(text, "token"))
        self.trusted = trusted
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def run(self) -> int:
        """A number that tells one run's messages from another's."""
        return int.from_bytes(self._derive(b"run")[:8], "little")

    def secure(self, sock: socket.socket, *, server: bool, until: float | None = None) -> socket.socket:
        """A connection to somebody who has the token as well. Raises OSError if the other end has not."""
        if self.trusted:
            self._prove(sock, server=server, until=until)
            return sock
        context = self._context(server=server)
        _hurry(sock, until)  # which ssl takes for the whole handshake
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
        """Each end answers the other's challenge; what one end says is of no use at the other."""
        mine, names = os.urandom(_NONCE), (b"server", b"client")
        me, other = names if server else names[::-1]
        sock.sendall(mine)
        theirs = exactly(sock, _NONCE, until)
        sock.sendall(self._derive(b"proof:" + me + theirs + mine))
        if not hmac.compare_digest(exactly(sock, 32, until), self._derive(b"proof:" + other + mine + theirs)):
            raise WrongToken

    # With it.

    def _context(self, *, server: bool) -> ssl.SSLContext:
        if server not in self._contexts:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.sslsocket_class = _Secured
            context.verify_mode = ssl.CERT_REQUIRED
            context.check_hostname = not server
            if server:
                context.num_tickets = 0  # every connection proves itself anew
            key, certificate = self._identity()
            context.load_verify_locations(cadata=certificate.decode("ascii"))
            # ssl reads keys from files only: this one is in memory, and on no disk even if we are killed now.
            with os.fdopen(os.memfd_create(_NAME), "wb") as file:
                file.write(key + certificate)
                file.flush()
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
            self._contexts[server] = context
        return self._contexts[server]

    def _identity(self) -> tuple[bytes, bytes]:
        """Key and certificate, the same for the same token wherever and whenever they are made."""
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
    """So many bytes; before a moment by the monotonic clock, however slowly they come."""
    found = bytearray()
    while len(found) < count:
        _hurry(sock, until)
        more = sock.recv(count - len(found))
        if not more:
            raise ConnectionResetError("the other end left during the handshake")
        found += more
    return bytes(found)


def _hurry(sock: socket.socket, until: float | None) -> None:
    if until is not None:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left)
