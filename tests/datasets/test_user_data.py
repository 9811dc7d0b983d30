"""Arrays and data frames as data: what comes of them, that they agree with folders on disk, and every refusal in one line."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfleet
from fedfleet.assembly.provenance import describe
from fedfleet.data import DataError, from_arrays, from_dataframe
from fedfleet.datasets.convert import convert
from tests.datasets.layouts import on_disk
from tests.refusals import all_say


def table(rows: int = 40, clients: int = 8, domains: int = 0) -> pd.DataFrame:
    random = np.random.default_rng(3)
    of = random.permutation(rows) % clients
    frame = pd.DataFrame({"client": [f"c{i}" for i in of], "a": random.normal(size=rows), "b": np.arange(rows)})
    frame["y"] = random.integers(0, 3, rows)
    return frame.assign(domain=[f"d{i % domains}" for i in of]) if domains else frame


def held(data: fedfleet.FederatedDataset) -> list[set[tuple[float, ...]]]:
    """The rows of every client, as sets of (x, y)."""
    population = data.population
    x, y = population.data["x"], population.data["y"]
    blocks = population.indices.split(population.offsets.diff().tolist())
    return [{(*x[i].flatten().tolist(), int(y[i])) for i in rows} for rows in blocks]


def said(of: pd.DataFrame) -> set[tuple[float, ...]]:
    return {(float(np.float32(a)), float(b), int(y)) for a, b, y in zip(of.a, of.b, of.y, strict=True)}


def test_every_client_has_its_rows_and_the_test_examples_are_those_of_some_clients():
    frame = table()
    data = from_dataframe(frame, client="client", test=0.25)
    assert isinstance(data, fedfleet.FederatedDataset)
    names = list(dict.fromkeys(frame.client))
    tested = {(*x.tolist(), int(y)) for x, y in zip(data.test.x, data.test.y, strict=True)}
    whole = [said(frame[frame.client == name]) for name in names]
    out = [rows for rows in whole if rows <= tested]
    assert (len(out), set().union(*out)) == (2, tested)
    assert held(data) == [rows for rows in whole if rows not in out]  # in the order they first appear in
    assert (data.test.classes, data.test.x.dtype) == (3, torch.float32)


def test_without_clients_a_partition_deals_the_examples():
    frame = table().drop(columns="client")
    data = from_dataframe(frame, test=0.25)
    assert (len(data.train), len(data.test)) == (30, 10)
    rows = [*data.train.x[:, 1].tolist(), *data.test.x[:, 1].tolist()]
    assert sorted(rows) == list(range(40))
    assert torch.equal(from_dataframe(frame, test=0.25).test.x, data.test.x)


@settings(max_examples=15)
@given(st.integers(2, 9), st.integers(0, 30), st.sampled_from([0.1, 0.3]), st.booleans())
def test_a_data_frame_in_memory_is_the_folder_that_it_is_converted_to(tmp_path_factory, clients, more, share, whole):
    frame = table(clients + more, clients)
    frame = frame.drop(columns="a") if whole else frame
    folder = tmp_path_factory.mktemp("law")
    frame.to_parquet(folder / "in.parquet")
    convert(folder / "in.parquet", folder / "out", hold_out=share)
    there = on_disk(folder / "out")
    here = from_dataframe(frame, client="client", test=share)
    assert here.population.summary() == there.population.summary()
    for client in range(here.population.size):
        a, b = (data.population.local_data(torch.tensor([client])) for data in (here, there))
        for name in ("x", "y"):
            assert torch.equal(a.data[name][a.rows], b.data[name][b.rows])
    assert torch.equal(here.test.x.sort(0).values, there.test.x.sort(0).values)
    assert here.test.x.dtype == (torch.int64 if whole else torch.float32)


def test_domains_are_the_clients_and_every_one_is_tested():
    frame = table(60, 12, domains=3)
    data = from_dataframe(frame, client="client", domain="domain", test=0.3)
    assert (data.domains, data.test.domain.unique().tolist()) == (("d0", "d1", "d2"), [0, 1, 2])
    kept = [name for name in dict.fromkeys(frame.client) if said(frame[frame.client == name]) in held(data)]
    of = frame.drop_duplicates("client").set_index("client").domain
    assert ([f"d{i}" for i in data.population.domain], len(kept)) == ([of[name] for name in kept], 12 - 3)
    dealt = from_dataframe(frame.drop(columns="client"), domain="domain", test=0.2)
    assert dealt.test.domain.bincount().tolist() == [4, 4, 4]


def test_test_examples_of_their_own_and_by_a_column():
    frame = table()
    data = from_dataframe(frame, client="client", test=frame.drop(columns="client").head(7))
    assert (len(data.test), data.population.summary().mean_examples) == (7, 5)
    by = from_dataframe(frame.assign(held=np.arange(40) % 4 == 1), client="client", test="held")
    assert (by.test.x[:, 1].tolist(), by.test.x.shape[1]) == (list(range(1, 40, 4)), 2)
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10) % 2
    arrays = from_arrays(x, y, client=np.arange(10) // 5, test=(x[:3] + 100, [1, 0, 1]))
    assert (arrays.test.y.tolist(), arrays.test.x[0].tolist()) == ([1, 0, 1], [100, 101])
    assert held(arrays) == [{(*map(float, x[i]), int(y[i])) for i in range(a, a + 5)} for a in (0, 5)]
    flagged = from_arrays(x, y, client=["a"] * 9 + ["b"], test=[False] * 9 + [True])
    assert flagged.population.size == 1  # a client that is all test examples is none
    assert flagged.test.x.tolist() == [[18, 19]]
    domains = from_arrays(x, y, domain=["q", "p"] * 5, test=(x[:2], y[:2], ["p", "q"]))
    assert (domains.domains, domains.test.domain.tolist()) == (("p", "q"), [0, 1])
    assert domains.train.domain.tolist() == [1, 0] * 5


@pytest.mark.parametrize(("x", "dtype"), [
    (np.arange(20, dtype=np.uint8).reshape(10, 2), torch.uint8),
    (np.arange(20, dtype=np.int16).reshape(10, 2), torch.int64),
    (np.arange(20, dtype=np.uint64).reshape(10, 2), torch.int64),
    (np.arange(20, dtype=np.float64).reshape(10, 2), torch.float32), (np.ones((10, 2), dtype=bool), torch.float32),
    (torch.arange(20).view(10, 2), torch.int64), ([[1, 2.5]] * 10, torch.float32), ([[1, 2]] * 10, torch.int64),
    (np.zeros((10, 3, 8, 8), dtype=np.uint8), torch.uint8), (np.zeros((10, 4, 6, 4), dtype=np.float32), torch.float32),
])  # fmt: skip
def test_what_examples_are_kept_as(x, dtype):
    found = from_arrays(x, np.arange(10) % 2, test=0.2)
    assert (found.train.x.dtype, found.train.x.shape[1:]) == (dtype, np.shape(x)[1:])


def test_columns_of_integers_stay_integers_and_bytes_are_numbers():
    frame = pd.DataFrame({"a": np.array([1, 200] * 5, np.uint8), "b": [True, False] * 5, "y": [0, 1] * 5})
    assert from_dataframe(frame, test=0.2).train.x.unique(dim=0).tolist() == [[1, 1], [200, 0]]
    assert from_dataframe(frame, test=0.2).train.x.dtype == torch.int64
    assert from_dataframe(frame[["b", "y"]], test=0.2).train.x.dtype == torch.float32
    assert from_dataframe(frame.assign(c=0.5), test=0.2).train.x.dtype == torch.float32
    nullable = frame.assign(a=frame.a.astype("Int64"), y=frame.y.astype("category"))
    assert from_dataframe(nullable, test=0.2).train.x.dtype == torch.int64
    arrays = pd.DataFrame({"pixels": [np.full((1, 2, 2), i, np.uint8) for i in range(10)], "y": [0, 1] * 5})
    assert from_dataframe(arrays, test=0.2).train.x.shape == (8, 1, 2, 2)


def test_two_tables_are_told_apart_in_the_record():
    frame = table()
    about = describe(from_dataframe(frame, client="client"))
    assert (about["name"], about["source"], about["not_recorded"]) == ("dataframe", None, [])
    assert describe(from_dataframe(frame.copy(), client="client")) == about
    changes = {
        "a number": frame.assign(a=frame.a.where(frame.index != 7, 9.0)),
        "a label": frame.assign(y=frame.y.where(frame.index != 7, (frame.y + 1) % 3)),
        "a client": frame.assign(client=frame.client.where(frame.index != 7, "c0")),
    }
    for what, other in changes.items():
        assert describe(from_dataframe(other, client="client"))["digest"] != about["digest"], what


def test_a_run_learns_from_a_data_frame(tmp_path):
    config = {"rounds": 2, "task": {"model": "logistic"}, "algorithm": {"batch_size": 2}, "cohort": {"size": 3}}
    data = fedfleet.data.from_dataframe(table(), client="client")
    run = fedfleet.run(config, {"executor.kind": "local"}, data=data, out=tmp_path / "run")
    assert "eval/accuracy" in run.summary["final"]
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["population"]["dataset"]["own"]["digest"] == describe(data)["digest"]


FRAME = table(40, 8)
X, Y = np.arange(20.0).reshape(10, 2), np.arange(10) % 2


def at(column, row, value):
    return FRAME.assign(**{column: [value if i == row else v for i, v in enumerate(FRAME[column])]})


def test_bad_data_are_refused(subtests):
    of = lambda frame, **given: lambda: from_dataframe(frame, client="client", **given)  # noqa: E731
    xy = lambda **given: lambda: from_arrays(X, Y, **given)  # noqa: E731
    rows = [
        (lambda: from_dataframe([1]), "df: is a list"), (lambda: from_dataframe(FRAME.head(0)), "df: has no rows"),
        (lambda: from_dataframe(FRAME, client="clint"), "df: no column 'clint': did you mean 'client'"),
        (of(FRAME, label="out"), "choose label= among client, a, b, y"),
        (lambda: from_dataframe(FRAME, client="y"), "df: the column 'y' is named twice: give client= another"),
        (of(at("client", 3, None)), "column 'client', row 3: has no client: fill"),
        (of(FRAME.assign(client=0.5)), "'client': is floating"),
        (of(FRAME, classes=2), "the label 2 is none from 0 to 1: mend the label"),
        (of(at("y", 5, -1)), "row 5: the label -1 is none from 0"),
        (of(at("y", 5, None)), "column 'y', row 5: has no label"),
        (of(FRAME.assign(y="7")), "'y': labels are text, such as '7'"),
        (of(at("y", 5, "cat")), "column 'y', row 5: is str, no number"),
        (of(FRAME.assign(y=[*"abcd"] * 10), classes=3), "'y': there are 4 labels, and classes=3"),
        (of(FRAME.assign(y=[*"ab", None, "c"] * 10)), "column 'y', row 2: has no label"),
        (of(FRAME, test=FRAME.assign(y="a")), "df: labels are numbers"),
        (of(FRAME.assign(y=0.5)), "labels are float64: make them integers"),
        (of(at("a", 4, np.nan)), "column 'a', row 4: is missing"),
        (of(at("a", 4, np.inf)), "'a', row 4: has a number that is no finite"),
        (of(at("a", 4, 1e300)), "'a', row 4: has a number that is no finite"),
        (of(FRAME.assign(c=pd.Timestamp("2026-01-01"))),
         "'c': is datetime64, no numbers: make it numbers, by (df['c'] - df['c'].min()).dt.days for instance"),
        (of(FRAME.assign(c="x")), "or leave it out, or say what it is, as by client='c'"),
        (of(FRAME.assign(c="x", d="y", e=1)),
         "'c': is text, no numbers (nor are 'd'): make it numbers, by pd.get_dummies(df, columns=['c'])"),
        (of(FRAME.assign(c=["1", "?", *["2"] * (len(FRAME) - 2)])),
         "make it numbers, by df['c'] = pd.to_numeric(df['c'], errors='coerce') for instance"),
        (lambda: from_arrays([[1.0]] * 3, [1, 2, 1], test=0.3),
         "labels go from 1 to 2, and no example has 0: number them"),
        (of(FRAME.assign(c=1j)), "column 'c': is complex"),
        (of(FRAME.reset_index()), "the column 'index' is an index and no feature"),
        (of(FRAME.rename(columns={"b": "Unnamed: 0"})), "'Unnamed: 0' is an"),
        (of(FRAME.rename(columns={"b": "a"})), "two columns 'a': rename one"),
        (of(FRAME[["client", "y"]]), "no columns are left for features"),
        (lambda: from_dataframe(FRAME, features="a"), "features: is 'a'"),
        (lambda: from_dataframe(FRAME, features=["a", "y"]), "features: the column 'y' is no feature"),
        (lambda: from_dataframe(FRAME, features=["aa"]), "df: no column 'aa'"),
        (of(FRAME, test="held"), "df: no column 'held'"), (of(FRAME, test="b"), "column 'b': does not say of each row"),
        (of(FRAME.assign(t=False), test="t"), "no rows are test examples"),
        (of(FRAME, test=FRAME.drop(columns="b")), "test: no column 'b': give"),
        (of(FRAME, test=[1]), "test: does not say of each row whether it is a test"),
        (of(FRAME.assign(t=["train", "test"] * 20), test="t"),
         "column 't': does not say of each row whether it is a test example: give True or False a row, as by == 'test'"),
        (of(FRAME, test=1), "test: is 1: give a share between 0 and 1"),
        (of(FRAME[FRAME.client == "c1"]), "holding out 1 of 1 clients for testing"),
        (of(FRAME.assign(domain=[*"ab"] * 20), domain="domain"),
         "has examples of 'a' and 'b': a client is of one domain"),
        (of(FRAME.assign(domain=FRAME.client), domain="domain"),
         "holding out 1 of 1 clients of the domain 'c0' for testing leaves none"),
        (lambda: from_arrays([[1, 2], [3]], [0, 1]), "x, row 1: is of shape (1,), and row 0 of (2,)"),
        (lambda: from_arrays([[1, 2], [3]], [0, 1]),
         "all rows are alike, or, where they are tokens, read them as texts"),
        (lambda: from_arrays([[[1], [2, 3]]] * 3, [0, 1, 1]), "x, row 0: holds rows of unequal lengths"),
        (lambda: from_arrays([[1, None]] * 3, [0, 1, 1]), "x, row 0: has a null"),
        (lambda: from_arrays(np.arange(3.0), [0, 1, 1]),
         "x: is of shape (3,), and an example is a row: give x[:, None]"),
        (lambda: from_arrays(5.0, [0]), "give an array of shape (examples, features)"),
        (lambda: from_arrays(np.zeros((0, 3)), []), "x: is of shape (0, 3), and holds nothing"),
        (lambda: from_arrays(np.zeros((9, 8, 8, 3)), [0] * 9), "channels last: give x.transpose(0, 3, 1, 2)"),
        (lambda: from_arrays(np.zeros((3, 2), "M8[s]"), [0, 1, 1]), "x: is datetime64[s], no numbers"),
        (lambda: from_arrays(np.full((3, 2), 2**63, np.uint64), [0, 1, 1]),
         "row 0: has a number that is no finite int64"),
        (lambda: from_arrays(X, Y[:, None]), "y: is of shape (10, 1), and a label is one number: give y[:, 0]"),
        (lambda: from_arrays(X, np.eye(10)), "y: is of shape (10, 10), and a label is one number: give y.argmax(1)"),
        (lambda: from_arrays(X, Y[:9]), "y: is of shape (9,), and there are 10 examples"),
        (xy(test=(X, [*"ab"] * 5)), "x: labels are numbers, and those of test x text"),
        (xy(client=[1, 2]), "client: there are 2 entries, and 10 examples"),
        (xy(client=[1, "a"] * 5), "client: is mixed-integer"), (xy(client=X), "client:"),
        (xy(test=[True]), "test: does not say of each row whether it is a test example"),
        (xy(test=[True] * 10), "test: all rows are test examples"),
        (xy(test=(X,)), "test: has 1 entries: give (x, y), or (x, y, domain)"),
        (xy(test=(X[:, :1], Y)), "test x: an example is float32 of shape (1,), and one of x"),
        (xy(test=(X.astype(int), Y)), "test x: an example is int64 of shape (2,), and one of x"),
        (xy(test=(X, Y, Y)), "test x: test examples say a domain, and those of x none"),
        (xy(domain=Y, test=(X, Y, Y + 1)), "of the domain 2, and no training example is"),
        (xy(domain=Y, test=(X, Y, Y * 0)), "no test example is of the domain 1: give some"),
        (xy(classes=2, test=(X, Y + 1)), "test y, row 1: the label 2 is none from 0 to 1"),
        (xy(test=float("nan")), "test: is nan: give a share between 0 and 1"),
        (xy(test=0.99), "holding out 10 of 10 examples for testing leaves none"),
    ]  # fmt: skip
    all_say(subtests, lambda make: make(), rows, DataError)


@given(st.integers(2, 6), st.integers(1, 4), st.data())
def test_a_null_in_a_list_is_named_by_its_row_wherever_it_is(rows, width, data):
    row, place = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, width - 1))
    x = [[float(i + j) for j in range(width)] for i in range(rows)]
    x[row][place] = None
    deep, y = [[[[each]] for each in one] for one in x], [0] * rows
    tokens = [[None if each is None else int(each) for each in one] for one in x]
    ways = {
        "lists": lambda: from_arrays(x, y),
        "lists of lists": lambda: from_arrays(deep, y),
        "arrays": lambda: from_arrays([np.array(one, dtype=object) for one in x], y),
        "Arrow": lambda: from_arrays(pa.array(x), y),
        "column": lambda: from_dataframe(pd.DataFrame({"x": x, "y": y})),
        "Arrow's column": lambda: from_dataframe(pa.table({"x": x, "y": y}).to_pandas(types_mapper=pd.ArrowDtype)),
        "tokens": lambda: fedfleet.data.from_texts(tokens, y),
        "target": lambda: from_arrays(np.zeros((rows, 1)), target=x),
    }
    for name, way in ways.items():
        with pytest.raises(DataError, match=rf"row {row}: has a null") as e:
            way()
        assert "\n" not in str(e.value), name


@given(st.lists(st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=2), min_size=4, max_size=9))
def test_columns_of_lists_of_arrows_are_read_as_lists(x):
    y = [i % 2 for i in range(len(x))]
    want = from_arrays(np.array(x, dtype=np.float32), np.array(y))
    columns = {"x": pa.array(x, pa.list_(pa.float32())), "y": y}
    fixed = {"x": pa.array(x, pa.list_(pa.float32(), 2)), "y": y}
    for table in (columns, fixed):
        found = from_dataframe(pa.table(table).to_pandas(types_mapper=pd.ArrowDtype))
        assert torch.equal(found.train.x, want.train.x)
        assert torch.equal(found.train.y, want.train.y)
    assert torch.equal(from_arrays(columns["x"], pa.array(y)).train.x, want.train.x)


def test_columns_of_lists_beside_others_are_told_what_they_are(tmp_path, subtests):
    frame = pd.DataFrame({"v": [[1.0, 2.0], [3.0, 4.0]], "b": [1, 2], "y": [0, 1], "client": [0, 1]})
    frame.to_parquet(tmp_path / "t.parquet")
    arrow = pa.Table.from_pandas(frame).to_pandas(types_mapper=pd.ArrowDtype)
    rows = [
        (lambda: from_dataframe(frame), "column 'v': holds lists … give features=['v']"),
        (lambda: from_dataframe(arrow), "column 'v': holds lists … give features=['v']"),
        (lambda: from_dataframe(pa.Table.from_pandas(frame)), "df: is a Table … .to_pandas()"),
        (lambda: convert(tmp_path / "t.parquet", tmp_path / "out"), "column 'v' is list … call it x … --without v"),
    ]
    all_say(subtests, lambda call: call(), rows, DataError)
