# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: all state of a run on disk, written atomically.

    checkpoints/step-00000120/node-0.safetensors …    one file per node: tensors, and the structure around them as JSON
                              manifest.json            format, step, fingerprint of the model, SHA-256 of every file
                                                       and of the manifest itself
    checkpoints/latest                                 the name of the newest one

A checkpoint is written as `step-….tmp`, every file synced, the manifest last, and then renamed: a crash at any moment
leaves the previous one untouched. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orchestra.errors import CheckpointError
from orchestra.runs import files

FORMAT = 4
KEEP = 2
_MOST_NODES = 100_000
_NAME = re.compile("step-([0-9]+)")
_PART = re.compile(r"node-([0-9]+)\.safetensors")
_NAMES = {  # of dtypes in safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


# A tree of plain values and tensors, as one safetensors file.


def write_tree(path: Path, tree: Any, *, durable: bool = True) -> None:
    """Write nested dicts, lists, tuples, numbers, texts and tensors to a file, synced to the disk if `durable`."""
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(outline(tree, tensors))
    _write_tensors(path, tensors, {"tree": structure, "format": str(FORMAT)})
    if durable:
        sync(path)


def _write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file straight from the tensors' memory; the library would copy all of it twice first."""
    widest_first = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for key, tensor in widest_first:
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if path.is_symlink():  # do not write through a link
        path.unlink()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in widest_first:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def read_tree(path: Path, *, tensors: bool = True) -> Any:
    """Read what `write_tree` wrote; without `tensors`, None in the place of each, and no bytes of them are read."""
    try:
        files.open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            found = {key: file.get_tensor(key) if tensors else None for key in file.keys()}  # noqa: SIM118  not a dict
        return fill(json.loads(metadata["tree"]), found)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. It is damaged, or no checkpoint of this program."
        ) from None


def has_tensor(path: Path, name: str) -> bool:
    """Return whether a dict that `write_tree` wrote has a tensor of this name, without reading any tensor."""
    try:
        files.open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            tree = json.loads((file.metadata() or {})["tree"])
        return isinstance(dict(tree["items"]).get(name), dict)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None


