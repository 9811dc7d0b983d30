"""Data of a configuration: what each client holds, as tables and as a picture, and the partition as a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from fedfleet.config import root
from fedfleet.config.population import Data, dealt, load_data, make_population, parted, targets
from fedfleet.config.schema import Config
from fedfleet.datasets import partition_file
from fedfleet.datasets.examples import Dataset, fixed_draw
from fedfleet.report.data_figures import Holdings
from fedfleet.report.tables import gini
from fedfleet.report.words import share
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.population import Population

LOOKED_AT = 2_000  # clients whose labels are counted, a fixed draw where there are more
SIZES = 1_000_000  # clients whose sizes are asked for
BLOCK = 500  # clients whose examples are read at a time
LABELS = 40  # rows of the table of labels


def _dealt(config: Config) -> Data:
    """Return what is dealt to clients, or comes in them. Raises ConfigError, DataError."""
    return root.parted(config, parted(config, load_data(config))[0])[0]


def look(config: Config) -> Holdings:
    """Return what the clients of a configuration hold. Raises ConfigError, DataError."""
    data = _dealt(config)
    population = make_population(config, data)
    every = fixed_draw(population.size, SIZES)
    shown = fixed_draw(population.size, LOOKED_AT)
    counts = torch.cat([_labels(population, ids, data.test.classes) for ids in shown.split(BLOCK)])
    as_data_say = config.domains.kind == "given"
    domains = population.summary().domains
    names = data.domains if as_data_say and len(data.domains) == domains else tuple(map(str, range(domains)))
    tested = data.test.domain if as_data_say and data.test.domain is not None else None
    sources = config.population.dataset.name
    dealing = f", dealt by {config.population.partition.kind}" if isinstance(data, Dataset) else ""
    return Holdings(
        title=f"{sources}{dealing}",
        clients=population.size,
        sizes=population.num_examples(every).numpy(),
        domain=population.domains(every).numpy(),
        domains=names,
        targets=tuple(names[i] for i in targets(config, data) if i < len(names)),
        shown=shown.numpy(),
        domain_of_shown=population.domains(shown).numpy(),
        labels=counts.numpy(),
        test_labels=_known(data.test.y, data.test.classes).bincount(minlength=data.test.classes).numpy(),
        test_domains=None if tested is None else tested.bincount(minlength=domains).numpy(),
        names=data.names.of_clients(shown.tolist()),
        classes=data.names.classes,
        tested=data.names.whose(),
    )


def tables(seen: Holdings, clients: int) -> Iterator[Table]:
    """Yield the tables: all in all, by domain, by label, by client, of which so many."""
    yield _summary(seen)
    if len(seen.domains) > 1:
        yield _domains(seen)
    if seen.labels.shape[1] > 1:
        yield _labels_table(seen)
    if clients:
        yield _clients(seen, clients)


def draw(seen: Holdings, out: Path) -> str:
    """Draw what is seen to a new file, and return its path. Raises ConfigError."""
    from fedfleet.report.data_figures import write  # matplotlib takes most of a second to import

    try:
        write(seen, out)
    except OSError as e:
        raise ConfigError(f"--out={str(out)!r}: it cannot be written ({e.strerror or e}): give another path") from None
    return str(out)


def write_partition(config: Config, out: Path) -> str:
    """Write the partition of a configuration, and return what was written. Raises ConfigError, DataError."""
    data = _dealt(config)
    if not isinstance(data, Dataset):
        raise ConfigError(f"population.dataset={data.name!r}: it comes in clients, and none are dealt: choose another")
    result = dealt(config, data)
    about = {"data": data.name, "population": config.model_dump(mode="json")["population"]}
    partition_file.write(out, result, data.train.y, about)
    return f"{out}: {len(result.sizes):,} clients, {len(result.indices):,} of {len(data.train):,} examples"


def _labels(population: Population, ids: Tensor, classes: int) -> Tensor:
    """Return how many examples (C, classes) of each label clients have."""
    known = getattr(population, "labels", lambda ids: None)(ids)
    if known is None:
        local = population.local_data(ids)
        mine = torch.arange(local.rows.shape[1]) < local.counts[:, None]
        known = local.data["y"][local.rows[mine]], local.counts
    y, counts = _known(known[0], classes), known[1]
    classes = max(classes, 1)
    owner = torch.arange(len(ids)).repeat_interleave(counts)
    return (owner * classes + y).bincount(minlength=len(ids) * classes).view(-1, classes)


def _known(y: Tensor, classes: int) -> Tensor:
    """Return labels (n,); of targets, which are none, that of one label."""
    return y if classes else torch.zeros(len(y), dtype=torch.int64)


def _summary(seen: Holdings) -> Table:
    table = Table(title=seen.title, show_header=False)
    sizes, held = seen.sizes, (seen.labels > 0).sum(1)
    of = f" (of {len(seen.shown):,} clients, a fixed draw)" if len(seen.shown) < seen.clients else ""
    rows = {
        "clients": f"{seen.clients:,}",
        "examples": f"{int(sizes.sum()):,}" if len(sizes) == seen.clients else f"about {_all(seen):,}",
        "test examples": f"{int(seen.test_labels.sum()):,}{seen.tested and f', {seen.tested}'}",
        "examples a client": f"{_spread(sizes)}, Gini {gini(sizes, len(sizes)):.2f}",
        "labels a client": f"{_spread(held)}, of {seen.labels.shape[1]}{of}",
    }
    for key, value in rows.items():
        table.add_row(key, value)
    return table


def _domains(seen: Holdings) -> Table:
    table = Table(title="Domains")
    for name in ("domain", "clients", "examples", "test examples"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    clients = np.bincount(seen.domain, minlength=len(seen.domains))
    examples = np.bincount(seen.domain, seen.sizes, minlength=len(seen.domains))
    for i, name in enumerate(seen.domains[:LABELS]):
        tested = "" if seen.test_domains is None else f"{seen.test_domains[i]:,}"
        role = " (target)" if name in seen.targets else ""
        table.add_row(f"{name}{role}", f"{clients[i]:,}", f"{int(examples[i]):,}", tested)
    return _and_more(table, len(seen.domains))


def _labels_table(seen: Holdings) -> Table:
    few = len(seen.shown) < seen.clients
    table = Table(title="Labels" + (f", of {len(seen.shown):,} clients" if few else ""))
    named = ["class"] if seen.classes else []
    counted = ("examples", "share", "clients that have it", "most of a client", "test examples")
    for name in ("label", *named, *counted):
        table.add_column(name, justify="left" if name in named else "right")
    total = max(int(seen.labels.sum()), 1)
    for label, column in enumerate(seen.labels.T[:LABELS]):
        row = (f"{column.sum():,}", share(column.sum() / total), f"{(column > 0).sum():,}", f"{column.max():,}")
        table.add_row(str(label), *seen.classes[label : label + 1], *row, f"{seen.test_labels[label]:,}")
    return _and_more(table, seen.labels.shape[1])


def _clients(seen: Holdings, most: int) -> Table:
    table = Table(title="Clients")
    several = len(seen.domains) > 1
    named = ["name"] if seen.names else []
    for name in ("client", *named, "examples", *(["domain"] if several else []), "labels: examples, most first"):
        table.add_column(name, justify="right" if name in ("client", "examples") else "left", overflow="ellipsis")
    for i, client in enumerate(seen.shown[:most]):
        domain, counts = seen.domain_of_shown[i], seen.labels[i]
        order = [k for k in np.argsort(-counts, kind="stable") if counts[k]]
        text = "  ".join(f"{k}: {counts[k]}" for k in order[:10]) + ("  …" if len(order) > 10 else "")
        place = [seen.domains[domain]] if several else []
        table.add_row(str(client), *seen.names[i : i + 1], f"{counts.sum():,}", *place, text)
    return _and_more(table, seen.clients, most)


def _and_more(table: Table, there: int, most: int = LABELS) -> Table:
    if there > most:
        table.caption = f"and {there - most:,} more"
    return table


def _all(seen: Holdings) -> int:
    return round(float(seen.sizes.mean()) * seen.clients)


def _spread(values: np.ndarray) -> str:
    return f"{values.min():,} to {values.max():,}, median {np.median(values):,.4g}, mean {values.mean():,.4g}"
