"""Clients on disk: a folder of uncompressed Arrow IPC files, mapped into memory, so that only what is read is loaded.

    population.json     the totals; written last
    clients.arrow       a row a client: `client` (its own name), `start`, `count`, `domain`
    examples.arrow      `x`, `y`: the rows of client 0, of client 1, ...; after them the test examples; tokens as short integers
    test_domains.arrow  `domain`: a row a test example; only where domains are known
    test_clients.arrow  `client`: the clients whose examples the test examples are, where these are of some
    vocabulary.json     of texts, which token stands for what

Every table is one record batch. `fedfleet convert` makes the folder; nothing in it is ever unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedfleet.datasets.examples import Examples, FederatedDataset, fixed_draw
from fedfleet.datasets.files import DataError
from fedfleet.datasets.names import Names
from fedfleet.datasets.vocabulary import VOCABULARY, read_vocabulary
from fedfleet.files.writing import check_regular
from fedfleet.simulator.errors import one_line
from fedfleet.simulator.population import LocalData, Summary, joined_rows, padded_rows
from fedfleet.simulator.registry import Options

TOTALS, CLIENTS, EXAMPLES = "population.json", "clients.arrow", "examples.arrow"
TEST_DOMAINS, TEST_CLIENTS = "test_domains.arrow", "test_clients.arrow"
PIECE, PIECES = 1 << 16, 1 << 10  # bytes at a time, and how many of them at most, for telling two files apart

Count = Annotated[int, Field(ge=1)]


class DiskOptions(Options):
    """Clients on disk."""

    path: str
    """Folder made by ``fedfleet convert``."""
    test_examples: Count = 10_000
    """Test examples used, at most; a fixed draw if there are more."""


class Totals(BaseModel):
    """What `population.json` holds: of targets `classes` is 0, of texts `words` how many tokens there are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    clients: Count
    examples: Count
    test_examples: Count
    min_examples: Count
    max_examples: Count
    classes: Annotated[int, Field(ge=0)]
    domains: list[str | int]
    words: Annotated[int, Field(ge=0)] = 0
    class_names: list[str] = []
    features: list[str] = []
    file_bytes: dict[str, int]
    sha256: dict[str, str] = {}
    """Digests of the files beside it, each of up to 64 MiB, evenly spaced."""
    digest: str = ""
    """The digest of all the rest; a folder of an earlier release has none."""

    def sealed(self) -> Totals:
        """Return the same with its digest."""
        said = self.model_dump_json(exclude={"digest"})
        return self.model_copy(update={"digest": hashlib.sha256(said.encode()).hexdigest()})


