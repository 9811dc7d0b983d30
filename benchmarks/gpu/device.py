"""A device to measure on: how it computes, and when its memory is at an end."""

from __future__ import annotations

import gc
import sys

import torch

from benchmarks import limit
from fedfleet.simulator.ambient import Gpu, fresh_settings

MODES = {"float32": Gpu(), "tf32": Gpu(tf32=True), "any": Gpu(deterministic=False, tf32=True)}
"""Ways to compute: "any" takes algorithms that give other bits each time as well."""


def reached(mode: str, device: str) -> float:
    """Return the floating-point operations a second of large products."""
    with fresh_settings():
        MODES[mode].take(device)
        return limit.reached(device, limit.WIDE[device])


def emptied(device: str) -> None:
    """Free what nobody holds any more, so that its memory is there for the next."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int:
    """Return the most bytes that were held since the device was emptied; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is the device's memory having run out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def why(error: BaseException) -> str:
    """Return in a few words why nothing was measured."""
    return "out of memory" if out_of_memory(error) else " ".join(str(error).split())[:120]


def name(device: str) -> str:
    """Return what the device is called."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def leave_without(device: str) -> None:
    """End the program, saying so, where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} sees none on this machine, so nothing was measured")
        sys.exit(0)
