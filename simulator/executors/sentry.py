"""Processes that do nothing but answer, one a node: by them a node is known to be silent sooner than Ray says that it is dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from fedfleet.simulator.executors.cluster import OnNode, ray


class Sentry:
    """An actor that answers."""

    def here(self) -> None:
        """Do nothing."""


class _Post(NamedTuple):
    """A sentry, what it was asked last, and when it last answered; None before it has come up."""

    actor: Any
    asked: Any
    heard: float | None


class Sentries:
    """Those of a cluster's nodes. ``create(node)`` makes one there, ``answered(asked)`` says whether an answer is there.

    The latter raises where the sentry has died, and then there is a new one: Ray tells what else has.
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
        """Return the nodes, of these, whose sentries have answered once, and not for ``silent_s`` seconds."""
        nodes, now = set(nodes), time.monotonic()
        for gone in self._posts.keys() - nodes:
            del self._posts[gone]
        for node in nodes:
            post = self._posts.get(node)
            try:
                if post is None:
                    actor = self._create(node)
                    self._posts[node] = _Post(actor, actor.here.remote(), None)
                elif self._answered(post.asked):
                    self._posts[node] = _Post(post.actor, post.actor.here.remote(), now)
            except Exception:
                self._posts.pop(node, None)
        return frozenset(n for n, p in self._posts.items() if p.heard is not None and now - p.heard > self.silent_s)

    def close(self) -> None:
        """Let them go."""
        for post in self._posts.values():
            with suppress(Exception):
                ray.kill(post.actor)
        self._posts = {}


def _sentry(node: str) -> Any:
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
