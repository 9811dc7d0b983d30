"""Clients on disk: what is written to Parquet is what clients hold, whatever the order of the rows; folders that are not whole."""

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedfleet.datasets import disk, parquet
from fedfleet.datasets.convert import convert
from fedfleet.datasets.disk import DiskOptions, DiskPopulation
from fedfleet.datasets.example_table import Columns
from fedfleet.datasets.files import DataError
from fedfleet.simulator.plain_text import as_seen
from fedfleet.simulator.population import Summary
from tests.datasets.layouts import on_disk
from tests.refusals import refused

FRESH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Gives a new folder at every call."""
    return lambda: tmp_path_factory.mktemp("disk")


def table(clients: list[Any], x: Any, y: list[int], **columns: Any) -> pa.Table:
    """Rows with the features as lists."""
    values = np.asarray(x, dtype=np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    return pa.table({"client": clients, "x": lists, "y": y, **columns})


def population(out: Path) -> DiskPopulation:
    found = on_disk(out).population
    assert isinstance(found, DiskPopulation)
    return found


def contents(out: Path) -> dict[Any, tuple[list[Any], list[int], Any]]:
    """Name -> (x, y, domain) of every client, read in one block."""
    p = population(out)
    names = pd.read_feather(out / "clients.arrow")["client"].tolist()
    local = p.local_data(torch.arange(p.size))
    domains = p.totals.domains
    found = {}
    for name, rows, count, domain in zip(names, local.rows, local.counts, local.domain, strict=True):
        mine = rows[:count]
        assert (rows[count:] == rows[0]).all()
        found[name] = (local.data["x"][mine].tolist(), local.data["y"][mine].tolist(), domains[int(domain)])
    return found


SEEN = st.text(max_size=6).filter(as_seen)
NAMES = st.lists(SEEN, unique_by=as_seen, min_size=2, max_size=8) | st.lists(
    st.integers(-(2**63), 2**63 - 1), unique=True, min_size=2, max_size=8
)


@FRESH
@given(
    data=st.data(), names=NAMES,
    domains=st.none() | st.lists(SEEN, min_size=1, max_size=3, unique_by=as_seen),
    width=st.integers(1, 3), row_group=st.integers(1, 9), batch=st.integers(1, 9),
    style=st.sampled_from(["fixed", "lists", "columns", "tensor"]), files=st.integers(1, 3),
)  # fmt: skip
def test_what_is_written_is_what_clients_hold(fresh, data, names, domains, width, row_group, batch, style, files):
    """Shuffled rows, ragged counts, text or numbers as names, several files, any size of row groups and batches."""
    folder = fresh()
    counts = data.draw(st.lists(st.integers(1, 5), min_size=len(names), max_size=len(names)))
    owners = data.draw(st.permutations([name for name, n in zip(names, counts, strict=True) for _ in range(n)]))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((len(owners), width)).astype(np.float32), rng.integers(0, 4, len(owners))
    y -= y.min()
    of = {name: data.draw(st.sampled_from(domains)) if domains else 0 for name in names}
    features: dict[str, Any] = {
        "fixed": {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), width)},
        "lists": {"x": pa.array(x.astype(np.float64).tolist())},
        "columns": {f"f{i}": x[:, i] for i in range(width)},
        "tensor": {"x": pa.FixedShapeTensorArray.from_numpy_ndarray(x)},
    }[style]
    domain = {"domain": [of[name] for name in owners]} if domains else {}
    rows = pa.table({**features, "y": y, "client": owners, **domain})
    source = folder / "in"
    source.mkdir()
    for i in range(files):
        cut = [round(k * len(owners) / files) for k in (i, i + 1)]
        pq.write_table(rows.slice(cut[0], cut[1] - cut[0]), source / f"{i}.parquet", row_group_size=row_group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "BATCH_ROWS", batch)
        try:
            totals = convert(source, folder / "out", hold_out=0.3)
        except DataError:  # those who would be held out are alone in their domains
            assert len(set(of.values())) > 1
            return
    held = on_disk(folder / "out").test
    kept = contents(folder / "out")

    expected: dict[Any, tuple[list[Any], list[int], Any]] = {name: ([], [], of[name]) for name in owners}
    for name, row, label in zip(owners, x.tolist(), y.tolist(), strict=True):
        expected[name][0].append(row)
        expected[name][1].append(label)
    drawn = max(1, round(0.3 * len(names)))
    assert {of[name] for name in kept} == set(of.values())
    assert 0 < len(names) - len(kept) <= drawn
    assert domains or len(names) - len(kept) == drawn
    assert list(kept) == [name for name in dict.fromkeys(owners) if name in kept]
    assert kept == {name: expected[name] for name in kept}
    out = [
        (row, label) for name in expected if name not in kept for row, label in zip(*expected[name][:2], strict=True)
    ]
    assert list(zip(held.x.tolist(), held.y.tolist(), strict=True)) == out
    if held.domain is None:
        assert len(set(of.values())) == 1
    else:
        mine = [of[name] for name in expected if name not in kept for _ in expected[name][1]]
        assert [totals.domains[k] for k in held.domain.tolist()] == mine
    assert totals.classes == y.max() + 1
    sizes = [len(expected[name][1]) for name in kept]
    mean = sum(sizes) / len(sizes)
    summary = Summary(min(sizes), max(sizes), mean, len({of[name] for name in kept}))
    assert population(folder / "out").summary() == summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clients 0 to 39 of 1 to 5 examples; x of every row is (client, row of the client), y is the client modulo 3."""
    above = tmp_path_factory.mktemp("folder")
    owners = [c for c in range(40) for _ in range(1 + c % 5)]
    place = [i for c in range(40) for i in range(1 + c % 5)]
    rows = table(owners, list(zip(owners, place, strict=True)), [c % 3 for c in owners], domain=[c % 2 for c in owners])
    pq.write_table(rows, above / "in.parquet")
    pq.write_table(rows.slice(0, 4).drop_columns(["client"]), above / "test.parquet")
    convert(above / "in.parquet", above / "out", test=above / "test.parquet")
    return above / "out"


