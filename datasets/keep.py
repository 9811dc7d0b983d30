"""Clients in memory, written to a folder that `disk` maps: what `fedfleet convert` makes of other layouts than Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from pydantic import BaseModel, ValidationError

from fedfleet.datasets.convert import allocate, beside, finish
from fedfleet.datasets.disk import EXAMPLES, Totals, token_type
from fedfleet.datasets.files import DataError
from fedfleet.datasets.parts import Parts, client_domains
from fedfleet.datasets.sources import SOURCES


def keep(layout: str, asked: dict[str, Any], out: Path) -> Totals:
    """Write the clients of one of `SOURCES` to the new folder `out`, which appears once it is whole. Raises DataError."""
    if out.exists():
        raise DataError(f"{out}: exists: choose another folder, or remove it first")
    kind = SOURCES[layout].options
    if strange := [name for name in asked if name not in kind.model_fields]:
        raise DataError(f"{strange[0]}: no option of {layout}: give some of {', '.join(kind.model_fields)}")
    return write(SOURCES[layout].build(_checked(kind, asked)), out)


def write(parts: Parts, out: Path) -> Totals:
    """Write training rows that come in clients, and test rows. Raises DataError."""
    train, test = parts.train, parts.test
    if train.client is None:
        raise DataError(
            f"{train.where}: says no clients: name the column that does, or read it as it is, without converting"
        )
    counts = train.client.number.bincount()
    domain = torch.zeros_like(counts) if train.domain is None else client_domains(train)
    order = train.client.number.argsort(stable=True)
    with beside(out) as folder:
        like = train.x[:1].numpy()
        like = like.astype(token_type(parts.words)) if parts.words else like
        x, y = allocate(folder / EXAMPLES, len(train.y) + len(test.y), like, train.y.numpy())
        x[: len(train.y)], y[: len(train.y)] = train.x[order].numpy(), train.y[order].numpy()
        x[len(train.y) :], y[len(train.y) :] = test.x.numpy(), test.y.numpy()
        names = pa.array(list(train.client.names))
        return finish(
            folder,
            clients={"client": names, "count": counts.numpy(), "domain": domain.numpy()},
            test_domain=None if test.domain is None else test.domain.number.numpy(),
            test_examples=len(test.y),
            classes=parts.classes,
            domains=[0] if train.domain is None else list(train.domain.names),
            words=parts.words,
            tested=() if test.client is None else pa.array(list(test.client.names)),
            names=parts.names,
        )


def _checked(kind: type[BaseModel], asked: dict[str, Any]) -> BaseModel:
    try:
        return kind.model_validate(asked)
    except ValidationError as e:
        first = e.errors()[0]
        if not first["loc"]:  # of several together, by one of our own
            raise DataError(first["msg"].removeprefix("Value error, ")) from None
        raise DataError(f"{'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg']}: mend it") from None
