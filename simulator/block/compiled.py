"""Captured blocks compiled by torch: operations fused, hence faster, and rounded otherwise.

When a process compiles depends on which blocks it has seen, so a run that compiles is not reproducible to the bit, and says so.
What is compiled is held to the capture it is made from: it must come near to it, or the capture itself goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RELATIVE = 1e-3
"""How far a compiled result may be from that of the capture, in parts of the largest number of its tensor."""


def compiler() -> str | None:
    """Return the C++ compiler that torch would take for a CPU, None where there is none."""
    return next(filter(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))), None)


def compiled(forward: Callable[..., list[Tensor]], given: list[Tensor]) -> Callable[..., list[Tensor]]:
    """Return a captured function compiled. Raises ValueError where it gives something else, or what torch raises."""
    made: Any = torch.compile(forward, fullgraph=True, dynamic=False)
    for a, b in zip(made(*given), forward(*given), strict=True):
        if not _near(a, b):
            raise ValueError("what is compiled gives something else than what it is made from")
    return made


def _near(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    known = b.isfinite()
    if not torch.equal(known, a.isfinite()):
        return False
    a, b = (x.masked_fill(~known, 0).double() for x in (a, b))
    return float((a - b).abs().max()) <= RELATIVE * float(b.abs().max())
