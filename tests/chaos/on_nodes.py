"""Runs on several nodes, each with an address of its own, while nodes and actors are lost, frozen, cut off and joined."""

from __future__ import annotations

import heapq
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, cycle
from pathlib import Path
from typing import Any

import yaml

import fedfleet
from benchmarks.cluster.nodes import Node, Nodes, nodes
from fedfleet.config.schema import with_overrides
from tests.chaos.soak import BASE, CASES, Report, events, say, unlike

CONFIG: dict[str, Any] = {**BASE, "executor": {"kind": "ray", "block_size": 3}}
LONG_S = 20.0
# 15 s until a node is taken for dead: less than one is frozen or cut off for.
DEAD_AFTER = {
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
A_RUN = 6  # faults, at most
STUCK_S = 240.0  # without a round more: nothing here takes so long


class Disturbed:
    """Nodes under a run, and what is done to them: ``whole`` are those with nothing done to. The head loses an actor at most."""

    def __init__(self, nodes: Nodes, size: int, draw: random.Random):
        self.nodes, self.size, self.draw = nodes, size, draw
        self.whole: list[Node] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._joining = ThreadPoolExecutor(1)
        self._under_way: list[Future[None]] = []

    def refill(self) -> None:
        """Replace what is not whole, so that a run begins with all nodes."""
        self.done_joining()
        self._later.clear()
        for node in set(self.nodes.others) - set(self.whole):
            self.nodes.remove(node)
        while len(self.whole) < self.size - 1:
            self._add()

    def done_joining(self) -> None:
        """Wait for what joins."""
        while self._under_way:
            self._under_way.pop().result()

    def _add(self) -> None:
        self.whole.append(self.nodes.add())

    def _victim(self) -> Node | None:
        """Return a node that is whole no more."""
        self.whole = [node for node in self.whole if node.raylet()]
        if not self.whole:
            return None
        node = self.draw.choice(self.whole)
        self.whole.remove(node)
        return node

    def _in(self, seconds: float, node: Node, then: Callable[[], None]) -> None:
        """Do something later, after which the node is whole if it was not for long."""

        def back() -> None:
            then()
            if seconds < LONG_S:
                self.whole.append(node)

        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), back))

    def pass_time(self) -> None:
        """Do what is due."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def kill_raylet(self) -> bool:
        """Kill a raylet."""
        if (node := self._victim()) is None:
            return False
        node.kill_raylet()
        return True

    def power_off(self) -> bool:
        """Have a node gone."""
        if (node := self._victim()) is None:
            return False
        self.nodes.remove(node)
        return True

    def kill_actor(self) -> bool:
        """Kill an actor, on any node."""
        node = self.draw.choice([self.nodes.head, *self.whole])
        return node.signal(signal.SIGKILL, "ray::ClientActor") > 0

    def join(self) -> bool:
        """Let a node join where one is lost."""
        if len(self.whole) >= self.size - 1:
            return False
        self._under_way.append(self._joining.submit(self._add))
        return True

    def freeze(self, seconds: float) -> bool:
        """Freeze a node for so long."""
        if (node := self._victim()) is None:
            return False
        node.freeze()
        self._in(seconds, node, node.thaw)
        return True

    def cut(self, seconds: float | None) -> bool:
        """Cut a node off for so long, or for good."""
        if (node := self._victim()) is None:
            return False
        node.cut()
        if seconds is not None:
            self._in(seconds, node, node.fix)
        return True


FAULTS: dict[str, Callable[[Disturbed], bool]] = {
    "raylet killed": Disturbed.kill_raylet,
    "node lost at once": Disturbed.power_off,
    "actor killed": Disturbed.kill_actor,
    "node joins": Disturbed.join,
    "node frozen for 20 s": lambda d: d.freeze(LONG_S),
    "node frozen for 5 s": lambda d: d.freeze(5.0),
    "link cut for 20 s, and back": lambda d: d.cut(LONG_S),
    "link cut for 5 s, and back": lambda d: d.cut(5.0),
    "link cut for good": lambda d: d.cut(None),
}


def plan(draw: random.Random) -> Iterator[str]:
    """Yield faults for ever, all kinds equally often; a node joins for each that is lost."""
    lasting = [name for name in FAULTS if name != "node joins"]
    while True:
        for name in draw.sample(lasting, len(lasting)):
            yield name
            if name not in ("actor killed", "node frozen for 5 s", "link cut for 5 s, and back"):
                yield "node joins"


def soak(
    case: str,
    folder: Path,
    disturbed: Disturbed,
    faults: Iterator[str],
    *,
    rounds: int,
    most: int,
    every_s: tuple[float, float],
    more: dict[str, Any],
) -> Report:
    """Disturb a run by ``most`` of these faults at most, ``every_s`` apart (least, most), and compare it with one of this process.

    ``more`` overrides options of the case.
    It is ``lost`` where its files differ, it fails, or does not go on for STUCK_S.
    """
    started, draw, on = time.monotonic(), disturbed.draw, disturbed.nodes
    config = fedfleet.load(CONFIG, CASES[case] | {"rounds": rounds} | more)
    peace = fedfleet.Experiment(with_overrides(config, {"executor.kind": "local"})).run(folder / "peace")
    path, out, log, done = folder / "config.yaml", folder / "run", folder / "log.txt", Counter[str]()
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    disturbed.refill()
    asked = [f"executor.address={on.address}", f"executor.actors={disturbed.size}", "--out", out, "--no-report"]
    command = [sys.executable, "-m", "fedfleet", "run", path, *asked]
    with log.open("wb") as file:
        run = on.head.popen(command, {"PYTHONFAULTHANDLER": "1"}, stdout=file, stderr=file)
        last, since, pause = "", time.monotonic(), draw.uniform(*every_s)
        while run.poll() is None:
            time.sleep(0.1)
            disturbed.pass_time()
            if (now := max((p.name for p in out.glob("checkpoints/round-*")), default="")) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > STUCK_S:
                on.head.signal(signal.SIGABRT, "-m fedfleet run")  # it says where it is
                run.wait()
                return Report(case, rounds, dict(done), time.monotonic() - started, [f"stuck at {last}: {tail(log)}"])
            pause -= 0.1
            if last and pause <= 0 and sum(done.values()) < most:
                name = next(faults)
                done[name] += FAULTS[name](disturbed)
                pause = draw.uniform(*every_s)
    disturbed.done_joining()
    lost = [f"status {run.returncode}: {tail(log)}"] if run.returncode else []
    lost = lost or unlike(peace.folder, out)
    print(f"  {sum(done.values())} faults, {dict(events(out))}", flush=True)
    return Report(case, rounds, {k: v for k, v in done.items() if v}, time.monotonic() - started, lost)


def tail(log: Path) -> str:
    """Return the end of what a run has said."""
    return log.read_text(encoding="utf-8", errors="replace")[-4000:]


def soak_all(
    size: int,
    most: int,
    seed: int,
    cases: list[str],
    *,
    rounds: int,
    every_s: tuple[float, float],
    more: dict[str, Any],
) -> list[Report]:
    """Run one case after the other on so many nodes until so many faults were put in, and say of each what came of it."""
    draw, reports = random.Random(seed), list[Report]()
    faults, left, turn = plan(draw), most, cycle(cases)
    with nodes(size, cpus=1, **DEAD_AFTER) as found:
        disturbed = Disturbed(found, size, draw)
        while left > 0:
            with tempfile.TemporaryDirectory() as folder:
                how = {"rounds": rounds, "every_s": every_s, "more": more}
                reports.append(soak(next(turn), Path(folder), disturbed, faults, most=min(left, A_RUN), **how))
            left -= sum(reports[-1].faults.values())
            say(reports[-1])
    return reports
