"""Numbers that float32 takes for one: what is lost where features or targets become it, as models compute in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfleet.datasets.files import DataError

PIECE = 1 << 20  # numbers at a time
SEVERAL = 64  # numbers of an example up to which each is looked at alone
EXACT = 2**24
"""Whole numbers up to which float32 has each."""
LONGEST = 2.0**63
COARSE = 2.0**-8
"""Of the standard deviation of numbers, what rounding may take from one of them."""
FIX = "subtract their mean, and divide by their standard deviation, before they are read"


class Apart:
    """Watches a column of numbers, some at a time, for values that differ and become one float32."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._count, self._sum, self._squares, self._lost = 0, 0.0, 0.0, 0.0
        self._whole = True
        self._large = np.empty(0, dtype=np.int64)  # of whole numbers those that may be rounded, each once

    def add(self, values: NDArray[Any]) -> None:
        """Look at more of the numbers (n,), of any of NumPy's kinds; those that are not finite are others' to refuse."""
        if values.dtype.kind not in "iuf" or values.dtype.itemsize < 4 or values.dtype == np.float32 or not len(values):
            return
        for start in range(PIECE, len(values), PIECE):
            self.add(values[start : start + PIECE])
        values = values[:PIECE]
        wide = values.astype(np.float64)
        with np.errstate(over="ignore"):
            kept = values.astype(np.float32).astype(np.float64)
        finite = np.isfinite(wide) & np.isfinite(kept)
        values, wide, kept = values[finite], wide[finite], kept[finite]
        if not len(wide):
            return
        first = self._first = float(wide[0]) if self._first is None else self._first
        away = wide - first
        self._count += len(away)
        self._sum += float(away.sum())
        self._squares += float(np.square(away).sum())
        self._lost = max(self._lost, float(np.abs(wide - kept).max()))
        self._whole = self._whole and (values.dtype.kind in "iu" or bool((wide == np.floor(wide)).all()))
        if self._whole:
            size = np.abs(wide)
            large = np.unique(values[(size >= EXACT) & (size < LONGEST)].astype(np.int64))
            self._large = np.union1d(self._large, large) if len(large) else self._large

    def problem(self) -> str | None:
        """Return what is lost, in words; None where numbers stay apart."""
        if self._whole and len(self._large):
            one = np.flatnonzero(np.diff(self._large.astype(np.float32)) == 0)
            if len(one):
                two = self._large[one[0] : one[0] + 2].tolist()
                return f"{two[0]} and {two[1]} are one number in float32"
        if self._count < 2:
            return None
        mean = self._sum / self._count
        spread = max(0.0, self._squares / self._count - mean * mean) ** 0.5
        if spread > 0 and self._lost > COARSE * spread:
            return f"its numbers differ by {spread:.3g} (standard deviation), and float32 rounds them by up to {self._lost:.3g}"
        return None


def check_told_apart(values: NDArray[Any], where: str) -> None:
    """Refuse features or targets (n, ...) of which some that differ become one number in float32. Raises DataError."""
    if values.dtype.kind not in "iuf" or values.ndim == 0 or 0 in values.shape:
        return
    columns = values.reshape(len(values), -1).T
    for column in columns if len(columns) <= SEVERAL else [values.reshape(-1)]:
        watched = Apart()
        watched.add(column)
        if (problem := watched.problem()) is not None:
            raise DataError(f"{where}: {problem}: {FIX}")
