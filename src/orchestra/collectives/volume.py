# SPDX-License-Identifier: Apache-2.0
"""How many numbers each worker sends in an all-reduce, by the formulas in the files of the algorithms."""

from __future__ import annotations

from orchestra.collectives.double_tree import trees
from orchestra.collectives.hierarchical import group_size
from orchestra.core.vectors import split


def numbers_sent(algorithm: str, p: int, n: int, group: int | None = None) -> list[int]:
    """Return the numbers that each of p workers sends in an all-reduce of n of them.

    >>> numbers_sent("ring", 4, 100), numbers_sent("tree", 4, 100), numbers_sent("one_device", 4, 100)
    ([150, 150, 150, 150], [200, 100, 200, 100], [300, 100, 100, 100])
    """
    if p == 1:
        return [0]
    match algorithm:
        case "ring":
            sizes = _sizes(n, p)
            return [2 * n - sizes[(r + 1) % p] - sizes[(r + 2) % p] for r in range(p)]
        case "halving_doubling" | "butterfly":
            return _folded(algorithm, p, n)
        case "tree":
            distances = [2**k for k in range(p.bit_length())]
            below = [sum(r % (2 * d) == 0 and r + d < p for d in distances) for r in range(p)]
            return [n * (below[r] + (r > 0)) for r in range(p)]
        case "double_tree":
            placed = [[tree[r] for tree in trees(p)] for r in range(p)]
            return [
                sum(
                    half * (len(at.children) + (at.parent is not None))
                    for half, at in zip(_sizes(n, 2), both, strict=True)
                )
                for both in placed
            ]
        case "hierarchical":
            return _hierarchical(p, n, group_size(p) if group is None else group)
        case "one_device":
            return [(p - 1) * n, *[n] * (p - 1)]
    raise ValueError(f"no all-reduce algorithm is called {algorithm!r}")


def _sizes(n: int, parts: int) -> list[int]:
    return [part.stop - part.start for part in split(n, parts)]


def _folded(algorithm: str, p: int, n: int) -> list[int]:
    """Count for p workers of which the largest power of two take part; each other folds its vector into the next's."""
    q = 1 << (p.bit_length() - 1)
    extra, stages = p - q, q.bit_length() - 1
    members = [*range(1, 2 * extra, 2), *range(2 * extra, p)]
    if algorithm == "butterfly":
        sent = dict.fromkeys(members, stages * n)
    else:
        cuts = [part.start for part in split(n, q)] + [n]
        doubling = [
            sum(cuts[i // d * d + d] - cuts[i // d * d] for d in (2**k for k in range(stages))) for i in range(q)
        ]
        sent = {member: n - cuts[i + 1] + cuts[i] + doubling[i] for i, member in enumerate(members)}
    return [n if r < 2 * extra and r % 2 == 0 else sent[r] + (n if r < 2 * extra else 0) for r in range(p)]


def _hierarchical(p: int, n: int, g: int) -> list[int]:
    chunks, groups = _sizes(n, g), -(-p // g)
    found = []
    for r in range(p):
        k, i, size = r // g, r % g, min(g, p - r // g * g)  # its group, its place there, the size of the group
        held = [chunks[part] for part in split(g, size)]
        across = [_sizes(chunk, groups) for chunk in held[(i + 1) % size]]
        within = 2 * n - sum(held[(i + 1) % size]) - sum(held[(i + 2) % size])
        found.append(within + sum(2 * sum(c) - c[(k + 1) % groups] - c[(k + 2) % groups] for c in across))
    return found