@dataclass(frozen=True)
class DiskPopulation:
    """Clients of a folder. It travels as a path, and each process maps the files for itself when it first reads them.

    Attributes:
        folder: absolute.
        device: where `local_data` puts the rows it reads.
        domain: the domain of each client, (N,) int64, instead of what the files say.

    """

    folder: Path
    device: str = "cpu"
    domain: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "device": self.device, "domain": self.domain}

    @cached_property
    def totals(self) -> Totals:
        """The totals. Raises DataError where the folder is not whole."""
        return read_totals(self.folder)

    @cached_property
    def clients(self) -> Mapping[str, NDArray[np.int64]]:
        """`start`, `count`, `domain` (N,)."""
        return mapped(self.folder / CLIENTS)

    @cached_property
    def examples(self) -> Mapping[str, NDArray[Any]]:
        """`x` (rows, ...) and `y`, (rows,) or targets (rows, ...), those of the clients before those of the test set."""
        return mapped(self.folder / EXAMPLES)

    @property
    def size(self) -> int:
        """Number of clients, N."""
        return self.totals.clients

    def summary(self) -> Summary:
        """Return what `population.json` says."""
        t = self.totals
        domains = len(t.domains) if self.domain is None else int(self.domain.max()) + 1
        return Summary(t.min_examples, t.max_examples, t.examples / t.clients, domains)

    def num_examples(self, ids: Tensor) -> Tensor:
        """Return the number of examples of each client."""
        return self._column("count", ids).to(ids.device)

    def domains(self, ids: Tensor) -> Tensor:
        """Return the domain of each client."""
        result = self._column("domain", ids) if self.domain is None else self.domain[ids.cpu()]
        return result.to(ids.device)

    def grouped(self, domain: Tensor) -> DiskPopulation:
        """Return the population with other domains."""
        return replace(self, domain=domain)

    def local_data(self, ids: Tensor) -> LocalData:
        """Read the rows of these clients, and no others."""
        start, counts, domain = self._column("start", ids), self._column("count", ids), self.domains(ids.cpu())
        rows = joined_rows(start, counts)
        data = {name: self.read(name, rows) for name in ("x", "y")}
        local = LocalData(data, padded_rows(counts.cumsum(0) - counts, counts), counts, domain)
        if self.device == "cpu":
            return local
        moved = {name: v.to(self.device) for name, v in data.items()}
        rows, counts, domain = (v.to(self.device) for v in (local.rows, local.counts, local.domain))
        return LocalData(moved, rows, counts, domain)

    def labels(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels of clients (C,), one client after another, and how many each has, (C,)."""
        counts = self._column("count", ids)
        return self.read("y", joined_rows(self._column("start", ids), counts)), counts

    def read(self, name: str, rows: Tensor) -> Tensor:
        """Return rows (n,) of the column "x" or "y" of the examples, in memory; tokens as int64."""
        result = torch.from_numpy(self.examples[name].take(rows.numpy(), axis=0))
        return result.long() if result.dtype in (torch.int16, torch.int32) else result

    def content(self) -> str:
        """Return where the folder is and a digest of its files, of each up to 64 MiB, evenly spaced. Raises OSError."""
        result = hashlib.sha256((self.folder / TOTALS).read_bytes())
        for name in (CLIENTS, EXAMPLES, *([TEST_DOMAINS] if (self.folder / TEST_DOMAINS).exists() else [])):
            result.update(f"{name} {spaced_digest(self.folder / name)}".encode())
        return f"{self.folder} sha256 {result.hexdigest()[:12]}"

    def to(self, device: torch.device) -> DiskPopulation:
        """Return the population reading onto a device."""
        return replace(self, device=str(device))

    def _column(self, name: str, ids: Tensor) -> Tensor:
        return torch.from_numpy(self.clients[name].take(ids.cpu().numpy()))


def load(options: DiskOptions, clients: int | None, seed: int) -> FederatedDataset:
    """Return the clients of a folder and its test examples; the seed decides nothing. Raises DataError."""
    population = DiskPopulation(Path(options.path).expanduser().absolute())
    totals = population.totals

    for name, there, said in (
        (CLIENTS, len(population.clients["count"]), totals.clients),
        (EXAMPLES, len(population.examples["y"]), totals.examples + totals.test_examples),
    ):
        if there != said:
            again = f"make one with `fedfleet convert IN.parquet {population.folder}`"
            raise DataError(f"{population.folder / name}: it has {there:,} rows, and {TOTALS} says {said:,}: {again}")
    rows = fixed_draw(totals.test_examples, options.test_examples)
    domains = tuple(map(str, totals.domains)) if len(totals.domains) > 1 else ()
    domain = None
    if domains and TEST_DOMAINS in totals.file_bytes:
        domain = torch.from_numpy(mapped(population.folder / TEST_DOMAINS)["domain"].take(rows.numpy()))

    def examples(rows: Tensor, domain: Tensor | None = None) -> Examples:
        x, y = population.read("x", rows), population.read("y", rows)
        return Examples(x, y, totals.classes, domain, totals.words)

    test = examples(totals.examples + rows, domain)

    def sample(size: int) -> Examples:
        return examples(fixed_draw(totals.examples, size))

    return FederatedDataset("disk", population, test, sample, domains, _names(population.folder, totals))


def _names(folder: Path, totals: Totals) -> Names:
    there = totals.file_bytes
    tested = tuple(map(str, _clients(folder / TEST_CLIENTS).to_pylist())) if TEST_CLIENTS in there else ()
    return Names(
        clients=ClientNames(folder / CLIENTS, totals.clients),
        tested=tested,
        held_out=tested,
        classes=tuple(totals.class_names),
        features=tuple(totals.features),
        vocabulary=read_vocabulary(folder / VOCABULARY, f"{folder}") if VOCABULARY in there else None,
    )


@dataclass(frozen=True)
class ClientNames(Sequence[str]):
    """What the clients of a folder are called: read when one asks."""

    path: Path
    clients: int

    def __len__(self) -> int:
        """Return the number of clients."""
        return self.clients

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        """Return the name of a client, or the names of some."""
        result = _clients(self.path)
        return [str(name) for name in result[at].to_pylist()] if isinstance(at, slice) else str(result[at].as_py())


def _clients(path: Path) -> pa.Array:
    """Map the column `client` of a file. Raises DataError."""
    with _reading(path):
        return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)["client"]


def token_type(words: int) -> np.dtype[Any]:
    """Return the shortest type that tokens below `words`, and what pads them, are kept in."""
    return np.dtype(np.int16 if words <= 1 << 15 else np.int32)


def spaced_digest(path: Path) -> str:
    """Return a digest of a file: of its length, and of up to 64 MiB of it, evenly spaced. Raises OSError."""
    check_regular(path.stat())
    with path.open("rb") as file:
        size = file.seek(0, 2)
        count = min(PIECES, -(-size // PIECE))
        result = hashlib.sha256(f"{size}".encode())
        for i in range(count):
            file.seek((size - PIECE) * i // (count - 1) if count > 1 else 0)
            result.update(file.read(PIECE))
    return result.hexdigest()


def read_totals(folder: Path) -> Totals:
    """Read `population.json` and see that the files beside it are as long as they were made. Raises DataError."""
    path = folder / TOTALS
    again = f"make one with `fedfleet convert IN.parquet {folder}`"
    try:
        totals = Totals.model_validate_json(path.read_bytes(), strict=True)
        if totals.digest and totals != totals.sealed():
            raise DataError(f"{path}: damaged or changed since it was made: copy it again, or {again}")
        for name, wanted in totals.file_bytes.items():
            if (result := (folder / name).stat().st_size) != wanted:
                raise DataError(f"{folder / name}: {result} of {wanted} bytes: copy it again, or {again}")
        for name in totals.file_bytes.keys() & totals.sha256.keys():
            if spaced_digest(folder / name) != totals.sha256[name]:
                raise DataError(f"{folder / name}: damaged or changed since it was made: copy it again, or {again}")
    except OSError as e:
        problem = f"{e.filename or path}: {e.strerror}"
        raise DataError(f"{folder}: not a whole folder of clients ({problem}): {again}") from None
    except ValidationError as e:
        raise DataError(f"{path}: not as it was written ({e.error_count()} faults): {again}") from None
    return totals


def mapped(path: Path) -> dict[str, NDArray[Any]]:
    """Map the columns of an IPC file of one record batch, but for `client`. Raises DataError."""
    with _reading(path):
        check_regular(path.stat())
        return columns(np.memmap(path, mode="r"))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say in one line what is wrong with a file. Raises DataError."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, KeyError) as e:
        raise DataError(f"{path}: not readable as Arrow IPC ({one_line(e)}): convert it again") from None


def columns(whole: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Return views of the columns of an IPC file of one record batch, but for `client`."""
    batch = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(whole))).get_batch(0)
    return {name: _array(batch[name]) for name in batch.schema.names if name != "client"}


def _array(column: Any) -> NDArray[Any]:
    is_tensor = isinstance(column, pa.FixedShapeTensorArray)
    return column.to_numpy_ndarray() if is_tensor else column.to_numpy(zero_copy_only=True)
