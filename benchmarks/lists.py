"""In-place arithmetic on lists of tensors, a call for each list rather than for each tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def add(to: Sequence[Tensor], what: Sequence[Tensor], times: float = 1.0) -> None:
    """Add ``times * what``."""
    torch._foreach_add_(list(to), list(what), alpha=times)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def scale(to: Sequence[Tensor], factor: float) -> None:
    """Multiply by a number."""
    torch._foreach_mul_(list(to), factor)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Overwrite with values."""
    torch._foreach_copy_(list(to), list(values))  # pyright: ignore[reportPrivateImportUsage]


def zeros(like: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros of the same shapes."""
    return [torch.zeros_like(t, requires_grad=False) for t in like]