@given(st.lists(st.integers(0, 39), min_size=1, max_size=12))
def test_a_block_is_the_rows_of_its_clients_and_no_others(folder, ids):
    p = population(folder)
    local = p.local_data(torch.tensor(ids))
    assert local.counts.tolist() == [1 + c % 5 for c in ids] == p.num_examples(torch.tensor(ids)).tolist()
    assert (local.domain.tolist(), len(local.data["x"])) == ([c % 2 for c in ids], sum(local.counts.tolist()))
    for c, rows, n in zip(ids, local.rows, local.counts, strict=True):
        assert local.data["x"][rows[:n]].tolist() == [[c, i] for i in range(n)]
        assert local.data["y"][rows].eq(c % 3).all()


def test_a_file_of_test_examples(folder, monkeypatch):
    data = on_disk(folder)
    assert (data.population.size, data.test.x.tolist()) == (40, [[0, 0], [1, 0], [1, 1], [2, 0]])
    few = disk.load(DiskOptions(path=str(folder), test_examples=2), None, 0)
    assert len(few.test) == 2
    assert {tuple(row) for row in few.test.x.tolist()} <= {(0, 0), (1, 0), (1, 1), (2, 0)}
    assert data.domains == ("0", "1")
    monkeypatch.setattr(disk, "fixed_draw", lambda total, size: torch.arange(total)[-size:])
    last = disk.load(DiskOptions(path=str(folder), test_examples=2), None, 0)
    for test in (data.test, few.test, last.test):
        assert test.domain.tolist() == [int(x) % 2 for x, _ in test.x.tolist()]


def test_a_sample_of_training_examples(folder):
    data = on_disk(folder)
    assert len(data.sample(10**6)) == 120
    sample = data.sample(30)
    assert len({tuple(row) for row in sample.x.tolist()}) == 30
    assert torch.equal(sample.x, data.sample(30).x)


def test_it_travels_as_a_path(folder):
    p = population(folder)
    p.local_data(torch.arange(40))
    sent = pickle.dumps(p)
    assert len(sent) < 1000
    assert torch.equal(
        pickle.loads(sent).local_data(torch.arange(9)).data["x"], p.local_data(torch.arange(9)).data["x"]
    )
    moved = p.to(torch.device("cpu"))
    assert moved == p


def test_pixels_stay_bytes(tmp_path):
    images = np.arange(2 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3)
    nested = pa.array([image.tolist() for image in images], type=pa.list_(pa.list_(pa.uint8(), 3), 3))
    pq.write_table(pa.table({"client": [1, 1, 2, 3], "x": nested, "y": [0, 1, 0, 1]}), tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "out")
    p = population(tmp_path / "out")
    x = torch.cat([p.local_data(torch.arange(2)).data["x"], on_disk(tmp_path / "out").test.x])
    assert (x.dtype, sorted(x.flatten(1).tolist())) == (torch.uint8, images.reshape(4, 9).tolist())


def test_pandas_writes_what_is_read(tmp_path):
    frame = pd.DataFrame(
        {"client": list("abab"), "height": [1, 2, 3, 4], "tall": [True, False, True, True], "y": [0, 1, 0, 1]}
    )
    frame["client"] = frame["client"].astype("category")
    frame.to_parquet(tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "out", test=tmp_path / "in.parquet", classes=5)
    assert contents(tmp_path / "out") == {"a": ([[1, 1], [3, 1]], [0, 0], 0), "b": ([[2, 0], [4, 1]], [1, 1], 0)}
    assert population(tmp_path / "out").totals.classes == 5


