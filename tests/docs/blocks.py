# SPDX-License-Identifier: Apache-2.0
"""The code blocks of a page, and how they are run: in order, in one folder, as a reader would.

```bash                            every command has to end with 0
<!-- exit: 9 -->                   above a block: its last command ends with 9
<!-- not run: needs root -->       above a block: it is not run, and why
```python title="train.py"         becomes a file, which a later command uses
```python                          is run as it is
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.pages import MADE

from orchestra.cli import invoke

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_SHELL = set("();<>|&")
_PROGRAMS = {"python": "", "orchestra": "-m orchestra", "torchrun": "-m torch.distributed.run"}


@dataclass(frozen=True)
class Block:
    """One of a page's blocks."""

    where: str  # page:line
    language: str
    title: str | None
    text: str
    mark: str  # the comment above it

    @property
    def not_run(self) -> str | None:
        """Why it is not run; None if it is."""
        return self.mark.removeprefix("not run:").strip() if self.mark.startswith("not run") else None

    @property
    def code(self) -> int:
        """The exit code that the page promises."""
        return int(self.mark.removeprefix("exit:")) if self.mark.startswith("exit") else 0

    def commands(self) -> list[str]:
        """Its lines, those that go on joined, without empty ones and comments."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks(page: Path) -> list[Block]:
    """Those of a page, in order; the examples of the catalogue have a test of their own."""
    text = MADE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))
    found = []
    for match in _BLOCK.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        where = f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}"
        found.append(Block(where, language, title and title[1], match["text"], match["mark"] or ""))
    return found


class Session:
    """A folder in which blocks are run one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / ".bin"
        programs.mkdir()
        for name, module in _PROGRAMS.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            (programs / name).chmod(0o755)
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        more = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._environment = os.environ | more

    def run(self, block: Block) -> None:
        """Run a block and complain if it ends otherwise than its page says."""
        if block.not_run is not None:
            return
        if block.language == "python" and block.title:
            (self.folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            (self.folder / "block.py").write_text(block.text, encoding="utf-8")
            assert self._shell("python block.py") == 0, block.where
        elif block.language == "bash":
            *before, last = block.commands()
            for command in before:
                assert self._command(command) == 0, f"{block.where}: {command}"
            assert self._command(last) == block.code, f"{block.where}: {last}"

    def _command(self, line: str) -> int:
        """A plain call of orchestra stays in this process, which has torch imported; all else is bash's."""
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        first, *others = words
        if first != "orchestra" or any(set(word) <= _SHELL for word in others):
            return self._shell(line)
        return invoke(shlex.split(line, comments=True)[1:])

    def _shell(self, line: str) -> int:
        command = ["bash", "-euo", "pipefail", "-c", line]
        return subprocess.run(command, cwd=self.folder, env=self._environment, timeout=100).returncode
