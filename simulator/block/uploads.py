"""Uploads that are kept whole: large ones lie in a file of the driver's, written by whoever has them and can reach it."""

from __future__ import annotations

from typing import Any

from fedfleet.simulator.arithmetic.spool import Spool
from fedfleet.simulator.arithmetic.stored import Stored
from fedfleet.simulator.errors import ClientError, one_line


def put_down(phase: str, spool: Spool | None, partials: dict[str, Any]) -> dict[str, Any]:
    """Return a block's partial results, large uploads among them in the file. Raises ClientError where the disk is full."""
    if spool is None:
        return partials
    try:
        return {slot: p.filed(spool) if isinstance(p, Stored) else p for slot, p in partials.items()}
    except OSError as e:
        raise ClientError(
            f"phase {phase!r}: uploads are kept in a file, and that cannot be written ({one_line(e)}): free some space, set "
            f"TMPDIR to a folder with more, or lower cohort.invite"
        ) from e
