# SPDX-License-Identifier: Apache-2.0
"""The encoding of a sparse vector as one vector of bytes.

    8 bytes     k, how many; −1: all of them, because that is shorter
    8 bytes     0, or the hash of all keys if they are those of the message before
    values      k of them, in the order of their keys
    keys        k of them, 4 bytes each, unless there is a hash

Both ends keep the keys that were last sent, for each range, and compare their hash.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_HEADER = 16  # bytes
_KEY = torch.int32


def hash_of(keys: Tensor) -> int:
    """Return a hash of the keys, never 0."""
    digest = hashlib.blake2b(keys.cpu().numpy().tobytes(), digest_size=7).digest()
    return int.from_bytes(digest, "little") or 1


def pack(v: Tensor, sent: Tensor, known: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the entries of v to send as bytes, and their keys unless all are sent; `known`: the keys last sent."""
    if v.is_meta:
        return torch.empty(_HEADER + v.nbytes, dtype=torch.uint8, device="meta"), None
    keys = sent.nonzero().view(-1).to(_KEY)
    values = v[sent]
    if known is not None and torch.equal(keys, known):
        return _joined(keys.numel(), hash_of(keys), values), keys
    if values.nbytes + keys.nbytes >= v.nbytes:
        return _joined(-1, 0, v), None
    return _joined(keys.numel(), 0, values, keys), keys


def unpack(message: Tensor, into: Tensor, known: Tensor | None = None) -> Tensor | None:
    """Write the received entries into a vector; return their keys unless all entries were sent."""
    if message.is_meta:
        return None
    k, hashed = message[:_HEADER].clone().view(torch.int64).tolist()
    body = message[_HEADER:].to(into.device)
    if k < 0:
        into.copy_(body.clone().view(into.dtype))
        return None
    size = k * into.element_size()
    if not hashed:
        known = body[size:].clone().view(_KEY)
    elif known is None or hash_of(known) != hashed:
        raise RuntimeError("a message refers to other keys than those last received: this is a bug in orchestra")
    into[known.long()] = body[:size].clone().view(into.dtype)
    return known


def _joined(k: int, hashed: int, *parts: Tensor) -> Tensor:
    header = torch.tensor([k, hashed], dtype=torch.int64, device=parts[0].device)
    return torch.cat([part.contiguous().view(torch.uint8) for part in (header, *parts)])
