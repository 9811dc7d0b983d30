"""Processes that do nothing but answer, one a node: by them a node is known to be silent sooner than Ray says that it is dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from fedfleet.simulator.executors.cluster import OnNode, ray

FIRST_S = (
    30.0  # what the first answer may take besides: a process has to start, on a node where actors may be starting too
)


class _Post(NamedTuple):
    """The process of a node, what it was asked last, and until when the node is not taken for silent."""

    actor: Any
    asked: Any
    until: float


class Heartbeats:
    """Heartbeats of a cluster's nodes.

    ``create(node)`` makes a process there, and ``answered(asked)`` says whether its answer is there. The latter raises
    where the process has died. Then a new one takes its place, and Ray tells what else has died.
    """

    def __init__(
        self,
        silent_s: float,
        create: Callable[[str], Any] | None = None,
        answered: Callable[[Any], bool] | None = None,
    ):
        self.silent_s, self._create, self._answered = silent_s, create or _sentry, answered or _answered
        self._posts: dict[str, _Post] = {}

    def silent(self, nodes: Iterable[str]) -> frozenset[str]:
        """Return those nodes that have not answered for ``silent_s`` seconds, or never for ``FIRST_S`` more."""
        nodes, now = set(nodes), time.monotonic()
        for gone in self._posts.keys() - nodes:
            del self._posts[gone]
        for node in nodes:
            post = self._posts.get(node)
            try:
                if post is None:
                    actor = self._create(node)
                    self._posts[node] = _Post(actor, actor.here.remote(), now + FIRST_S + self.silent_s)
                elif self._answered(post.asked):
                    self._posts[node] = _Post(post.actor, post.actor.here.remote(), now + self.silent_s)
            except Exception:
                self._posts.pop(node, None)
        return frozenset(n for n, p in self._posts.items() if now > p.until)

    def close(self) -> None:
        """Let them go."""
        for post in self._posts.values():
            with suppress(Exception):
                ray.kill(post.actor)
        self._posts = {}


def _sentry(node: str) -> Any:
    class Sentry:
        """An actor that answers. Defined here it travels by value: to import this module would take its process seconds."""

        def here(self) -> None:
            """Do nothing."""

    return (
        ray.remote(Sentry)
        .options(num_cpus=0, scheduling_strategy=OnNode(node, soft=False), enable_task_events=False)
        .remote()
    )  # pyright: ignore


def _answered(asked: Any) -> bool:
    ready, _ = ray.wait([asked], timeout=0)
    if ready:
        ray.get(asked)
    return bool(ready)
