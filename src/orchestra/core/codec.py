# SPDX-License-Identifier: Apache-2.0
"""What a strategy puts between a node and its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from orchestra.core.ops import Message, Send


class Codec(Protocol):
    """Encodes what one node sends, and decodes what it receives."""

    def pack(self, message: Send) -> Sequence[Send]:
        """Return what is sent for a message."""
        ...

    def unpack(self, message: Message) -> Message | None:
        """Return the message that was meant; None if more of it is to come, or if it came before."""
        ...
