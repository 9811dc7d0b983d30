"""Ray's own processes, without which nothing of it works: whoever waits for actors waits for the end of these, too.

Some seconds after its raylet is dead, and a minute after its GCS is (``RAY_gcs_rpc_server_reconnect_timeout_s``), Ray ends this
process without a word. What is raised here comes before that.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.cluster import ray, ray_constants, ray_worker

PEER = struct.Struct("3i")  # what Linux says of the other end: process, user, group
PAUSE_S, ANSWERS_S = 2.0, 5.0  # between two looks at a GCS; in which it has to answer
RECONNECTS_S = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s") or 60)  # noqa: SIM112, Ray's own name
PATIENCE_S = min(25.0, RECONNECTS_S / 2)
"""How long a GCS that was joined may be away, as where it is started again, so that there is time left to end in order."""
RAYLET = "the raylet, Ray's process that keeps the actors of this machine, has died"
GCS = "the GCS, Ray's control server, has died"
GONE = f"the GCS, Ray's control server, does not answer since {PATIENCE_S:g} s"
AFTER = "(it was killed or crashed, as where memory runs out): go on with `fedfleet resume`"


class Vitals:
    """The raylet of this machine and the cluster's GCS, started or joined; of those that can be watched here."""

    def __init__(self) -> None:
        self._watched: dict[int, str] = {}
        self._gcs: Ping | None = None
        node: Any = ray_worker._global_node
        started: Any = getattr(node, "all_processes", {})
        for kind, what in ((ray_constants.PROCESS_TYPE_RAYLET, RAYLET), (ray_constants.PROCESS_TYPE_GCS_SERVER, GCS)):
            with suppress(AttributeError, LookupError, OSError):  # a system without such descriptors
                if kind in started:
                    self._watched[os.pidfd_open(started[kind][0].process.pid)] = what
                elif kind == ray_constants.PROCESS_TYPE_RAYLET:
                    self._watched[os.pidfd_open(_listener(node.raylet_socket_name))] = what
        if GCS not in self._watched.values():
            self._gcs = Ping(ray.get_runtime_context().gcs_address)
            self._watched[self._gcs.descriptor] = GONE

    @property
    def descriptors(self) -> list[int]:
        """Return what can be waited for: ready once one of them is dead."""
        return [*self._watched]

    def check(self, ready: Iterable[Any] | None = None) -> None:
        """Raise FedfleetError where one is dead: of those that are ``ready``, as far as was waited for them."""
        result = list[Any](wait(self.descriptors, 0) if ready is None else ready)
        for what in (self._watched[descriptor] for descriptor in result if descriptor in self._watched):
            raise FedfleetError(f"executor: {what} {AFTER}")

    @property
    def dead(self) -> bool:
        """Whether one of them is dead."""
        return bool(wait(self.descriptors, 0))

    def close(self) -> None:
        """Watch no more."""
        if self._gcs is not None:
            self._watched.pop(self._gcs.descriptor, None)
            self._gcs.close()
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched, self._gcs = {}, None


class Ping:
    """A thread that calls an address, "host:port", again and again; ``descriptor`` is ready once nobody has answered for long."""

    def __init__(self, address: str, pause_s: float = PAUSE_S, patience_s: float = PATIENCE_S):
        host, _, port = address.rpartition(":")
        self._at = host.strip("[]"), int(port)
        self._pause_s, self._patience_s = pause_s, patience_s
        self.descriptor, self._rings = os.pipe()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fedfleet-gcs", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answered = time.monotonic()
        while not self._end.wait(self._pause_s):
            with suppress(OSError):
                socket.create_connection(self._at, timeout=ANSWERS_S).close()
                answered = time.monotonic()
            if time.monotonic() - answered > self._patience_s:
                os.write(self._rings, b"\0")
                return

    def close(self) -> None:
        """Call no more."""
        self._end.set()
        self._thread.join()
        os.close(self.descriptor)
        os.close(self._rings)


def _listener(path: str) -> int:
    """Return the number of the process that listens on a socket of this machine."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(path)
        return PEER.unpack(asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[0]
