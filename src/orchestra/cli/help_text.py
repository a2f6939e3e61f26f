# SPDX-License-Identifier: Apache-2.0
"""Docstrings as help."""

from __future__ import annotations

import inspect


def flowing(text: str) -> str:
    """Return a docstring for the terminal to fill: each paragraph in one line, indented lines as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split()) for p in paragraphs)
