"""Availability of a configuration: who is online, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from fedfleet.config.schema import Config
from fedfleet.datasets.examples import fixed_draw
from fedfleet.experiments.experiment import Experiment
from fedfleet.report.online_figures import Presence
from fedfleet.report.tables import gini
from fedfleet.report.words import share
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.availability import Availability, Chances, InTime, in_round

LOOKED_AT = 1_000  # clients, a fixed draw where there are more
COLUMNS = 200  # rounds or moments, at most
HOUR_S = 3600.0


def look(config: Config) -> Presence:
    """Return who is online under a configuration, in its first rounds or over a time that suits the process.

    Raises ConfigError, DataError.
    """
    x = Experiment(config)
    model, size = x.federation.availability, x.problem.clients
    shown = fixed_draw(size, LOOKED_AT)
    horizon_s = model.span_s if isinstance(model, InTime) else None
    if horizon_s is None:
        at, unit, seconds = torch.arange(min(config.rounds, COLUMNS)).double(), "round", torch.zeros(COLUMNS).double()
    else:
        seconds = torch.arange(COLUMNS).double() * (horizon_s / COLUMNS)
        at, unit = (seconds / HOUR_S, "virtual hours") if horizon_s > 3 * HOUR_S else (seconds, "virtual seconds")
    key = rng.fold(rng.key(config.seed), "show")
    columns = [
        in_round(model, t).online(rng.fold(key, t), shown, seconds[t].expand(len(shown))) for t in range(len(at))
    ]
    return Presence(
        title=f"availability: {config.availability.kind}",
        clients=size,
        shown=shown.numpy(),
        online=torch.stack(columns, 1).numpy(),
        at=at.numpy(),
        unit=unit,
        long_run=_long_run(in_round(model, 0), shown),
    )


def _long_run(model: Availability, clients: Tensor) -> np.ndarray | None:
    return model.long_run(clients).numpy() if isinstance(model, Chances) else None


def table(seen: Presence) -> Table:
    """Return a table of what is seen."""
    made = Table(title=seen.title, show_header=False)
    of, now = seen.long_run, seen.online.mean(0)
    few = "" if len(seen.shown) == seen.clients else f", {len(seen.shown):,} of them looked at, a fixed draw"
    rows = {
        "clients": f"{seen.clients:,}{few}",
        "shown": f"{len(seen.at)} {'rounds' if seen.unit == 'round' else f'moments, {seen.at[-1]:.4g} {seen.unit}'}",
        "online": f"{share(now.mean())} of them, from {share(now.min())} to {share(now.max())}",
        "online in the long run": "the model does not tell",
    }
    if of is not None:
        rows["online in the long run"] = f"{share(of.mean())}, of a client {share(of.min())} to {share(of.max())}"
        rows["Gini of the long run"] = f"{gini(of, len(of)):.2f}"
        rows["never online"] = f"{int((of == 0).sum()):,} clients"
    for key, value in rows.items():
        made.add_row(key, value)
    return made


def draw(seen: Presence, out: Path) -> str:
    """Draw what is seen to a new file, and return its path. Raises ConfigError."""
    from fedfleet.report import canvas, online_figures  # matplotlib takes most of a second to import

    try:
        canvas.write(lambda: online_figures.figure(seen), out)
    except OSError as e:
        raise ConfigError(f"--out={str(out)!r}: it cannot be written ({e.strerror or e}): give another path") from None
    return str(out)
