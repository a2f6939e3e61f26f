# SPDX-License-Identifier: Apache-2.0
"""The report page, one file that opens from disk: the report's data, compressed, and the code that draws it.

A policy in the file's head allows the scripts in it, by their hashes, and nothing else: no network, no other script.
The contents of a run's files are data in a packed block, and become text on the page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any

from orchestra.report.styles import COLOURS
from orchestra.report.tables import legend

_VENDORED = ("d3.min.js", "plot.min.js")
_MODULES = (
    "dom",
    "format",
    "state",
    "curves",
    "race",
    "workers",
    "traffic",
    "consistency",
    "conditions",
    "timeline",
    "words",
    "main",
)
_IMPORT = re.compile(r"^import (\{[^}]*\}) from \"\./(\w+)\.js\";$", re.MULTILINE)
_ICON = '<link rel="icon" href="data:,">\n'  # else a browser asks the server for one
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const) (\w+))", re.MULTILINE)


def write(report: dict[str, Any], *, live: bool = False) -> str:
    """Return the page; a live page polls its server for new data."""
    scripts = [*(_asset(f"vendor/{name}") for name in _VENDORED), bundle(live=live)]
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {' '.join(map(_hash, scripts))}; img-src data:"
    policy += "; connect-src 'self'" * live
    code = "\n".join(f"<script{_kind(i)}>{text}</script>" for i, text in enumerate(scripts))
    title, data = html.escape(report["title"]), base64.b64encode(packed(report)).decode("ascii")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">\n"
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{_ICON * live}<title>{title}</title>\n<style>\n{_asset('report.css')}{_colours()}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n<p>{html.escape(report['verdict']['sentence'])}</p>\n"
        f"<noscript><p>The figures of this report are drawn by scripts in this file.</p></noscript>\n"
        f'<script type="application/octet-stream" id="report">{data}</script>\n{code}\n</body>\n</html>\n'
    )


def bundle(*, live: bool = False) -> str:
    """Return the page's own modules as one script, each in a function: a file opened from disk may not import."""
    return "\n".join(_enclosed(name, _asset(f"{name}.js")) for name in (*_MODULES, *["live"] * live))


def _enclosed(name: str, text: str) -> str:
    given = ", ".join(match[2] for match in _EXPORT.finditer(text))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = \2_js;", text))
    return f"const {name}_js = (() => {{\n{body}return {{ {given} }};\n}})();"


def packed(report: dict[str, Any]) -> bytes:
    """Return the data from which the page is drawn, as compressed JSON."""
    text = json.dumps(report | {"legend": legend(report)}, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return gzip.compress(text.encode("ascii"), mtime=0)


def _colours() -> str:
    """Return CSS variables for every colour, in the light and in the dark theme."""
    rules = (
        f"{where} {{ {' '.join(f'--c-{name}: {shades[i]};' for name, shades in COLOURS.items())} }}\n"
        for i, where in enumerate((":root", ':root[data-theme="dark"]'))
    )
    return "".join(rules)


def _kind(i: int) -> str:
    return ' type="module"' if i >= len(_VENDORED) else ""


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}'"


def _asset(name: str) -> str:
    text = (resources.files("orchestra.report") / "assets" / name).read_text(encoding="utf-8")
    return text.replace("</script", "<\\/script")