DOMAINS = {"client": [1, 2, 3], "x": [[1.0], [2.0], [3.0]], "y": [0, 0, 1]}


def test_the_domains_of_a_test_file_are_numbered_as_those_of_clients(tmp_path):
    """Though they come in another order, not all of them, as a category."""
    source, test, out = tmp_path / "in.parquet", tmp_path / "test.parquet", tmp_path / "out"
    pq.write_table(pa.table({**DOMAINS, "domain": ["q", "r", "p"]}), source)
    pd.DataFrame({"x": [[5.0], [6.0], [7.0]], "y": [0, 1, 0], "domain": pd.Categorical(["r", "p", "r"])}).to_parquet(
        test
    )
    convert(source, out, test=test)
    data = on_disk(out)
    assert (data.population.domains(torch.arange(3)).tolist(), data.test.domain.tolist()) == ([1, 2, 0], [2, 0, 2])
    assert data.domains == ("p", "q", "r")


def test_a_folder_made_before_test_examples_had_domains(tmp_path, folder):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    totals = json.loads((copy / "population.json").read_text())
    del totals["file_bytes"]["test_domains.arrow"], totals["sha256"], totals["digest"]
    (copy / "population.json").write_text(json.dumps(totals))
    (copy / "test_domains.arrow").unlink()
    data = on_disk(copy)
    assert data.test.domain is None
    assert data.population.summary().domains == 2


def test_any_column_says_the_domain(tmp_path):
    """It is no feature then; where there is one domain alone, test examples have none."""
    source, out = tmp_path / "in.parquet", tmp_path / "out"
    pq.write_table(
        pa.table({"client": list("abcde"), "age": [1.5, 2, 3, 4, 5], "sex": [7, 9, 7, 9, 9], "y": [0] * 5}), source
    )
    convert(source, out, called=Columns(domain="sex"))
    data = on_disk(out)
    assert (data.domains, data.test.x.shape[1:]) == (("7", "9"), (1,))
    ages = [1.5, 2, 3, 4, 5]
    of = dict(zip(ages, [0, 1, 0, 1, 1], strict=True))
    local = data.population.local_data(torch.arange(4))
    assert [of[x] for x in local.data["x"][:, 0].tolist()] == local.domain.tolist()
    assert data.test.domain.tolist() == [of[x] for x in data.test.x[:, 0].tolist()]
    convert(source, tmp_path / "plain")
    plain = on_disk(tmp_path / "plain")
    assert (plain.test.domain, plain.domains, plain.test.x.shape[1:]) == (None, (), (2,))


def test_a_domain_keeps_a_client(tmp_path):
    """Of 20 clients, 18 are drawn to be held out; each of six domains keeps one all the same."""
    source = tmp_path / "in.parquet"
    pq.write_table(
        table(list(range(20)), [[c] for c in range(20)], [0] * 20, domain=[c % 6 for c in range(20)]), source
    )
    totals = convert(source, tmp_path / "out", hold_out=0.9)
    kept = contents(tmp_path / "out")
    assert sorted(int(d) for _, _, d in kept.values()) in ([0, 1, 2, 3, 4, 5], [*range(6), 0])
    assert totals.domains == list(range(6))


def test_an_index_of_pandas_is_no_feature(tmp_path):
    said: list[str] = []
    frame = pd.DataFrame({"client": list("aabb"), "f": [0.5, 1, 2, 3], "y": [0, 1, 0, 1]})
    for name, index in (("none", None), ("level", [9, 4, 7, 6]), ("named", pd.Index([9, 4, 7, 6], name="id"))):
        source = tmp_path / f"{name}.parquet"
        (frame if index is None else frame.set_index(pd.Index(index))).to_parquet(source)
        convert(source, tmp_path / name, say=said.append)
        assert contents(tmp_path / name) == contents(tmp_path / "none")
    assert [line.split(": ")[1] for line in said] == [
        "column '__index_level_0__' is an index of pandas, and left out",
        "column 'id' is an index of pandas, and left out",
    ]
    frame.set_index("client").to_parquet(tmp_path / "client.parquet")  # one that is meant
    convert(tmp_path / "client.parquet", tmp_path / "client")
    assert contents(tmp_path / "client") == contents(tmp_path / "none")


