# SPDX-License-Identifier: Apache-2.0
"""Global torch settings (default dtype, determinism, precision): read in the caller, set in its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import backends


def _flushes_denormals() -> bool:
    """Return whether denormal numbers become zero. Torch has no getter, so compute with one."""
    return float(torch.tensor(1e-310, dtype=torch.float64, device="cpu") * 0.5) == 0.0


def _of(place: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: getattr(place, name), lambda value: setattr(place, name, value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _default_device() -> torch.device | None:
    """Return the default device that the caller chose, else None: a chosen one costs a little time in every call."""
    chosen = torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context")
    return None if chosen is None else torch.get_default_device()


def _precisions() -> Iterator[tuple[str, tuple[Callable[[], Any], Callable[[Any], object]]]]:
    """Yield the float32 precision setting of each backend, parents first; older versions of torch have none."""
    for path in (
        *("backends", "backends.mkldnn", "backends.mkldnn.matmul", "backends.mkldnn.conv", "backends.mkldnn.rnn"),
        *("backends.cuda.matmul", "backends.cudnn", "backends.cudnn.conv", "backends.cudnn.rnn"),
    ):
        place: Any = torch
        for name in path.split("."):
            place = getattr(place, name, None)
        if hasattr(place, "fp32_precision"):
            yield f"precision of {path}", _of(place, "fp32_precision")


# How each is read and set, in the order in which they are set.
_ALL: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (_default_device, torch.set_default_device),
    "deterministic algorithms": (
        _deterministic,
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "fill uninitialized memory": _of(torch.utils.deterministic, "fill_uninitialized_memory"),
    **dict(_precisions()),
    "precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "flush denormals": (_flushes_denormals, torch.set_flush_denormal),
    "detect anomalies": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    **{
        f"mkldnn {name}": _of(backends.mkldnn, name)
        for name in ("enabled", "deterministic")
        if hasattr(backends.mkldnn, name)
    },
    **{f"cudnn {name}": _of(backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")},
    **{
        f"half products {name}": _of(backends.cuda.matmul, name)
        for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    },
    "flash attention": (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
    "memory-efficient attention": (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
    "plain attention": (backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
    "cudnn attention": (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
}


@dataclass(frozen=True)
class TorchSettings:
    """The values of all settings, by name."""

    values: dict[str, Any]

    @classmethod
    def current(cls) -> TorchSettings:
        """Read the settings of this process."""
        found = {name: _read(name) for name in _ALL}
        return cls({name: value for name, value in found.items() if value is not _UNREADABLE})

    def apply(self) -> None:
        """Apply the settings that differ in this process, in order: some of them change later ones."""
        for name, value in self.values.items():
            if _read(name) != value:
                _ALL[name][1](value)


_UNREADABLE = object()


def _read(name: str) -> Any:
    """Read a setting. Torch raises for a legacy setting whose newer counterparts have a value it cannot express."""
    try:
        return _ALL[name][0]()
    except RuntimeError:
        return _UNREADABLE
