"""Preparation of a process that runs blocks of clients."""

from __future__ import annotations

import contextlib
import ctypes

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h of glibc


def prepare(threads: int) -> None:
    """Pin torch's threads, and keep freed memory for the next block."""
    torch.set_num_threads(threads)
    _keep_memory()


def _keep_memory() -> None:
    """Have glibc keep large blocks. By default each is mapped anew, and the page faults cost as much as the arithmetic.

    Elsewhere than on glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(M_TOP_PAD, 1 << 26)
