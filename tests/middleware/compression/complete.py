"""A transform of every kind, with what has to be given for it."""

from __future__ import annotations

from typing import Any

from fedfleet.middleware.compression.codecs.registry import TRANSFORMS


def complete(name: str, k: int) -> dict[str, Any]:
    """A row of a configuration: required options are 1, and ``k`` floats are sent where it may be told how many."""
    fields = TRANSFORMS[name].options.model_fields
    required = {option: 1.0 for option, field in fields.items() if field.is_required()}
    return {"name": name, **required, **({"k": k} if "k" in fields else {})}
