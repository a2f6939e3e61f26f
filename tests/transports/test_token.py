# SPDX-License-Identifier: Apache-2.0
"""What is made of a token."""

from __future__ import annotations

import hashlib
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from orchestra import Attached
from orchestra.errors import ConfigError
from orchestra.worlds.sockets import auth
from orchestra.worlds.sockets.auth import Token, WrongToken

SECRET = "0123456789abcdef" * 2


def test_keys_are_on_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it reads its key leaves none."""
    read: list[str] = []
    really = ssl.SSLContext.load_cert_chain

    def noting(context: ssl.SSLContext, path: str) -> None:
        read.append(path)
        really(context, path)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", noting)
    for server in (True, False):
        assert Token(SECRET)._context(server=server).get_ca_certs()
    assert len(read) == 2
    assert all(path.startswith("/proc/self/fd/") for path in read)


WEAK = {
    "short": ("correct", "holds 7 characters that are not a token"),
    "a password": ("Tr0ub4dor&3-and-some-more-words-of-it", "holds 37 characters that are not a token"),
    "124 bits": (SECRET[:31], "holds 31 characters that are not a token"),
    "all alike": ("0" * 64, "has only 1 different digits"),
    "a pattern": ("1234" * 16, "has only 4 different digits"),
}


@pytest.mark.parametrize("kind", WEAK)
def test_a_token_that_may_be_guessed_is_refused_wherever_it_comes_from(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the message says how to make one, and does not repeat the secret."""
    text, told = WEAK[kind]
    file = tmp_path / "token"
    file.write_text(text + "\n")
    file.chmod(0o600)
    monkeypatch.setenv("ORCHESTRA_TOKEN", text)
    sources: dict[str, Callable[[], object]] = {
        "token_file": lambda: auth.read(file),
        "ORCHESTRA_TOKEN": Attached().token,
        "token": lambda: Token(text),
    }
    for source, call in sources.items():
        with pytest.raises(ConfigError) as caught:
            call()
        said = str(caught.value)
        assert told in said
        assert source in said
        assert "openssl rand -hex 32" in said
        assert text not in said


@pytest.mark.parametrize("text", [SECRET, SECRET.upper() + "\n", auth.new()], ids=["lower", "upper", "new"])
def test_what_is_generated_is_taken(text: str) -> None:
    assert Token(text).run() == Token(text.strip().lower()).run()


def test_all_that_a_stranger_sees_is_made_of_what_scrypt_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each guess costs a scrypt, a process pays once: for certificate, key, proof and the number of the run."""
    asked: list[dict[str, Any]] = []
    really = hashlib.scrypt

    def noting(password: bytes, **given: Any) -> bytes:
        asked.append(given)
        return really(password, **given)

    monkeypatch.setattr(hashlib, "scrypt", noting)
    text = auth.new()
    first, second = Token(text), Token(text, trusted=True)
    assert len(asked) == 1
    assert asked[0]["n"] * asked[0]["r"] * 128 >= 1 << 24  # bytes of memory
    expected = really(text.encode(), **asked[0])
    assert first._secret == second._secret == expected
    monkeypatch.setattr(auth, "_stretched", lambda text: bytes(32))  # as if scrypt gave this
    other = Token(text)
    assert other.run() != first.run()
    seen = [_certificate(made) for made in (first, other)]
    assert seen[0].serial_number != seen[1].serial_number
    assert seen[0].public_key() != seen[1].public_key()
    with pytest.raises(WrongToken):
        prove(second, Token(text, trusted=True))
    prove(second, second)


def prove(one: Token, other: Token) -> None:
    """Let two ends of a connection prove to each other that they have the token."""
    ends = socket.socketpair()
    with ends[0], ends[1], ThreadPoolExecutor(1) as thread:
        until = time.monotonic() + 30
        answer = thread.submit(one.secure, ends[0], server=True, until=until)
        other.secure(ends[1], server=False, until=until)
        answer.result()


def _certificate(made: Token) -> x509.Certificate:
    return x509.load_pem_x509_certificate(made._identity()[1])
