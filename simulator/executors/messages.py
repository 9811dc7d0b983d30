"""Messages of phases, made ready once for all blocks.

Workers of this machine get a message in a shared buffer, others by Ray.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.executors.batch import Batch
from fedfleet.simulator.executors.cluster import DIRECT_BYTES, dumps
from fedfleet.simulator.executors.shared_buffer import BUFFER_BYTES, SharedBuffer, own
from fedfleet.simulator.executors.store import put

# To other machines, shared trees of so many bytes, or of so many for all tasks together, travel with each task: faster than a put.
INLINE_BYTES, TOGETHER_BYTES = 1 << 16, DIRECT_BYTES
SLABS, ROOM_BYTES = 16, BUFFER_BYTES // 2  # for messages to this machine: how many at a time, and how large one may be


class Messages:
    """Make messages ready; ``put_s`` are the seconds that took."""

    def __init__(self) -> None:
        self.put_s = 0.0
        self._slabs: list[SharedBuffer] = []

    def near(self, batch: Batch, others: Iterable[Batch]) -> bytes | None:
        """Write the message for workers of this machine, if that is still to do; return what goes with each call.

        None where it found no room beside those of the ``others`` that are still needed.
        """
        if not batch.tried_near and T.num_bytes(dict(batch.shared.send)) <= ROOM_BYTES:
            started = time.perf_counter()
            batch.buffer = self._unused(others)
            if batch.buffer is not None:
                packed = replace(batch.shared, send=batch.buffer.pack(batch.shared.send))
                batch.near = dumps((batch.job, packed, batch.buffer.address))
            self.put_s += time.perf_counter() - started
        batch.tried_near = True
        return batch.near

    def _unused(self, others: Iterable[Batch]) -> SharedBuffer | None:
        """Return a shared buffer that no batch needs any more; None where that would take too many."""
        used = {id(b.buffer) for b in others}
        for buffer in self._slabs:
            if id(buffer) not in used:
                return buffer
        new = own(1) if len(self._slabs) < SLABS else []
        self._slabs += new
        return new[0] if new else None

    def far(self, batch: Batch) -> Any:
        """Return the message as it goes to other machines: small ones along with each task, others put once."""
        if batch.far is None:
            size, started = T.num_bytes(dict(batch.shared.send)), time.perf_counter()
            small = size <= INLINE_BYTES or size * batch.size <= TOGETHER_BYTES
            batch.far = batch.shared if small else put(batch.shared)
            self.put_s += time.perf_counter() - started
        return batch.far
