"""Short names of values that vary: of mappings, what tells one from the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

NAMES = ("name", "kind")
"""What a mapping is called by, where it says so."""


def names(values: Sequence[Any]) -> list[str]:
    """Return a name for each of some different values: of mappings their own, with what else differs among those of one name."""
    result = []
    for value in values:
        if not isinstance(value, Mapping):
            result.append(plain(value))
            continue
        alike = [v for v in values if isinstance(v, Mapping) and _own(v) == _own(value)]
        alike = alike if len(alike) > 1 or _own(value) else [{}]
        differs = {k: v for k, v in value.items() if k not in NAMES and any(k not in a or a[k] != v for a in alike)}
        result.append(" ".join(filter(None, [_own(value), *(f"{k}={plain(v)}" for k, v in differs.items())])) or "{}")
    return result if len(set(result)) == len(result) else [plain(value) for value in values]


def plain(value: Any) -> str:
    """Return a value as text."""
    return value if isinstance(value, str) else json.dumps(value)


def _own(value: Mapping[str, Any]) -> str:
    return next((str(value[key]) for key in NAMES if key in value), "")