def outline(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the structure of a tree as JSON; add its tensors to `tensors`."""
    match tree:
        case Tensor():
            if tree.dtype not in _NAMES:
                raise CheckpointError(f"a tensor of {tree.dtype} cannot be saved: use {', '.join(map(str, _NAMES))}.")
            key = str(len(tensors))
            tensors[key] = tree.detach().cpu().contiguous()
            return {"$": "tensor", "key": key}
        case dict():
            return {"$": "dict", "items": [[outline(k, tensors), outline(v, tensors)] for k, v in tree.items()]}
        case tuple():
            return {"$": "tuple", "items": [outline(v, tensors) for v in tree]}
        case list():
            return [outline(v, tensors) for v in tree]
        case bool() | int() | float() | str() | None:
            return tree
    if is_dataclass(tree) and not isinstance(tree, type):
        return outline({f.name: getattr(tree, f.name) for f in fields(tree)}, tensors)
    raise CheckpointError(
        f"a {type(tree).__name__} cannot be saved: state must be numbers, texts, tensors and lists of them."
    )


def fill(structure: Any, tensors: Mapping[str, Tensor | None]) -> Any:
    """Return the tree from its outline and tensors, with dicts for dataclasses."""
    match structure:
        case {"$": "tensor", "key": key}:
            return tensors[key]
        case {"$": "dict", "items": items}:
            return {fill(k, tensors): fill(v, tensors) for k, v in items}
        case {"$": "tuple", "items": items}:
            return tuple(fill(v, tensors) for v in items)
        case list():
            return [fill(v, tensors) for v in structure]
    return structure


def restore_into(state: Any, saved: dict[str, Any]) -> None:
    """Copy saved values into a state made by `init`; only fields of the state are read from the file."""
    for field in fields(state):
        value = saved[field.name]
        current = getattr(state, field.name)
        if is_dataclass(current) and not isinstance(current, type):
            restore_into(current, value)
        elif isinstance(current, Tensor):
            current.copy_(value)
        else:
            setattr(state, field.name, value)


# A checkpoint of the whole run.


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified."""

    path: Path
    step: int
    manifest: dict[str, Any]

    def node(self, rank: int, *, tensors: bool = True) -> Any:
        """Return the part that one node wrote, with or without its tensors."""
        return read_tree(self.path / part_name(rank), tensors=tensors)


def part_name(rank: int) -> str:
    """Return the file name of a node's part."""
    return f"node-{rank}.safetensors"


def name_of(step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"step-{step:08d}"


def found_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, by step, the newest last; drafts are left out."""
    return [path for _, path in files.numbered(folder, _NAME)]


def parts_in(folder: Path) -> dict[int, Path]:
    """Return the parts in a folder, by node."""
    return dict(files.numbered(folder, _PART))


def draft(folder: Path, step: int) -> Path:
    """Return the folder to which nodes write their parts of a checkpoint."""
    return folder / f"{name_of(step)}.tmp"


def open_draft(folder: Path, step: int) -> Path:
    """Make the draft folder, if no other node has; return its path."""
    path = draft(folder, step)
    folder.mkdir(exist_ok=True)  # without parents: a deleted run folder stays deleted
    path.mkdir(exist_ok=True)
    return path


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit(folder: Path, step: int, about: dict[str, Any]) -> Path:
    """Seal a draft: manifest, sync, rename, point `latest` at it, and drop all but the newest few."""
    path = draft(folder, step)
    parts = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in parts_in(path).values()}
    manifest = sealed(json.loads(json.dumps({"format": FORMAT, "step": step, **about, "files": parts})))
    write_text(path / "manifest.json", json.dumps(manifest, indent=1))
    final = folder / name_of(step)
    if final.exists():
        shutil.rmtree(final)
    path.rename(final)
    sync(folder)
    write_text(folder / "latest", final.name)
    for old in found_in(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add to a manifest the SHA-256 of its other entries, which covers the step and the settings."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True)
    return rest | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def newest(folder: Path, largest: int | None = None) -> tuple[Checkpoint, list[str]]:
    """Return the newest whole checkpoint, and the errors of newer ones that had to be skipped.

    `largest`: upper bound on the bytes of a part of this run, since the sizes in the manifest may be forged.
    """
    complaints: list[str] = []
    for path in reversed(found_in(folder)):
        try:
            return verify(path, largest), complaints
        except CheckpointError as error:
            complaints.append(str(error))
    detail = "".join(f"\n  {c}" for c in complaints)
    raise CheckpointError(f"no usable checkpoint in {folder}.{detail or ' The run stopped before it wrote one.'}")


def verify(path: Path, largest: int | None = None) -> Checkpoint:
    """Check a checkpoint against its manifest: all files must be inside it, with the right size and content."""
    try:
        manifest = files.read_json(path / "manifest.json")
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']} is not {FORMAT}: written by another version of this program")
        if sealed(manifest) != manifest:
            raise ValueError("manifest.json was changed: its SHA-256 is not the one that it names")
        step = _whole(manifest, "step", 0, 10**18)
        if path.name != name_of(step):
            raise ValueError(f"it is of step {step}, so its name should be {name_of(step)}")
        nodes = _whole(manifest, "workers", 1, _MOST_NODES) + _whole(manifest, "servers", 0, _MOST_NODES)
        missing = {part_name(r) for r in range(nodes)} - {*manifest["files"]}
        if missing:
            names = ", ".join(sorted(missing)[:5]) + (", …" if len(missing) > 5 else "")
            raise ValueError(f"the parts {names} are missing")
        for name, expected in manifest["files"].items():
            _verify_part(path, name, expected, largest)
        return Checkpoint(path, step, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not whole: {error}") from None


def _whole(manifest: dict[str, Any], name: str, least: int, most: int) -> int:
    number = manifest[name]
    if type(number) is not int or not least <= number <= most:
        raise ValueError(f"{name} is {number!r}, which is no whole number from {least} to {most}")
    return number


def _verify_part(path: Path, name: str, expected: dict[str, Any], largest: int | None) -> None:
    file = path / name
    if file.is_symlink() or file.resolve().parent != path.resolve():
        raise ValueError(f"{name} lies outside the checkpoint")
    files.open_regular(file, most=largest).close()
    if file.stat().st_size != expected["bytes"]:
        raise ValueError(f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}")
    if digest(file) != expected["sha256"]:
        raise ValueError(f"{name} was changed: its SHA-256 is not the one in the manifest")


# Atomic writes.


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # it may be a link to something else
    try:
        with temporary.open("xb") as file:
            file.write(content)
        sync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make sure a file or folder is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fingerprint(shapes: dict[str, tuple[torch.Size, torch.dtype]]) -> str:
    """Return a short hash of parameter names, shapes and dtypes, in order."""
    text = json.dumps([[name, list(shape), str(dtype)] for name, (shape, dtype) in shapes.items()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
