"""One round: invitations, phases, and the account of what travelled."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator import rng
from fedfleet.simulator import tree as T
from fedfleet.simulator.algorithm import Cohort, Problem, Reduced
from fedfleet.simulator.batches import work
from fedfleet.simulator.block import BlockResult, BlockTask, run_block
from fedfleet.simulator.devices import Load
from fedfleet.simulator.errors import ClientError, FedfleetError
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.reduction import merge
from fedfleet.simulator.responses import Fate, Federation, Responses, respond
from fedfleet.simulator.rng import Key
from fedfleet.simulator.state import ClientStore
from fedfleet.simulator.tree import Tree
from fedfleet.simulator.work import Message, Phase

SCALAR_BYTES = 8  # a config scalar travels as a float64


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is fixed for a run.

    Attributes:
        seed: the run's seed.
        federation: how clients behave and whom the server waits for.
        shared_response_count: both phases of a round wait for the same share p_t of answers.
        min_responses, attempts: a phase with fewer answers is void, and the round starts again with new cohorts, so often
            in all.
        retry_after_s: virtual seconds that pass before the next cohort is tried.
        over_select: invite this many times as many clients as the algorithm asks for.
        block_size: clients a block, at most.

    """

    seed: int
    federation: Federation = field(default_factory=Federation)
    shared_response_count: bool = False
    min_responses: int = 1
    attempts: int = 10
    retry_after_s: float = 0.0
    over_select: float = 1.0
    block_size: int = 32


@dataclass
class PhaseRecord:
    """A row of ``phases.parquet`` and its fates."""

    phase: str
    attempt: int
    clients: Tensor
    responses: Responses
    started_s: float
    counts: dict[str, int] = field(default_factory=dict)
    train_loss: float | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    """What happened that depends on the machine, one a line of ``events.jsonl``; such a run is not reproducible to the bit."""


class TooFewResponses(FedfleetError):
    """A phase was answered by fewer clients than ``min_responses``."""


