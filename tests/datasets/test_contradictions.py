"""Refusals of data that contradict themselves, are there twice, or have another encoding.

Files that systems leave beside the data are no data.
"""

import copy
import csv
import json
import shutil

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedfleet.config.reading import read as read_config
from fedfleet.data import from_image_folder, from_texts
from fedfleet.datasets import celeba, fedscale, folders, leaf, partition_file, text, tff
from fedfleet.datasets.convert import convert
from fedfleet.datasets.files import DataError
from fedfleet.datasets.trace import read_trace
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.plain_text import OtherEncoding, decoded, parsed_json
from tests.refusals import refused

SIDE = {
    "users": ["a", "b", "c"],
    "num_samples": [2, 1, 3],
    "user_data": {
        "a": {"x": [[1], [2]], "y": [0, 1]},
        "b": {"x": [[3]], "y": [1]},
        "c": {"x": [[1]] * 3, "y": [0] * 3},
    },
}


def leaf_folder(root, sides):
    for part, files in sides.items():
        (root / part).mkdir(parents=True)
        for i, file in enumerate(files):
            (root / part / f"{i}.json").write_text(json.dumps(file))
    return root


def twice(side, key):
    """The JSON of a side in which a user's data are given twice."""
    again = {**side["user_data"][key], "x": [[9]] * len(side["user_data"][key]["x"])}
    return json.dumps(side).replace('"user_data": {', f'"user_data": {{"{key}": {json.dumps(again)}, ', 1)


@given(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 5), st.sampled_from(["train", "test"]), st.data())
def test_leaf_that_contradicts_itself_is_refused(tmp_path_factory, user, at, other, part, data):
    kinds = {
        "a user named twice": lambda s: s["users"].append(user),
        "a user without a name": lambda s: s["user_data"].update(z=s["user_data"][user]),
        "a user without data": lambda s: s["user_data"].pop(user),
        "another count": lambda s: s["num_samples"].__setitem__(at, s["num_samples"][at] + other),
        "a count too many": lambda s: s["num_samples"].append(other),
        "a count too few": lambda s: s["num_samples"].pop(),
        "a label too few": lambda s: s["user_data"][user]["y"].pop(),
    }
    kind = data.draw(st.sampled_from([*kinds, "data twice", "a user in two files", "a file twice"]))
    sides, root = {"train": [copy.deepcopy(SIDE)], "test": [copy.deepcopy(SIDE)]}, tmp_path_factory.mktemp("leaf") / "l"
    if kind in kinds:
        kinds[kind](sides[part][0])
    elif kind == "a user in two files":
        mine = {"users": [user], "num_samples": [1], "user_data": {user: {"x": [[7]], "y": [1]}}}
        sides[part].append(mine)
    elif kind == "a file twice":
        sides[part] *= 2
    leaf_folder(root, sides)
    if kind == "data twice":
        (root / part / "0.json").write_text(twice(SIDE, user))
    refused(lambda: leaf.read(leaf.LeafOptions(path=str(root))), str(root / part), DataError)


def hdf5(path, clients):
    with h5py.File(path, "w") as file:
        for name, fields in clients.items():
            for field, values in fields.items():
                file[f"examples/{name}/{field}"] = values
    return path


def test_fields_of_hdf5_that_might_be_meant_alike_are_refused(tmp_path, subtests):
    x, y = np.ones((2, 3), dtype=np.float32), np.array([0, 1])
    rows = {
        "two features": {"a": {"x": x, "pixels": x, "label": y}},
        "two labels": {"a": {"x": x, "label": y, "y": y}},
        "two texts": {"a": {"snippets": ["a b"], "tokens": ["c d"]}},
        "other features": {"a": {"x": x, "label": y}, "b": {"pixels": x, "label": y}},
        "other labels": {"a": {"x": x, "label": y}, "b": {"x": x, "y": y}},
        "labels of some": {"a": {"x": x, "label": y}, "b": {"x": x}},
    }
    for i, (name, clients) in enumerate(rows.items()):
        path = hdf5(tmp_path / f"{i}.h5", clients)
        with subtests.test(name):
            refused(lambda path=path: tff.read(tff.TffOptions(path=str(path))), str(path), DataError)


def image(path, shade=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), shade).save(path)


