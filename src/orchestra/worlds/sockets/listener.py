# SPDX-License-Identifier: Apache-2.0
"""The interface by which a messenger reports to the process that it belongs to."""

from __future__ import annotations

from typing import Any, Protocol


class Listener(Protocol):
    """The process that a messenger belongs to: it learns from the messenger what concerns the run as a whole."""

    def on_control(self, source: int, message: dict[str, Any]) -> None:
        """Handle a control message from another node."""

    def on_file_piece(self, source: int, piece: bytes) -> None:
        """Take the next piece of a file that another node has announced."""

    def on_waiting(self) -> None:
        """Do what is due: called several times a second while this node waits. An error ends the wait."""

    def on_reconnected(self, node: int, seconds: float, cause: str) -> None:
        """Note that a broken connection was replaced after so many seconds."""


class NoListener:
    """Ignores everything: before there is a listener, and after the messenger is closed."""

    def on_control(self, source: int, message: dict[str, Any]) -> None:
        """Ignore it."""

    def on_file_piece(self, source: int, piece: bytes) -> None:
        """Ignore it."""

    def on_waiting(self) -> None:
        """Do nothing."""

    def on_reconnected(self, node: int, seconds: float, cause: str) -> None:
        """Ignore it."""
