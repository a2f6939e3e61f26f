# SPDX-License-Identifier: Apache-2.0
"""What is made of a token."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

import pytest

from orchestra.transports.token import Token


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
        assert Token("0" * 32)._context(server=server).get_ca_certs()
    assert len(read) == 2
    assert all(path.startswith("/proc/self/fd/") for path in read)
