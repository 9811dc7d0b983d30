"""Disk use of a run, estimated before it begins: tables, models, checkpoints, states of clients."""

from __future__ import annotations

from typing import NamedTuple

from fedfleet.assembly.prepared import Prepared
from fedfleet.config.selection import asked
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.codec import encode
from fedfleet.simulator.driver.evaluation import says_classes
from fedfleet.simulator.driver.server import initial, model

OUTCOME, ROUND, PHASE, NUMBER = 15, 50, 26, 8
"""Bytes of a row of ``outcomes``, ``rounds`` and ``phases`` as Parquet has them, and of a metric in other tables."""
PLACE, COUNTED = 25, 64
"""Bytes of a client's place in a checkpoint; and of its outcomes, where they are counted, in the table and in each checkpoint."""
TEXTS, CHECKPOINT = 25_000, 7_000
"""Bytes of configuration, summary, card and the heads of tables, and of what a checkpoint says of its run."""


class DiskUse(NamedTuple):
    """Bytes of a run folder at the end of the run, without a report."""

    tables: int
    models: int
    checkpoints: int
    states: int
    clients: int
    """Clients that keep a state, at most."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.tables + self.models + self.checkpoints + self.states


def estimated(x: Prepared) -> DiskUse:
    """Return what a run will take; the states of clients are those of as many as it may hear, aborted attempts are left out."""
    config, population = x.config, x.problem.clients
    invited = x.answers if x.algorithm.asynchronous else asked(config.cohort)
    rounds, phases, evaluations = config.rounds, len(x.algorithm.phases), config.rounds // config.evaluation.every + 1
    classes = x.examples.get("classes", 0) if says_classes(x.task) else 0
    rows = classes + len(x.domain_names) + population * config.evaluation.per_client
    metrics = len(x.metric_names())
    listed, asked_ever = config.evaluation.outcomes == "listed", min(population, rounds * invited * phases)
    tables = rounds * (ROUND + PHASE * phases + OUTCOME * invited * phases * listed)
    counts = 0 if listed else COUNTED * asked_ever
    tables += NUMBER * evaluations * (metrics + rows * 2)
    state = initial(x.algorithm, x.z, config.seed, x.problem)
    one = T.num_bytes(model(x.algorithm, state))
    each = max(x.notes.kept.values(), default=0)
    clients = asked_ever if each else 0
    kept = CHECKPOINT + T.num_bytes(encode(state)[1]) + each + PLACE * clients + counts
    return DiskUse(
        tables=tables + counts + TEXTS,
        models=one * (1 + (config.checkpoint.best is not None)),
        checkpoints=config.checkpoint.keep * kept,
        states=each * (clients + min(clients, invited)),  # a state that changes goes to a place that is free
        clients=clients,
    )
