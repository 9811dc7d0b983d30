"""Digests of what a run leaves: its model, its tables, its summary.

Names are left out of a digest: a column or a tensor that gets another name moves nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from safetensors.numpy import load_file

CLOCK = ("seconds", "per_s")
"""What names of columns and keys that tell of the machine's clock end in."""
ROUNDED = "classes"
"""The table whose whole numbers come of floats: what the model takes for what, where two classes are close."""
SKIPPED, NAMES = ("recall",), ("name", "domain_name", "label_name", "predicted_name")
"""A table that follows from what else is measured, and columns of what numbers are called."""
ELSEWHERE = ("client_examples", "drawn", "skipped_rounds")
"""Facts of the summary that the population's own tests hold, or that the table of rounds has, too."""
CLOSE = 1e-3
"""Relative difference up to which floats of two processors are the same result."""


class Found(NamedTuple):
    """What a run left: a digest of each tensor, column and number, and a few floats that any processor comes near."""

    counts: dict[str, str]
    """Whole numbers, names and truth values: equal on every processor."""
    numbers: dict[str, str]
    """Floats: equal to the bit on one kind of processor and release of torch."""
    close: list[float]
    """The norm of the model and the mean of each of the tables' first floats."""


def of_run(folder: Path) -> Found:
    """Return the digests of a run's folder."""
    counts, numbers, close = {}, {}, []
    for name, tensor in load_file(folder / "model.safetensors").items():
        numbers[f"model: {name}"] = digest(tensor.tobytes())
        close.append(float(np.linalg.norm(tensor.astype(np.float64))))
    close = [math.hypot(*close)]
    for path in sorted(folder.glob("*.parquet")):
        table = pd.read_parquet(path)
        for name, column in table.items() if path.stem not in SKIPPED else ():
            if str(name).endswith(CLOCK) or name in NAMES:
                continue
            where = numbers if pd.api.types.is_float_dtype(column) or path.stem == ROUNDED else counts
            where[f"{path.stem}: {name}"] = digest(json.dumps(column.tolist()).encode())
    rounds = pd.read_parquet(folder / "rounds.parquet")
    close += [float(rounds[name].mean()) for name in sorted(rounds) if name in ("train_loss", "virtual_s")]
    for key, value in _leaves(json.loads((folder / "summary.json").read_text())):
        if isinstance(value, int | float) and not any(word in key for word in (*CLOCK, *ELSEWHERE)):
            (numbers if isinstance(value, float) else counts)[f"summary: {key}"] = digest(repr(value).encode())
    return Found(counts, numbers, close)


def digest(content: bytes) -> str:
    """Return 64 bits of SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()[:16]


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping | list):
        for key, below in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _leaves(below, f"{prefix}{key}.")
    else:
        yield prefix[:-1], node


def by_part(digests: Mapping[str, str]) -> dict[str, str]:
    """Return one short digest for each part (model, summary, a table), whatever its columns are called."""
    parts: dict[str, list[str]] = {}
    for name, value in digests.items():
        parts.setdefault(name.partition(":")[0], []).append(value)
    return {part: digest("".join(sorted(values)).encode())[:10] for part, values in sorted(parts.items())}


@functools.cache
def processor() -> str:
    """Return what bits of floats depend on: the release of torch, and the processor with the instructions torch uses."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {model}"


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return what is not the same in two sets of digests, by name; a new name of the same content is no difference."""
    gone = {name: value for name, value in before.items() if after.get(name) != value}
    new = {name: value for name, value in after.items() if before.get(name) != value}
    for name, value in list(gone.items()):
        other = next((n for n, v in new.items() if v == value and n not in before), None)
        if other is not None and name not in after:
            del gone[name], new[other]
    return sorted(gone.keys() | new.keys())


def near(before: Iterable[float], after: Iterable[float]) -> bool:
    """Say whether two lists of floats are those of one result on two processors."""
    pairs = list(zip(before, after, strict=True))
    return all(math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)
