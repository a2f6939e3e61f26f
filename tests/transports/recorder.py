# SPDX-License-Identifier: Apache-2.0
"""A listener for tests of the messenger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Recorder:
    """Keeps what a messenger tells it."""

    def __init__(self, heard: Callable[[dict[str, Any]], None] = lambda message: None) -> None:
        self._heard = heard
        self.pieces: list[bytes] = []

    def on_control(self, source: int, message: dict[str, Any]) -> None:
        self._heard(message)

    def on_file_piece(self, source: int, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_waiting(self) -> None: ...

    def on_reconnected(self, node: int, seconds: float, cause: str) -> None: ...
