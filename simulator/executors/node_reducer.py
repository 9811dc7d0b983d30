"""The results of a task's parts are joined on the node that has them, so that the driver takes one result in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from fedfleet.simulator.executors.base import TaskSharding
from fedfleet.simulator.executors.batch import Batch, Held
from fedfleet.simulator.executors.cluster import OnNode, ray, share_tensors
from fedfleet.simulator.executors.fingerprint import LoadedModules, Place
from fedfleet.simulator.executors.pool import LOST
from fedfleet.simulator.executors.worker import prepare


class Joined(NamedTuple):
    """A joined result, and the node on which it was joined, with the author's modules that were loaded for it."""

    result: Any
    place: Place


class NodeReducer:
    """An actor that joins results, beside those that work."""

    def __init__(self) -> None:
        share_tensors()
        prepare(threads=1)
        self._node: str = ray.util.get_node_ip_address()  # pyright: ignore[reportAttributeAccessIssue]
        self.renew()

    def renew(self) -> None:
        """Tell another run of all modules again."""
        self._loaded = LoadedModules()

    def join(self, sharding: TaskSharding, parts: Sequence[Any], *results: Any) -> Joined:
        """Return the result of a task from those of its parts; such as lie on other nodes Ray brings here."""
        result = sharding.join(parts, results)
        return Joined(result, Place(self._node, self._loaded.new()))


class NodeReducers:
    """Node reducers, one a node that needs one, and what they have to do. ``when`` is that of an event queue.

    ``lost(batch, number, error)`` is called where what was to be joined is gone, or who was to do it. ``check(place)`` is told what
    modules a node has loaded for it. ``here()`` is this node.
    """

    def __init__(
        self,
        when: Callable[[Any, Callable[[Future[Any]], None]], None],
        lost: Callable[[Batch, int, Exception], None],
        check: Callable[[Place], None],
        create: Callable[[str], Any] | None = None,
        here: Callable[[], str] | None = None,
    ):
        self._when, self._lost, self._check = when, lost, check
        self._create, self._here = create or _joiner, here or _this_node
        self._joiners: dict[str, Any] = {}
        self._under_way: dict[tuple[int, int], tuple[Batch, str]] = {}  # by batch and task: on which node

    def __bool__(self) -> bool:
        """Say whether any is under way."""
        return bool(self._under_way)

    def join(self, batch: Batch, number: int, result: Sequence[Any]) -> None:
        """Join what came of the parts of a task; its result, or the first error among them, is done then."""
        assert batch.sharding is not None
        if (error := next((f for f in result if isinstance(f, Exception)), None)) is not None:
            batch.done[number] = error
            return
        if not any(isinstance(f, Held) for f in result):  # this process has them all
            try:
                batch.done[number] = batch.sharding.join(batch.bare(number), result)
            except Exception as e:
                batch.done[number] = e
            return
        node = Counter(f.node if isinstance(f, Held) else self._here() for f in result).most_common(1)[0][0]
        if node not in self._joiners:
            self._joiners[node] = self._create(node)
        given = (f.reference if isinstance(f, Held) else f for f in result)
        reference = self._joiners[node].join.remote(batch.sharding, batch.bare(number), *given)
        self._under_way[id(batch), number] = batch, node
        self._when(reference, partial(self._settle, batch, number, node))

    def _settle(self, batch: Batch, number: int, node: str, future: Future[Any]) -> None:
        if self._under_way.get((id(batch), number)) != (batch, node):  # it was given up
            return
        del self._under_way[id(batch), number]
        try:
            joined: Joined = future.result()
        except LOST as e:
            self._let_go(node)
            self._lost(batch, number, e)
        except Exception as e:
            batch.done[number] = e
        else:
            batch.done[number] = joined.result
            self._check(joined.place)

    def renew(self) -> None:
        """Have what is loaded told to another run."""
        for joiner in self._joiners.values():
            joiner.renew.remote()

    def gone(self, nodes: Iterable[str]) -> None:
        """Give up what nodes have to do that do not answer: it runs again."""
        for node in nodes:
            for key in [key for key, (_, at) in self._under_way.items() if at == node]:
                batch, _ = self._under_way.pop(key)
                batch.all_again(key[1])
            self._let_go(node)

    def _let_go(self, node: str) -> None:
        if node in self._joiners:
            with suppress(Exception):
                ray.kill(self._joiners.pop(node))

    def close(self) -> None:
        """Let all joiners go."""
        self._under_way = {}
        for node in list(self._joiners):
            self._let_go(node)


def _joiner(node: str) -> Any:
    options = {"num_cpus": 0, "enable_task_events": False, "scheduling_strategy": OnNode(node, soft=False)}
    return ray.remote(NodeReducer).options(**options).remote()  # pyright: ignore


def _this_node() -> str:
    return ray.get_runtime_context().get_node_id()
