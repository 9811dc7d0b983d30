"""One round as an algorithm sees it: invitations, phases, and, for asynchronous methods, buffers of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator import authored
from fedfleet.simulator.algorithm import Buffer, Buffered, Cohort, Done, Problem, Reduced, Role
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import CollectUploads, fillable
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.spill import SpillFile
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix
from fedfleet.simulator.block.batches import work
from fedfleet.simulator.block.block import run_block
from fedfleet.simulator.block.faults import Dropped
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.block.uplink import Remembering
from fedfleet.simulator.driver.answers import Answers, Group, listed, merged
from fedfleet.simulator.driver.at_server import at_server
from fedfleet.simulator.driver.conditions import Conditions
from fedfleet.simulator.driver.memory import Memory
from fedfleet.simulator.driver.records import PhaseRecord, message_size
from fedfleet.simulator.driver.sharding import bucket_sizes, in_order, shared_out, sizes_of_blocks
from fedfleet.simulator.driver.timeouts import Run, limit_s
from fedfleet.simulator.errors import ClientError, FedfleetError
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.fleet.buffer import Server, fill, lapse
from fedfleet.simulator.fleet.devices import Load
from fedfleet.simulator.fleet.in_flight import InFlight
from fedfleet.simulator.fleet.late import Assignment
from fedfleet.simulator.fleet.policies import rounded_up
from fedfleet.simulator.fleet.responses import Outcome, chance
from fedfleet.simulator.fleet.secagg import exchange
from fedfleet.simulator.fleet.selection import Completed, occurrences
from fedfleet.simulator.work import Lasting, Message, Phase


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
        memory: Memory,
    ):
        self.index, self.attempt, self.problem = index, attempt, problem
        self.records: list[PhaseRecord] = []
        self.aborted: Sequence[PhaseRecord] = ()  # of earlier attempts at the round
        self.asked_for: set[int] = set()  # sizes of the cohorts of all clients
        self.clock_s, self.sampling_s, self._root = started_s, 0.0, rng.key(conditions.seed)
        self._conditions, self._executor, self._memory = conditions, executor, memory
        self._federation = conditions.federation.in_round(index)
        self._invitations, self._draws, self._draws_at_server = 0, self._key("client"), self._key("at server")

    @property
    def key(self) -> Key:
        """A key of the round, for the server's own draws."""
        return self._key("server")

    def _key(self, purpose: str) -> Key:
        return rng.fold(self._root, purpose, self.index, self.attempt)

    def invite(self, size: int, *, replace: bool = False, role: Role | None = None) -> Cohort:
        """Invite a cohort as the selection draws it."""
        c, memory = self._conditions, self._memory
        with self._sampling():
            key = rng.fold(self._key("invite"), self._invitations)
            self._invitations += 1
            wanted = rounded_up(size * c.over_select)
            problem = self.problem if role is None else self.problem.among(role)
            self.asked_for |= {size} if role is None else set()
            wanted = wanted if replace else max(size, min(wanted, problem.clients))
            clients, memory.selection = c.selection.invite(memory.selection, key, wanted, problem, replace=replace)
            if role is not None:
                ids = self.problem.sources if role == "source" else self.problem.targets
                assert ids is not None
                clients = ids[clients]
            return Cohort(clients, occurrences(clients) if replace else torch.zeros_like(clients))

    def draw(self, size: int, clients: Callable[[int, Key], Tensor]) -> Cohort:
        """Invite clients that the algorithm draws itself."""
        with self._sampling():
            key = rng.fold(self._key("draw"), self._invitations)
            self._invitations += 1
            self.asked_for.add(size)
            drawn = clients(rounded_up(size * self._conditions.over_select), key)
            return Cohort(drawn, occurrences(drawn))

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        started = perf_counter()
        yield
        self.sampling_s += perf_counter() - started

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        """Run one phase. ``client_input`` leaves are (S, ...), a row a cohort member. Raises TooFewResponses, ClientError.

        Each exchange of a round has draws of its own, whatever its phase: a client asked twice takes other minibatches and noise.
        """
        asked, record = self._ask(phase, shared, cohort, client_input, steps)
        groups = self._heard(phase, asked, record)
        answers = self._work(phase, record, groups)
        result = self._reduced(phase, groups, answers)
        self._keep(phase, asked, record, groups[0], answers)
        return result

    def _ask(
        self, phase: Phase, shared: Message, cohort: Cohort, client_input: Tree, steps: int | None
    ) -> tuple[Assignment, PhaseRecord]:
        """Send a phase's messages, and find out who answers when. Raises TooFewResponses."""
        authored.asked(shared, cohort)
        c, number = self._conditions, len(self.records)
        draws, self._draws = self._draws, rng.fold(self._draws, "next")
        key = rng.fold(self._key("phase"), number)
        count_key = self._key("responses") if c.shared_response_count else key
        num_examples = self._examples(cohort.clients)
        load = self._load(phase, num_examples, shared, client_input, steps)
        federation = self._federation.during(phase)
        with self._sampling():
            who = federation, cohort.clients, cohort.copies
            responses, secured = exchange(phase.secure, *who, load, self.clock_s, key, count_key)
        record = PhaseRecord(phase.name, self.attempt, cohort.clients, responses, self.clock_s, secured=secured)
        asked = Assignment(
            phase=phase.name,
            round=self.index,
            shared=replace(shared, size=None),
            clients=cohort.clients,
            copies=cohort.copies,
            key=draws,
            steps=steps,
            limit=responses.steps if federation.partial_work else None,
            client_input=client_input,
            seconds=responses.seconds,
            num_examples=num_examples,
            asked_s=self.clock_s,
            weights=cohort.weights,
        )
        self.records.append(record)
        self.clock_s += responses.duration_s
        record.invited(shared, client_input)
        completed = record.counts["completed"]
        try:
            self._enough(record, completed)
        except TooFewResponses:
            record.in_vain = completed
            raise
        return asked, record

    def _heard(self, phase: Phase, asked: Assignment, record: PhaseRecord) -> list[Group]:
        """Return those heard, the first group, and the late of earlier rounds whose answers are in by now."""
        discount, invited = self._conditions.stale_discount, len(asked.clients)
        groups = [self._group(phase, asked.take(record.responses.completed), invited)]
        for old in self._memory.late.arrived(phase.name, self.index, self.clock_s):
            assert discount is not None
            groups.append(self._group(phase, old, invited, discount ** (self.index - old.round)))
        return groups

    def _work(self, phase: Phase, record: PhaseRecord, groups: list[Group]) -> Answers:
        """Let clients work, and note who failed in it. Raises TooFewResponses, ClientError."""
        (answers,) = self._answers(phase, record, [groups])
        kept, *stale = answers.kept
        if answers.dropped:
            record.befell(record.responses.completed[groups[0].order[~kept]], Outcome.FAILED)
        record.counts["merged_stale"] = sum(int(k.sum()) for k in stale)
        self._enough(record, int(kept.sum()), answers.dropped)
        return answers

    def _keep(self, phase: Phase, asked: Assignment, record: PhaseRecord, completed: Group, answers: Answers) -> None:
        """Remember the late for later rounds, and tell the selection of those heard."""
        c = self._conditions
        if c.selection.feedback:
            self._learn(completed.asked.take(answers.kept[0].nonzero().flatten()), answers)
        if not record.counts["late"]:
            return
        late = (record.responses.outcome == Outcome.LATE).nonzero().flatten()
        keeps = c.stale_discount is not None and phase.client_state is None  # a client's state has moved on by then
        if keeps:
            record.befell(late, Outcome.STALE)
            self._memory.late.add(asked.take(late))
        elif c.train_all:
            wasted = self._group(phase, asked.take(late), len(asked.clients))
            merged(phase, [wasted], [self._start(wasted)(wasted.tasks)], self._start)

    def online(self, cohort: Cohort) -> Tensor:
        """Return which clients of a cohort are online now, a mask (S,), as the next exchange will find them."""
        key = rng.fold(self._key("phase"), len(self.records))
        with self._sampling():
            now = torch.full((len(cohort),), self.clock_s, dtype=torch.float64)
            return self._federation.online(key, cohort.clients, now)

    def chances(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Tensor:
        """Return the chance (S,) float64 that each of a cohort answers if it is asked now. Raises ConfigError."""
        key = rng.fold(self._key("phase"), len(self.records))
        load = self._load(phase, self._examples(cohort.clients), shared, client_input, steps)
        with self._sampling():
            return chance(self._federation.during(phase), cohort.clients, cohort.copies, load, self.clock_s, key)

    def _enough(self, record: PhaseRecord, answers: int, dropped: Sequence[Dropped] = ()) -> None:
        """Raise TooFewResponses where there are not enough answers."""
        aborted = record.secured and record.secured.aborted
        if answers >= self._conditions.min_responses and not aborted:
            return
        why = f", and {listed(dropped)}" if dropped else f", and {aborted}" if aborted else ""
        raise TooFewResponses(
            f"round {self.index}, phase {record.phase!r}: {answers} of {len(record.clients)} invited answered{why}"
        )

    def buffered(
        self,
        phase: Phase,
        *,
        messages: Mapping[int, Message],
        buffer: Buffer,
        weights: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Buffered]:
        """Fill a buffer with answers of clients at work all the time. Raises FedfleetError, ClientError.

        Where one of them is dropped, all goes as if it had failed on its way: time goes on until the buffer is full.
        """
        c, flights, started = self._conditions, self._memory.flights, self.clock_s
        server = Server(
            federation=self._federation.during(phase),
            clients=self.problem.clients,
            load=lambda clients: self._load(phase, self._examples(clients), messages[self.index]),
            root=rng.fold(self._root, "flights"),
            version=self.index,
            concurrency=buffer.at_work(self.problem.clients),
            max_staleness=buffer.max_staleness,
            tries=c.attempts,
            retry_s=c.retry_s,
        )
        before, launched, events, dropped = flights.under_way(), flights.launched, [], {}
        while True:
            with self._sampling():
                now = server._replace(dropped=dropped.keys())
                if buffer.seconds is None:
                    ended = fill(now, flights, buffer.size, started)
                else:
                    ended = lapse(now, flights, buffer.seconds, started)
            self.clock_s = started + ended.responses.duration_s
            record = PhaseRecord(phase.name, self.attempt, ended.clients, ended.responses, started, events=events)
            record.invited(messages[self.index], online=ended.launched)
            record.counts["merged_stale"] = sum(f.version != self.index for f in ended.used)
            if buffer.seconds is None and len(ended.used) < (buffer.size):
                why = f" ({listed(list(dropped.values()))})" if dropped else ""
                raise FedfleetError(
                    f"round {self.index}, phase {phase.name!r}: {len(ended.used)} of {buffer.size} answers came in, and then none, "
                    f"however many clients were invited{why}: raise the rate of availability or cohort.retry_s, or lower "
                    f"devices.failures_per_hour"
                )
            versions = sorted({f.version for f in ended.used}, reverse=True)
            groups = [
                [
                    self._flown(
                        phase,
                        messages[v],
                        v,
                        [f for f in ended.used if f.version == v],
                        buffer.answers(self.problem.clients),
                        weights,
                    )
                ]
                for v in versions
            ]
            answers = self._answers(phase, record, groups)
            result = {
                number: who
                for ((group,), a) in zip(groups, answers, strict=True)
                for number, who in zip(group.asked.copies[~a.kept[0]].tolist(), a.dropped, strict=True)
            }
            if not result:
                break
            dropped |= result
            flights.replace(before.copy(), launched)
        self.records.append(record)
        reduced = [self._reduced(phase, *pair) for pair in zip(groups, answers, strict=True)]
        return [Buffered(self.index - v, r) for v, r in zip(versions, reduced, strict=True)]

    def versions(self) -> set[int]:
        """Return the rounds whose messages clients are still at work on."""
        return self._memory.flights.versions()

    def hand_back(
        self, phase: Phase, result: Reduced, *, shared: Message, client_state: Callable[[Mapping[str, Any]], Tree]
    ) -> None:
        """Send something more to the clients heard in a phase, which keep what comes of it."""
        new, completed = client_state(shared.merged()), len(result.received)
        new = T.stack([new] * completed)
        before = self._own(phase, shared, result.received)
        self._memory.store.stage(result.received, _handed(before, new))
        record = next(r for r in reversed(self.records) if r.phase == phase.name)
        record.handed_back(shared, completed)

    def at_server(self, phase: Phase, *, shared: Message, client_state: Tree = None, steps: int | None = None) -> Done:
        """Work as a client does, on the server's own examples; no record is made of it. Raises ClientError."""
        key, self._draws_at_server = self._draws_at_server, rng.fold(self._draws_at_server, "next")
        return at_server(self._executor, phase, shared, client_state, key, steps, self._conditions.faults)

    def _flown(
        self,
        phase: Phase,
        shared: Message,
        version: int,
        flights: list[InFlight],
        invited: int,
        weights: Callable[[Tensor], Tensor] | None,
    ) -> Group:
        """Return the work behind answers that started from one version."""
        clients = torch.tensor([f.client for f in flights])
        asked = Assignment(
            phase=phase.name,
            round=version,
            shared=shared,
            clients=clients,
            copies=torch.tensor([f.number for f in flights]),
            key=rng.fold(self._root, "client", version, 0),
            steps=None,
            limit=torch.tensor([f.steps for f in flights]) if self._federation.during(phase).partial_work else None,
            client_input=None,
            seconds=torch.tensor([f.ends_s for f in flights], dtype=torch.float64) - self.clock_s,
            num_examples=self._examples(clients),
            asked_s=self.clock_s,
            weights=None if weights is None else weights(clients),
        )
        return self._group(phase, asked, invited)

    def _load(
        self, phase: Phase, num_examples: Tensor, shared: Message, client_input: Tree = None, steps: int | None = None
    ) -> Load:
        c = self._conditions
        return Load(
            *work(phase, num_examples, steps),
            bytes_down=message_size(shared, client_input, len(num_examples))[1],
            bytes_up=c.bytes_up.get(phase.name, 0.0),
            flop=c.flop.get(phase.name, 0.0),
        )

    def _examples(self, clients: Tensor) -> Tensor:
        of = self.problem.num_examples
        return torch.full_like(clients, round(self.problem.mean_examples)) if of is None else of(clients)

    def _group(self, phase: Phase, asked: Assignment, invited: int, discount: float = 1.0) -> Group:
        """Cut work into blocks; ``invited`` is how many clients were asked, those at work included."""
        c, order = self._conditions, in_order(phase, asked)
        asked = asked.take(order)
        keeps = any(isinstance(r, CollectUploads) for r in phase.reduce.values())
        # What adds nothing to a sum of numbers makes one of infinite ones no number.
        fills = fillable(phase.reduce.values()) and c.faults.non_finite != "keep"
        everywhere = BlockTask(
            phase=phase.name,
            clients=asked.clients,
            copies=asked.copies,
            key=asked.key,
            steps=asked.steps,
            limit=asked.limit,
            client_input=asked.client_input,
            weights=asked.weights,
            discount=discount,
            feedback=c.selection.feedback,
            faults=c.faults,
            spill=SpillFile(c.spilled_bytes) if keeps else None,
            buckets=bucket_sizes(invited, c.block_size) if fills else (),
        )
        apart = keeps or c.faults.client_timeout_s is not None  # then each block is a task
        blocks, hosts = sizes_of_blocks(len(asked.clients), c.block_size), () if apart else self._executor.hosts
        tasks, sharding = shared_out(phase, everywhere, blocks, hosts, T.num_bytes(dict(asked.shared.send)))
        if phase.client_state is not None:
            tasks = [t._replace(client_state=self._own(phase, asked.shared, t.clients)) for t in tasks]
        return Group(asked, order, tasks, discount, sharding)

    def _own(self, phase: Phase, shared: Message, clients: Tensor) -> Tree:
        fresh = phase.client_state
        assert fresh is not None
        return self._memory.store.get(clients, lambda: authored.state(fresh(shared.merged())))

    def _start(self, group: Group) -> Run:
        """Return what starts blocks of a group on the executor."""
        return lambda tasks: self._executor.map(
            run_block, group.asked.shared, tasks, timeout_s=limit_s(tasks), sharding=group.sharding
        )

    def _answers(self, phase: Phase, record: PhaseRecord, sets: list[list[Group]]) -> list[Answers]:
        """Run all groups side by side, and merge what each set of them sends."""
        started = [[self._start(g)(g.tasks) for g in groups] for groups in sets]
        try:
            result = [merged(phase, *pair, self._start) for pair in zip(sets, started, strict=True)]
        except ClientError as e:
            raise type(e)(f"round {self.index}: {e.told()}") from e.__cause__
        record.received(
            [r for answers in result for r in answers.results], sum(int(k.sum()) for a in result for k in a.kept)
        )
        return result

    def _reduced(self, phase: Phase, groups: list[Group], answers: Answers) -> Reduced:
        """Stage the clients' states, and end the reductions."""
        for clients, client_state in answers.client_state if phase.client_state is not None else ():
            self._memory.store.stage(clients, client_state)
        clients = torch.cat([g.asked.clients[kept] for g, kept in zip(groups, answers.kept, strict=True)])
        unit = [g.counts[kept] for g, kept in zip(groups, answers.kept, strict=True)]
        values = {s: r.final(answers.partials[s]) for s, r in phase.reduce.items()}
        kept = {s: v._replace(device=self._conditions.device) for s, v in values.items() if isinstance(v, UploadMatrix)}
        return Reduced(values | kept, clients, answers.config, torch.cat(unit))

    def _learn(self, asked: Assignment, answers: Answers) -> None:
        """Tell the selection what the server has learnt of the clients of this round; nothing of those whose loss is no number."""
        c, memory = self._conditions, self._memory
        loss = torch.cat([r.losses for r in answers.results if r.losses is not None])[: len(asked.clients)]
        seen = loss.isfinite().nonzero().flatten()
        mine = asked.take(seen)
        completed = Completed(self.index, mine.clients, loss[seen], mine.seconds, mine.num_examples)
        memory.selection = c.selection.observe(memory.selection, completed)


def _handed(before: Tree, new: Tree) -> Tree:
    """Return clients' states with what they were handed in the place of their own, within what the engine keeps around it."""
    if isinstance(before, Remembering | Lasting):
        return before._replace(client_state=_handed(before.client_state, new))
    return new
