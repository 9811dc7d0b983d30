"""Uploads that are kept whole: large ones lie in a file of the driver's, written by whoever has them and can reach it."""

from __future__ import annotations

from typing import Any

from fedfleet.simulator.arithmetic.spill import SpillFile
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix
from fedfleet.simulator.errors import ClientError, one_line


def put_down(phase: str, spill: SpillFile | None, partials: dict[str, Any]) -> dict[str, Any]:
    """Return a block's partial results, large uploads among them in the file. Raises ClientError where the disk is full."""
    if spill is None:
        return partials
    try:
        return {slot: p.spilled(spill) if isinstance(p, UploadMatrix) else p for slot, p in partials.items()}
    except OSError as e:
        raise ClientError(
            f"phase {phase!r}: uploads are kept in a file, and that cannot be written ({one_line(e)}): free some space, set "
            f"TMPDIR to a folder with more, or lower cohort.size"
        ) from e