def test_files_of_which_one_has_an_index(tmp_path):
    """As where rows of a frame were left out before one part of it was written."""
    frame = pd.DataFrame({"client": list("aabbcc"), "f": [0.5, 1, 2, 3, 4, 5], "y": [0] * 6})
    (tmp_path / "in").mkdir()
    frame[:2].to_parquet(tmp_path / "in" / "0.parquet")
    frame.drop(index=[2, 4]).tail(2).to_parquet(tmp_path / "in" / "1.parquet")
    said: list[str] = []
    totals = convert(tmp_path / "in", tmp_path / "out", say=said.append)
    assert said == [f"{tmp_path / 'in'}: column '__index_level_0__' is an index of pandas, and left out"]
    assert (totals.examples + totals.test_examples, population(tmp_path / "out").examples["x"].shape) == (4, (4, 1))


@pytest.mark.parametrize("kind", ["int8", "int16", "uint16", "int32", "int64", "uint64"])
@pytest.mark.parametrize("style", ["lists", "columns"])
def test_integers_stay_integers(tmp_path, kind, style):
    values = np.array([[1, 2], [3, 100], [5, 6]], dtype=kind)
    if style == "lists":
        features: dict[str, Any] = {"x": pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 2)}
    else:
        features = {"f": values[:, 0], "g": values[:, 1].astype(np.uint8)}
    pq.write_table(pa.table({"client": [1, 1, 2], "y": [0, 0, 1], **features}), tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "out", test=tmp_path / "in.parquet")
    data = on_disk(tmp_path / "out")
    local = data.population.local_data(torch.arange(2))
    assert local.data["x"].dtype == data.test.x.dtype == torch.int64
    assert local.data["x"].tolist() == data.test.x.tolist() == values.tolist()


def test_integers_beside_floats_are_floats(tmp_path):
    big = 2**40 + 1
    for name, f, dtype in (("mixed", [0.5, 1.5], torch.float32), ("flags", [True, False], torch.int64)):
        pq.write_table(pa.table({"client": [1, 2], "f": f, "g": [3, big], "y": [0, 1]}), tmp_path / f"{name}.parquet")
        convert(tmp_path / f"{name}.parquet", tmp_path / name, test=tmp_path / f"{name}.parquet")
        x = on_disk(tmp_path / name).test.x
        assert x.dtype == dtype
        assert x.tolist() == torch.tensor([[f[0], 3], [f[1], big]], dtype=dtype).tolist()


def test_features_of_a_test_file_in_another_order(tmp_path):
    source, test = tmp_path / "in.parquet", tmp_path / "test.parquet"
    pq.write_table(pa.table({"client": [1, 2], "f": [1.5, 2], "g": [30.0, 40], "y": [0, 1]}), source)
    pq.write_table(pa.table({"g": [70.0], "y": [0], "f": [5.5]}), test)
    convert(source, tmp_path / "out", test=test)
    assert on_disk(tmp_path / "out").test.x.tolist() == [[5.5, 70.0]]


def fault(folder: Path) -> str:
    options = DiskOptions(path=str(folder))
    return refused(lambda: disk.load(options, None, 0).population.local_data(torch.arange(2)), "", DataError)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["population.json", "clients.arrow", "examples.arrow"])
def test_files_that_are_missing_or_cut_short(copy, name):
    (copy / name).write_bytes((copy / name).read_bytes()[:-8])
    said = fault(copy)
    assert name in said
    assert "convert" in said
    (copy / name).unlink()
    assert name in fault(copy)
    assert "fedfleet convert" in fault(copy)


@pytest.mark.parametrize("name", ["clients.arrow", "examples.arrow"])
@pytest.mark.parametrize("junk", [b"junk", b""])
def test_files_that_are_no_ipc(copy, name, junk):
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(junk * (len(content) // 4) + content[: len(content) % 4] if junk else junk)
    assert name in fault(copy)
    totals = json.loads((copy / "population.json").read_text())
    del totals["sha256"], totals["digest"]
    totals["file_bytes"] = {}
    (copy / "population.json").write_text(json.dumps(totals))
    assert name in fault(copy)


@given(
    name=st.sampled_from(["population.json", "clients.arrow", "examples.arrow"]),
    at=st.floats(0, 1),
    bit=st.integers(0, 7),
)
def test_a_bit_of_any_file_that_was_flipped_is_told(folder, tmp_path_factory, name, at, bit):
    copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("flipped") / "copy"))
    content = bytearray((copy / name).read_bytes())
    content[int(at * (len(content) - 1))] ^= 1 << bit
    (copy / name).write_bytes(content)
    with suppress(DataError):  # or what it says is the same: spaces, and another way to write a letter
        assert disk.read_totals(copy) == disk.read_totals(folder)
        assert name == "population.json"


def test_other_folders(tmp_path):
    assert "fedfleet convert" in fault(tmp_path / "none")
    assert "fedfleet convert" in fault(tmp_path)
    (tmp_path / "population.json").write_text('{"clients": -1}')
    assert "population.json" in fault(tmp_path)