def images(root):
    for i in range(8):
        image(root / "ab"[i % 2] / ["cat", "dog"][i // 4] / f"{i}.png", i)
    return root


def table(path, rows=8, first=0):
    frame = pd.DataFrame({"client": np.arange(rows) % 4 + first, "a": np.arange(rows) * 1.0, "y": np.arange(rows) % 2})
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return path.parent


def trace(path, first=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {"client": [first, first + 1], "start_s": [0.0, 1.0], "end_s": [5.0, 9.0], "period_s": [10.0, 10.0]}
    pq.write_table(pa.table(rows), path)
    return path.parent


def readers(tmp_path):
    """What reads a folder of files: name -> (the folder, a file in it, a function that reads it and says what there is)."""
    out = iter(range(1000))

    def new():
        return tmp_path / f"out{next(out)}"

    for i in range(2):
        table(tmp_path / "parquet" / f"{i}.parquet", first=4 * i)
        table(tmp_path / "csv" / f"{i}.csv", first=4 * i)
        trace(tmp_path / "trace" / f"{i}.parquet", first=2 * i)
    images(tmp_path / "images")
    leaf_folder(tmp_path / "leaf", {"train": [SIDE], "test": [SIDE]})
    return {
        "parquet": ("parquet", "0.parquet", lambda at: convert(at, new(), hold_out=0.2).examples),
        "csv": ("csv", "0.csv", lambda at: convert(at, new(), hold_out=0.2, layout="csv").examples),
        "trace": ("trace", "0.parquet", lambda at: len(read_trace(at)[1].names)),
        "images": ("images", "a/cat/0.png", lambda at: len(from_image_folder(at, each="client", test=0.5).test)),
        "leaf": ("leaf", "train/0.json", lambda at: len(leaf.read(leaf.LeafOptions(path=str(at))).train.y)),
    }


def test_what_systems_leave_beside_files_is_no_data(tmp_path, subtests):
    for name, (folder, file, read) in readers(tmp_path).items():
        at = tmp_path / folder
        before = read(at)
        for beside in [at, *at.rglob("*")] if name == "images" else {at, (at / file).parent}:
            if beside.is_dir():
                for left in (f"._{(at / file).name}", f".{(at / file).name}", ".DS_Store"):
                    (beside / left).write_bytes(b"\x00\x05\x16\x07\xff")
                (beside / "__MACOSX").mkdir()
                (beside / "__MACOSX" / (at / file).name).write_bytes(b"\x00\x05\x16\x07")
        with subtests.test(name):
            assert read(at) == before


def test_a_file_given_twice_is_refused(tmp_path, subtests):
    for name, (folder, file, read) in readers(tmp_path).items():
        at = (tmp_path / folder / file).parent
        if name != "images":  # the same photograph may be there twice
            (at / f"copy of {(at / file).name}").write_bytes((tmp_path / folder / file).read_bytes())
            with subtests.test(name):
                refused(lambda read=read, folder=folder: read(tmp_path / folder), str(at), DataError)


def test_files_that_would_be_left_out_are_refused(tmp_path):
    table(tmp_path / "t" / "0.parquet")
    table(tmp_path / "t" / "more" / "1.parquet", first=4)
    refused(lambda: convert(tmp_path / "t", tmp_path / "out"), str(tmp_path / "t" / "more"), DataError)
    shutil.move(tmp_path / "t" / "more" / "1.parquet", tmp_path / "t" / "1.PARQUET")
    assert convert(tmp_path / "t", tmp_path / "out", hold_out=0.2).clients == 6


def test_tables_of_names_that_look_alike_and_of_numbers_that_become_one_are_refused(tmp_path, subtests):
    frame = pd.DataFrame({"client": ["ann", "bob", "cy", "di"] * 3, "a": np.arange(12.0), "y": np.arange(12) % 2})
    rows = {
        "client": ["ann", "ann ", "cy", "di"] * 3,
        "a": 1.7e9 + np.arange(12.0),
    }
    for column, values in rows.items():
        for layout in ("csv", "parquet"):
            at = tmp_path / f"{column}.{layout}"
            bad = frame.assign(**{column: values})
            bad.to_parquet(at) if layout == "parquet" else bad.to_csv(at, index=False)
            with subtests.test(f"{column} {layout}"):
                call = lambda at=at, layout=layout: convert(at, tmp_path / "out", hold_out=0.3, layout=layout)  # noqa: E731
                refused(call, f"{at}: column {column!r}", DataError)


ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 40


@given(st.sampled_from(ENCODINGS), st.text(st.characters(codec="latin-1", exclude_characters="\0"), min_size=4))
def test_text_in_another_encoding_is_named(encoding, written):
    with pytest.raises(OtherEncoding, match=r"UTF-(16|32): write it again as UTF-8"):
        decoded(("plain " * 3 + written).encode(encoding))
    assert decoded(b"\xef\xbb\xbf" + written.encode()) == written


def test_every_reader_of_text_names_another_encoding(tmp_path, subtests):
    sided = leaf_folder(tmp_path / "l", {"train": [SIDE], "test": [SIDE]})
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "conversation.txt").write_text(TEXT)
    (tmp_path / "c").mkdir()
    (tmp_path / "pacs").mkdir()
    listed = tmp_path / "pacs" / "photo_train_kfold.txt"
    told = {"a": {"active": [0], "inactive": [5], "finish_time": 10}}
    rows = {
        "config": ("c.yaml", "rounds: 3\n", lambda at: read_config(at), ConfigError),
        "leaf": (
            "l/train/0.json",
            json.dumps(SIDE),
            lambda at: leaf.read(leaf.LeafOptions(path=str(sided))),
            DataError,
        ),
        "trace": ("t.json", json.dumps(told), lambda at: fedscale.convert_trace(at, tmp_path / "o"), DataError),
        "texts": ("text/document.txt", TEXT, lambda at: text.load_small_texts(tmp_path), DataError),
        "lists": (str(listed), "photo/dog/1.jpg 1\n", lambda at: [*folders._listed(at, "photo", {})], DataError),
        "csv": (
            "x.csv",
            "client,a,y\n" + "1,2,0\n2,3,1\n" * 9,
            lambda at: convert(at, tmp_path / "q", layout="csv"),
            DataError,
        ),
    }
    for name, (file, written, read, kind) in rows.items():
        for encoding in ENCODINGS[:3]:
            at = tmp_path / file
            at.write_bytes(written.encode(encoding))
            with subtests.test(f"{name} {encoding}"):
                assert "UTF-16" in refused(lambda read=read, at=at: read(at), str(at), kind)


def test_files_of_text_that_begin_with_the_mark_of_utf_8_are_read(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfrounds: 3\n")
    assert read_config(tmp_path / "c.yaml") == {"rounds": 3}
    assert parsed_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@given(st.dictionaries(st.text(max_size=3), st.integers(), min_size=1), st.data())
def test_json_with_a_key_given_twice_is_refused(mapping, data):
    again = data.draw(st.sampled_from(sorted(mapping)))
    inner = ", ".join(f"{json.dumps(k)}: {v}" for k, v in [*mapping.items(), (again, 0)])
    assert parsed_json(json.dumps(mapping).encode()) == mapping
    with pytest.raises(ValueError, match="given twice"):
        parsed_json(f'[{{"deep": {{{inner}}}}}]'.encode())


def test_lists_that_name_something_twice_are_refused(tmp_path, subtests):
    (tmp_path / "list.txt").write_text("1.jpg 0\n2.jpg 1\n1.jpg 2\n")
    (tmp_path / "again.txt").write_text("photo/dog/1.jpg 1\nphoto/dog/1.jpg 1\n")
    pq.write_table(pa.table({"client": [0, 1], "index": [3, 3]}), tmp_path / "p.parquet")
    rows = {
        "list.txt": lambda at: celeba._column(at),
        "again.txt": lambda at: [*folders._listed(at, "photo", {"dog": [tmp_path / "1.jpg"]})],
        "p.parquet": lambda at: partition_file.read(at),
    }
    for name, call in rows.items():
        with subtests.test(name):
            refused(lambda name=name, call=call: call(tmp_path / name), str(tmp_path / name), DataError)


def test_what_is_no_list_of_texts_is_refused(subtests):
    for texts in ({"a": 1, "b": 2}, {"a", "b"}, b"ab", "ab", pd.DataFrame({"t": ["a", "b"]}), csv, 3):
        with subtests.test(type(texts).__name__):
            refused(lambda texts=texts: from_texts(texts, [0, 1]), "texts", DataError)
