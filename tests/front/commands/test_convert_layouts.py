"""``fedfleet convert``: of what it is told by its looks, what its options name, what is refused."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from fedfleet.datasets import disk
from tests.front.commands.lines import line


@pytest.fixture
def leaf(tmp_path):
    for part in ("train", "test"):
        (tmp_path / "leaf" / part).mkdir(parents=True)
        told = {"users": ["a", "b"], "user_data": {u: {"x": [[1.0, 2.0]], "y": [i]} for i, u in enumerate("ab")}}
        (tmp_path / "leaf" / part / "all.json").write_text(json.dumps(told))
    return tmp_path / "leaf"


def test_a_layout_is_told_by_its_looks_and_has_options(command, leaf, tmp_path):
    status, out, _ = command("convert", leaf, tmp_path / "out")
    assert (status, "2 clients, 2 examples, 2 test examples (50% of all), 2 classes" in out) == (0, True)
    for owner in "abcd":
        (at := tmp_path / "images" / owner / "fox").mkdir(parents=True)
        Image.new("RGB", (5, 6)).save(at / "0.png")
    words = ("convert", tmp_path / "images", tmp_path / "pixels", "--layout", "image_folder")
    status, out, _ = command(*words, "--option", "side=3", "--hold-out", 0.5)
    assert (status, "2 clients, 2 examples, 2 test examples (50% of all), 1 classes" in out) == (0, True)


@pytest.fixture
def table(tmp_path):
    rows = "\n".join(f"u{i % 4},{i / 2},{i},{i % 2},{'pq'[i % 2]}" for i in range(12))
    (tmp_path / "in.csv").write_text(f"user,height,price,sick,sex\n{rows}\n")
    return tmp_path / "in.csv"


@pytest.mark.parametrize(("more", "says"), [
    (("--label", "sick", "--domain", "sex"), "2 classes, 2 domains"),
    (("--label", "sick", "--domain", "sex", "--layout", "csv", "--classes", 5), "5 classes, 2 domains"),
    (("--target", "price", "--domain", "sex"), "targets, 2 domains"),
    (("--target", "price,sick", "--domain", "sex"), "targets, 2 domains"),
])  # fmt: skip
def test_columns_of_a_table_are_named(command, table, tmp_path, more, says):
    status, out, err = command("convert", table, tmp_path / "out", "--client", "user", *more)
    assert (status, says in out, err) == (0, True, ""), (out, err)
    assert "3 clients, 9 examples, 3 test examples" in out
    data = disk.load(disk.DiskOptions(path=str(tmp_path / "out")), None, 0)
    assert data.test.x.shape == (3, 2 - more[1].count(","))


@pytest.mark.parametrize(("more", "says", "width"), [
    (("--label", "sick"), "9 tokens, 2 classes, 1 domains", 3),
    (("--label", "sick", "--tokenizer", "bytes", "--length", 2), "256 tokens, 2 classes, 1 domains", 2),
    (("--label", "null", "--tokenizer", "characters", "--words", 3), "of all), 3 tokens, 1 domains", 4),
])  # fmt: skip
def test_texts_of_a_table(command, tmp_path, more, says, width):
    rows = "\n".join(f'u{i % 4},"{"abcde"[i % 5]}, {i % 2}",{i % 2}' for i in range(12))
    (tmp_path / "in.csv").write_text(f"user,said,sick\n{rows}\n")
    words = ("convert", tmp_path / "in.csv", tmp_path / "out", "--client", "user", "--text", "said", *more)
    status, out, err = command(*words)
    assert (status, says in out) == (0, True), (out, err)
    assert ("column 'sick' is beside a text, and left out" in err) == ("null" in more)
    assert disk.load(disk.DiskOptions(path=str(tmp_path / "out")), None, 0).test.x.shape == (3, width)


def test_columns_are_left_out_and_all_that_are_no_numbers_are_named(command, tmp_path):
    rows = "\n".join(f"u{i % 5},{i},x{i},{i % 2},2020-01-0{i % 9 + 1}" for i in range(20))
    (tmp_path / "in.csv").write_text(f"user,age,name,y,day\n{rows}\n")
    words = ("convert", tmp_path / "in.csv", tmp_path / "out", "--client", "user")
    _, _, err = command(*words)
    assert "'x0' is no number, and so are 'day': make it numbers, or leave it out by --without name,day" in err
    status, _, err = command(*words, "--without", "name,day")
    assert (status, err) == (0, "")
    assert json.loads((tmp_path / "out" / "population.json").read_text())["features"] == ["age"]
    _, _, err = command("convert", tmp_path / "in.csv", tmp_path / "two", "--client", "user", "--without", "name,day,y")
    assert "no column 'y' among user, age" in err


def test_labels_of_which_none_is_0_are_refused(command, tmp_path):
    (tmp_path / "in.csv").write_text("client,x1,y\n" + "".join(f"{i},1.5,{1 + i % 3}\n" for i in range(9)))
    words = ("convert", tmp_path / "in.csv", tmp_path / "out")
    _, _, err = command(*words)
    assert "labels go from 1 to 3, and no example has 0: number them from 0, as by y - 1, or say classes=4" in err
    assert not (tmp_path / "out").exists()
    assert command(*words, "--classes", 4)[0] == 0
    _, _, err = command("convert", tmp_path / "in.csv", tmp_path / "two", "--target", "y", "--without", "x1")
    assert "no features" in err


def test_what_the_librarys_save_to_disk_wrote_is_known_by_its_looks(command, tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"home": [i // 2 for i in range(20)], "age": [1.0] * 20, "ill": [0, 1] * 10})
    made.save_to_disk(tmp_path / "in")
    status, out, _ = command("convert", tmp_path / "in", tmp_path / "out", "--client", "home", "--label", "ill")
    assert (status, "9 clients" in out) == (0, True)


OF_A_TABLE = [
    (("--label", "null"), "label: is None"),
    (("--label", "sick", "--tokenizer", "words"), "tokenizer: is 'words'"),
    (("--text", "sex", "--label", "sick", "--target", "price"), "target: is 'price', beside label='sick'"),
    (("--label", "sick", "--target", "price"), "target: is 'price', beside label='sick'"),
    (("--target", "price", "--classes", 2), "classes: is 2"),
    (("--label", "sick"), "column 'sex', row 0: 'p' is no number"),
    (("--label", "sick", "--without", "sx"), "no column 'sx' to be left out"),
    (("--target", "price,"), "no column '' among user, height, price, sick, sex"),
    (("--layout", "parquet", "--label", "sick"), "in.csv: not a Parquet file"),
    (("--test", "in.csv", "--hold-out", 0.2), "--hold-out=0.2"),
    (("--layout", "tff", "--target", "price", "--label", "y"), "target: is 'price', beside label='y'"),
    (("--layout", "tff", "--target", "a,b"), "target=['a', 'b']"),
]
OF_LEAF = [
    (("--layout", "xml"), "--layout 'xml': choose parquet, csv, leaf, tff, hf or image_folder"),
    (("--layout", "torchvision"), "--layout 'torchvision'"),
    (("--layout", "parquet", "--option", "side=3"), "--option side"),
    (("--option", "side"), "an override is written dotted.key=value"),
    (("--option", "wide=3"), "wide: no option of leaf"), (("--classes", 1), "the label 1 is none from 0 to 0"),
    (("--layout", "image_folder"), "holds no folders"), (("--client", "user"), "client: no option of leaf"),
    (("--domain", "sex"), "domain: no option of leaf"), (("--hold-out", 0.2), "hold_out: no option of leaf"),
]  # fmt: skip


def test_mistakes_are_said_in_one_line(subtests, command, table, leaf, tmp_path):
    for source, rows in ((table, OF_A_TABLE), (leaf, OF_LEAF)):
        for more, says in rows:
            with subtests.test(f"{source.name} {more}"):
                named = ("--client", "user") if source is table and "tff" not in more else ()
                assert says in line(command("convert", source, tmp_path / "out", *named, *more))
                assert not (tmp_path / "out").exists()
