"""Numbers and words of reports: quantities, lengths of time, shares, means with their spread, lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MISSING = "–"


def quantity(value: float | None, unit: str = "") -> str:
    """Three digits and a decimal prefix: 1250000 -> '1.25 M', with a unit '1.25 M floats' or '3.4 MB'."""
    if value is None or not math.isfinite(value):
        return MISSING
    for scale, prefix in PREFIXES:
        if abs(value) >= 0.9995 * scale:  # 999 950 is 1 M, not 1e+03 k
            return f"{value / scale:.3g} {prefix}{'' if unit == 'B' or not unit else ' '}{unit}"
    return f"{value:.3g} {unit}".strip()


def duration(seconds: float | None) -> str:
    """A length of time: '250 ms', '12.5 s', '3 min 20 s', '5 h 12 min', '3.2 days'."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms" if seconds else "0 s"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{quantity(whole / 86400)} days"


def number(value: Any) -> str:
    """A metric with four digits, a dash if there is none."""
    finite = isinstance(value, int | float | np.number) and math.isfinite(value)
    return f"{value:.4g}" if finite else MISSING if value is None or value != value else str(value)


def share(value: float) -> str:
    """A fraction as a percentage with up to three digits; only all of it is 100 %."""
    return f"{min(100 * value, 99.9) if value < 1 else 100:.3g} %"


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters, cut in its middle: names of the runs of a grid begin alike."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def joined(words: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def mean_sd(values: Sequence[float | None]) -> str:
    """'0.731 ± 0.019': mean and sample standard deviation of the known values; the value alone if it is one."""
    known = np.array([value for value in values if value is not None and math.isfinite(value)])
    if not len(known):
        return MISSING
    if len(known) == 1 or known.std() == 0:
        return number(known.mean()) + (" ± 0" if len(known) > 1 else "")
    return plus_minus(known.mean(), known.std(ddof=1))


def plus_minus(value: float, spread: float) -> str:
    """'0.731 ± 0.019': two digits of the spread, and the value to match."""
    if not spread > 0:
        return f"{number(value)} ± 0"
    digits = min(6, max(0, 1 - math.floor(math.log10(spread))))
    return f"{value:.{digits}f} ± {spread:.{digits}f}"


def whole(value: float | None) -> str:
    """A number without decimals, thousands apart; a dash if there is none."""
    return MISSING if value is None else f"{value:,.0f}"


def span(least: float, middle: float, most: float) -> str:
    """'5' where all are equal, else '2 to 14, 6 in the middle'."""
    return f"{most:,}" if least == most else f"{least:,} to {most:,}, {middle:,} in the middle"


def count(many: int, word: str) -> str:
    """'1 run', '2 runs'."""
    return f"{many:,} {word}" + ("s" if many != 1 else "")


def probability(p: float) -> str:
    """A probability of a test: "p = 0.0031", "p < 0.0001"."""
    return f"p = {p:.2g}" if p >= 1e-4 else "p < 0.0001"


def plain_value(value: Any) -> str:
    """A value of a configuration: a number as short as it is, anything else as text."""
    return f"{value:g}" if isinstance(value, int | float) else str(value)