class EngineRound:
    """The engine's ``Round``: one attempt at one round."""

    def __init__(
        self,
        index: int,
        attempt: int,
        started_s: float,
        problem: Problem,
        conditions: Conditions,
        executor: Executor,
        store: ClientStore,
    ):
        self.index, self.attempt, self.problem = index, attempt, problem
        self.records: list[PhaseRecord] = []
        self.clock_s = started_s
        self._conditions, self._executor, self._store = conditions, executor, store
        self._root = rng.key(conditions.seed)
        self._invitations = 0

    @property
    def key(self) -> Key:
        """A key of the round, for the server's own draws."""
        return self._key("server")

    def _key(self, purpose: str) -> Key:
        return rng.fold(self._root, purpose, self.index, self.attempt)

    def invite(self, size: int, *, replace: bool = False) -> Cohort:
        """Invite a uniformly random cohort."""
        key = rng.fold(self._key("invite"), self._invitations)
        self._invitations += 1
        wanted = math.ceil(size * self._conditions.over_select)
        clients = rng.sample(
            key, self.problem.clients, wanted if replace else min(wanted, self.problem.clients), replace=replace
        )
        return Cohort(clients, _occurrences(clients) if replace else torch.zeros_like(clients))

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, inbox: Tree = None, steps: int | None = None
    ) -> Reduced:
        """Run one phase. ``inbox`` leaves are (S, ...), a row a cohort member. Raises TooFewResponses, ClientError."""
        c = self._conditions
        number = len(self.records)
        key = rng.fold(self._key("phase"), number)
        count_key = self._key("responses") if c.shared_response_count else key
        load = Load(*work(phase, self._examples(cohort.clients), steps))
        responses = respond(c.federation, cohort.clients, cohort.copies, load, self.clock_s, key, count_key)
        record = PhaseRecord(phase.name, self.attempt, cohort.clients, responses, self.clock_s)
        self.records.append(record)
        self.clock_s += responses.duration_s
        heard = responses.heard
        online = int((responses.fate != Fate.OFFLINE).sum())
        mail = T.count(inbox) // len(cohort) if inbox is not None else 0
        mail_bytes = T.num_bytes(inbox) // len(cohort) if inbox is not None else 0
        record.counts = {f.name.lower(): int((responses.fate == f).sum()) for f in Fate} | {
            "invited": len(cohort),
            "client_steps": 0,
            "floats_up": 0,
            "bytes_up": 0,
            "floats_down": online * (T.count(dict(shared.send)) + mail),
            "bytes_down": online * (T.num_bytes(dict(shared.send)) + mail_bytes + SCALAR_BYTES * len(shared.config)),
        }
        if len(heard) < c.min_responses:
            raise TooFewResponses(
                f"round {self.index}, phase {phase.name!r}: {len(heard)} of {len(cohort)} invited answered"
            )

        limits = responses.steps if c.federation.partial_work else None
        heard = self._longest_first(cohort.clients, heard)
        rows = _blocks(heard, c.block_size)
        tasks = [
            BlockTask(
                phase=phase.name,
                clients=cohort.clients[r],
                copies=cohort.copies[r],
                key=self._key("client"),
                steps=steps,
                limit=None if limits is None else responses.steps[r],
                own=None if phase.own is None else self._own(phase, shared, cohort.clients[r]),
                inbox=None if inbox is None else T.index(inbox, r),
            )
            for r in rows
        ]
        return self._merge(phase, record, cohort.clients[heard], tasks, shared)

    def _examples(self, clients: Tensor) -> Tensor:
        if self.problem.num_examples is None:
            return torch.full_like(clients, round(self.problem.mean_examples))
        return self.problem.num_examples(clients)

    def _longest_first(self, clients: Tensor, heard: Tensor) -> Tensor:
        """Order the heard clients by their examples, so that those of a block are alike and no long one comes last."""
        if self.problem.num_examples is None:
            return heard
        return heard[self.problem.num_examples(clients[heard]).argsort(descending=True, stable=True)]

    def _own(self, phase: Phase, shared: Message, clients: Tensor) -> Tree:
        fresh = phase.own
        assert fresh is not None
        return self._store.get(clients, lambda: fresh(shared.merged()))

    def _merge(
        self, phase: Phase, record: PhaseRecord, heard: Tensor, tasks: list[BlockTask], shared: Message
    ) -> Reduced:
        partials: dict[str, Any] = dict.fromkeys(phase.reduce)
        results: list[BlockResult] = []
        try:
            for task, result in zip(tasks, self._executor.map(run_block, shared, tasks), strict=True):
                for slot, reduction in phase.reduce.items():
                    partials[slot] = merge(reduction, partials[slot], result.partials[slot])
                if phase.own is not None:
                    self._store.stage(task.clients, result.own)
                if result.splits:
                    record.events.append(
                        {"event": "out_of_memory", "clients": len(task.clients), "splits": result.splits}
                    )
                results.append(result._replace(partials={}, own=None))
        except ClientError as e:
            raise ClientError(f"round {self.index}: {e}") from e.__cause__
        for name in ("floats_up", "bytes_up"):
            record.counts[name] = sum(getattr(r, name) for r in results)
        record.counts["client_steps"] = sum(r.steps for r in results)
        measured = sum(r.measured for r in results)
        record.train_loss = sum(r.loss for r in results) / measured if measured else None
        config = {k: torch.cat([r.config[k] for r in results]) for k in results[0].config}
        return Reduced({s: r.final(partials[s]) for s, r in phase.reduce.items()}, heard, config)


def _blocks(clients: Tensor, size: int) -> tuple[Tensor, ...]:
    """Split into blocks of at most ``size``, as equal as can be. Several are even in number: two workers end together."""
    count = math.ceil(len(clients) / size)
    return clients.tensor_split(min(len(clients), count + count % 2) if count > 1 else 1)


def _occurrences(clients: Tensor) -> Tensor:
    """Number repeated clients 0, 1, ... in order of appearance."""
    order = clients.argsort(stable=True)
    ordered = clients[order]
    first = torch.searchsorted(ordered, ordered)
    return torch.empty_like(clients).scatter_(0, order, torch.arange(len(clients)) - first)
