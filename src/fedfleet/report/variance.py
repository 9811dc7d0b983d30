"""Variance that intervals over seeds hold, in words: what differs from seed to seed, and whether clients do."""

from __future__ import annotations

from collections.abc import Sequence

from fedfleet.report.tables import Run
from fedfleet.report.words import joined, plain_value

KEY = "population.partition_seed"
PAIRED = "seed"
"""The value of the key with which every seed deals its clients anew."""


def everybody(run: Run) -> bool:
    """Whether each round invites all clients."""
    size, clients = run.get("cohort", "size"), run.get("population", "clients")
    return isinstance(size, int) and isinstance(clients, int) and size >= clients


def held(runs: Sequence[Run], *, advice: bool = True) -> str | None:
    """Return the sentences, and what to set (``advice``); None for runs of one seed, or if nothing says how clients were dealt."""
    kept = [run for run in runs if isinstance(run.config.get("population"), dict)]
    if not kept or len({run.seed for run in kept}) < 2:
        return None
    told = {
        "initial models": not all(run.config.get("warm_start") for run in kept),
        "cohorts": not all(map(everybody, kept)),
        "who is online": not all(run.get("availability", "kind") == "always" for run in kept),
        "batches": True,
    }
    varying = [name for name, varies in told.items() if varies]
    dealt = {plain_value(run.config["population"].get("partition_seed", 0)) for run in kept}
    if dealt == {PAIRED}:
        varying.append("partitions")
        how = f"Every seed deals the clients anew{f' ({KEY}: {PAIRED})' * advice}."
    elif PAIRED in dealt:
        varying.append(f"partitions where {KEY} is {PAIRED}")
        how = "Elsewhere the partition is the same for all seeds, and intervals say nothing of other partitions."
    elif all(run.summary.get("dealt") is False for run in kept):
        how = "The clients are those of the data, the same for all seeds: intervals say nothing of other clients."
    else:
        at = joined(sorted(dealt))
        where = f" ({KEY} = {at})" * advice
        how = f"The partition is the same for all seeds{where}: intervals say nothing of other partitions."
        fixed = all(run.summary.get("drawn") is False for run in kept)
        how += (
            " This partition draws nothing." if fixed else f" To deal anew for every seed, set {KEY}: {PAIRED}."
        ) * advice
    return f"Spreads and intervals over seeds hold the variance of {joined(varying)}. {how}"
