"""Clients that completed least often in a run, by name where their names are on record."""

from __future__ import annotations

import itertools

import numpy as np

from fedfleet.report.sheet import Grid
from fedfleet.report.tables import Run, heard_clients, invitations

SHOWN = 10


def table(run: Run) -> Grid | None:
    """A row a client, those heard least first, and of these those invited most; None where all were heard alike."""
    if (result := heard_clients(run)) is None:
        return None
    clients, counts, size = result
    ids, invited = invitations(run)
    heard = np.zeros(len(ids), np.int64)
    heard[np.searchsorted(ids, clients)] = counts
    if len(ids) == size and heard.min() == heard.max():
        return None
    known = {int(i): (int(h), int(n)) for i, h, n in zip(ids, heard, invited, strict=True) if np.isfinite(i)}
    unasked = itertools.islice((i for i in range(size) if i not in known), SHOWN)  # of millions, no more than are shown
    every = {**known, **dict.fromkeys(unasked, (0, 0))}
    order = sorted(every, key=lambda i: (every[i][0], -every[i][1], i))[:SHOWN]
    names = run.section("examples").get("client_names")
    rows = [[_called(names, i), *(f"{n:,}" for n in every[i])] for i in order]
    never = size - int((heard > 0).sum())
    text = f"{never:,} of {size:,} never completed a round. " if never else ""
    which = f"The {SHOWN} with the fewest" if size > SHOWN else "All, those with the fewest first"
    caption = f"{text}{which}; of those alike first who was invited most."
    return Grid(["client", "rounds completed", "invitations"], rows, caption, "Fewest rounds completed")


def _called(names: object, client: int) -> str:
    return f"client {client}" + (f": {names[client]}" if isinstance(names, list) and client < len(names) else "")
