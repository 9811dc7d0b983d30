"""Training and test examples of one's own put together: which are tested on, and what ``fedfleet.run(data=…)`` takes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.datasets.examples import Dataset, Examples, FederatedDataset
from fedfleet.datasets.names import NO_NAMES, Names
from fedfleet.datasets.user_data import Codes, Rows, check_least, fail
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.population import InMemoryPopulation


class Parts(NamedTuple):
    """Training rows, test rows, how many classes both have, of texts how many tokens there are, and what things are called."""

    train: Rows
    test: Rows
    classes: int
    words: int = 0
    names: Names = NO_NAMES

    def called(self, **names: Any) -> Parts:
        """Return the parts with some more names, as `Names` has them."""
        return self._replace(names=replace(self.names, **names))


def split(rows: Rows, test: float | Tensor | Rows, classes: int | None = None) -> Parts:
    """Return training and test rows; with targets `classes` is 0.

    `test` are the rows (mask) or other examples, or a share: of clients, where there are any, whose examples are the test
    examples then, else of examples; of every domain, and a fixed draw. Raises DataError.
    """
    if isinstance(test, Rows):
        train, held = rows, test
        if train.x.shape[1:] != held.x.shape[1:] or train.x.dtype != held.x.dtype:
            fail(
                held.where,
                f"an example is {_kind(held.x)}, and one of {train.where} {_kind(train.x)}",
                "make them alike",
            )
    else:
        out = test if isinstance(test, Tensor) else _share(rows, test)
        train, held = rows.of(~out), rows.of(out)
    if train.domain is None and held.domain is not None:
        fail(held.where, f"test examples say a domain, and those of {train.where} none", "give both theirs, or neither")
    if train.domain is not None and held.domain is not None:
        held = _numbered_alike(train, held)
    if train.classes != held.classes:
        train, held = _labelled_alike(train, held)
    if classes == 0:
        if train.y.shape[1:] != held.y.shape[1:] or train.y.dtype != held.y.dtype:
            fix = "make them alike"
            fail(held.where, f"targets are {_kind(held.y)}, and those of {train.where} {_kind(train.y)}", fix)
        return Parts(train, held, 0)
    most = max(int(train.y.max()), int(held.y.max())) + 1
    check_least(rows.where, min(int(train.y.min()), int(held.y.min())), most, classes)
    if classes is not None and most > classes:
        fail(rows.where, f"there are labels up to {most - 1}, and classes={classes}", "give the number of classes")
    return Parts(train, held, classes or most).called(classes=train.classes)


def put_together(name: str, parts: Parts) -> Dataset | FederatedDataset:
    """Return the data: in clients, where these are known, else to be dealt by a partition. Raises DataError."""
    train, test = (_examples(part, parts.classes, parts.words) for part in parts[:2])
    of, domain = parts.train.client, parts.train.domain
    domains = () if domain is None else tuple(map(str, domain.names))
    if of is None:
        return Dataset(name, train, test, domains, names=parts.names)
    order = of.number.argsort(stable=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), of.number.bincount().cumsum(0)])
    at_home = torch.zeros(len(of.names), dtype=torch.int64) if domain is None else client_domains(parts.train)
    population = InMemoryPopulation({"x": train.x, "y": train.y}, order, offsets, at_home)
    tested = () if parts.test.client is None else tuple(map(str, parts.test.client.names))
    clients = tuple(map(str, of.names))
    trained = {*clients}
    held_out = [name for name in tested if name not in trained]
    names = replace(parts.names, clients=clients, tested=tested, held_out=held_out)
    return FederatedDataset(name, population, test, train.sample, domains, names)


def client_domains(rows: Rows) -> Tensor:
    """Return the domain of every client (N,). Raises DataError where a client has two."""
    assert rows.client is not None
    assert rows.domain is not None
    result = torch.zeros(len(rows.client.names), dtype=torch.int64)
    result[rows.client.number] = rows.domain.number
    if (wrong := result[rows.client.number] != rows.domain.number).any():
        row = int(wrong.long().argmax())
        client = rows.client.names[int(rows.client.number[row])]
        two = sorted(rows.domain.names[int(d)] for d in (rows.domain.number[row], result[rows.client.number[row]]))
        fail(
            rows.where,
            f"client {client!r} has examples of {two[0]!r} and {two[1]!r}",
            "a client is of one domain: make it a client a domain",
        )
    return result


def _share(rows: Rows, share: float) -> Tensor:
    """Return which rows (n,) are held out as test examples. Raises DataError."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        fail("test", f"is {share!r}", "give a share between 0 and 1, or the test examples")
    count = len(rows.y) if rows.client is None else len(rows.client.names)
    what = "examples" if rows.client is None else "clients"
    group = torch.zeros(count, dtype=torch.int64)
    if rows.domain is not None:
        group = rows.domain.number if rows.client is None else client_domains(rows)
    out, key = torch.zeros(count, dtype=torch.bool), rng.fold(rng.key(0), "hold_out")
    for number in group.unique().tolist():
        mine = (group == number).nonzero().flatten()
        held = max(1, round(share * len(mine)))
        if held >= len(mine):
            of = f" of the domain {rows.domain.names[number]!r}" if rows.domain is not None else ""
            fail(
                rows.where,
                f"holding out {held} of {len(mine)} {what}{of} for testing leaves none",
                "hold out a smaller share, or give test= the test examples",
            )
        out[mine[rng.sample(rng.fold(key, number) if rows.domain is not None else key, len(mine), held)]] = True
    return out if rows.client is None else out[rows.client.number]


def _numbered_alike(train: Rows, test: Rows) -> Rows:
    """Return the test rows with their domains numbered as the training rows'. Raises DataError."""
    assert train.domain is not None
    assert test.domain is not None
    place = {name: i for i, name in enumerate(train.domain.names)}
    if strange := [name for name in test.domain.names if name not in place]:
        fail(
            test.where, f"test examples are of the domain {strange[0]!r}, and no training example is", "leave them out"
        )
    if missing := [name for name in place if name not in test.domain.names]:
        fail(test.where, f"no test example is of the domain {missing[0]!r}", "give some, or leave the domain out")
    number = torch.tensor([place[name] for name in test.domain.names])[test.domain.number]
    return replace(test, domain=Codes(number, train.domain.names))


def _labelled_alike(train: Rows, test: Rows) -> tuple[Rows, Rows]:
    """Return both with labels of all names that either has. Raises DataError where those of one alone are text."""
    for one, other in ((train, test), (test, train)):
        if not one.classes:
            fail(one.where, f"labels are numbers, and those of {other.where} text", "make both alike")
    names = tuple(sorted({*train.classes, *test.classes}))
    place = {name: i for i, name in enumerate(names)}
    train, test = (
        replace(part, y=torch.tensor([place[name] for name in part.classes])[part.y], classes=names)
        for part in (train, test)
    )
    return train, test


def _examples(rows: Rows, classes: int, words: int) -> Examples:
    return Examples(rows.x, rows.y, classes, None if rows.domain is None else rows.domain.number, words)


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape[1:])}"
