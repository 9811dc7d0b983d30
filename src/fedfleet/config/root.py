"""The server's own examples: how they are drawn, and what is refused of them before a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedfleet.config import schema as C
from fedfleet.config.population import Data, targets
from fedfleet.config.schema import Config
from fedfleet.datasets.examples import Examples, FederatedDataset
from fedfleet.middleware.trial import Seen
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.population import InMemoryPopulation


def parted(config: Config, data: Data) -> tuple[Data, InMemoryPopulation | None]:
    """Return the data set without the server's own examples, and these, as those of one client; None if it is to have none.

    Raises ConfigError.
    """
    root = config.population.root
    if root is None:
        return data, None
    if isinstance(data, FederatedDataset):
        raise ConfigError(
            f"population.root.examples={root.examples}: {data.name!r} comes in clients, and none of their examples are the "
            f"server's: choose a data set that population.partition deals"
        )
    if targets(config, data):
        raise ConfigError(
            f"population.root.examples={root.examples}: of domains.target the server would have no labels: leave one of them out"
        )
    key = rng.fold(rng.key(config.partition_seed), "root")
    out = torch.zeros(len(data.train), dtype=torch.bool)
    for of, rows, wanted in _kinds(root, data.train):
        if wanted > len(rows):
            raise ConfigError(
                f"population.root.examples={root.examples}: {wanted} of them are to be {of}, and there are {len(rows)}: lower it"
            )
        out[rows[rng.sample(rng.fold(key, of), len(rows), wanted)]] = True
    if out.all():
        raise ConfigError(
            f"population.root.examples={root.examples}: that is all there are, and clients would have none: lower it"
        )
    rest, own = data.without(out)
    all_of_one = torch.tensor([0, len(own)])
    nowhere = torch.zeros(1, dtype=torch.int64)
    return rest, InMemoryPopulation({"x": own.x, "y": own.y}, torch.arange(len(own)), all_of_one, nowhere)


def _kinds(root: C.Root, examples: Examples) -> list[tuple[str, Tensor, int]]:
    """Return what root examples are drawn of: what it is called, rows (n,), and how many of them. Raises ConfigError."""
    if root.label is None or root.bias is None:
        return [("training examples", torch.arange(len(examples)), root.examples)]
    if root.label >= examples.classes:
        raise ConfigError(
            f"population.root.label={root.label}: there are {examples.classes} labels, from 0: choose one of them, or "
            f"leave it and bias out"
        )
    biased, mine = round(root.bias * root.examples), examples.y == root.label
    return [
        (f"of label {root.label}", mine.nonzero().flatten(), biased),
        ("of others", (~mine).nonzero().flatten(), root.examples - biased),
    ]


def check(config: Config, algorithm: Algorithm) -> None:
    """Refuse examples of the server's own that nothing works on, and the want of them. Raises ConfigError."""
    root, name = config.population.root, config.algorithm.name
    if root is None and algorithm.server:
        raise ConfigError(
            f"population.root=null: the server of {name} learns from examples of its own: set population.root={{examples: 100}}"
        )
    if root is not None and not algorithm.server:
        raise ConfigError(
            f"population.root.examples={root.examples}: the server of {name} learns from none: leave population.root out, or "
            f"choose algorithm={{name: robust, rule: fltrust}}"
        )


def check_work(algorithm: Algorithm, tried: Callable[[Algorithm], Seen]) -> None:
    """Let the server work in a trial. Raises ConfigError where the algorithm says that it cannot."""
    if not algorithm.server:
        return
    try:
        tried(algorithm)
    except ConfigError:
        raise
    except FedfleetError:  # the run itself will say what is wrong
        return
