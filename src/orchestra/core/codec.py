# SPDX-License-Identifier: Apache-2.0
"""The interface of a codec, which a strategy may put between a node and its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from orchestra.core.ops import Message, Send


class Codec(Protocol):
    """Encodes the messages that one node sends, and decodes those that it receives."""

    def pack(self, message: Send) -> Sequence[Send]:
        """Return the messages to send in place of one message."""
        ...

    def unpack(self, message: Message) -> Message | None:
        """Return the decoded message; None if parts of it are missing, or if it is a duplicate."""
        ...
