"""Documents that others may have written are read within limits, or refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pandas as pd
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fedfleet.files import documents, parquet
from fedfleet.files.documents import (
    YAML_BYTES,
    check_text,
    checked_event,
    json_lines,
    json_of,
    parse,
    parse_json,
    sealed_event,
    sealed_text,
    text_of,
)
from fedfleet.files.writing import appending, own_folder, replacing, write_text
from tests.refusals import refused

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\t\n\r"))
"""Text without halves of characters, and without what a terminal takes for an order."""
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(WORDS, below, max_size=3),
    max_leaves=9,
)
BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 9)
)


@given(value=PLAIN)
def test_json_comes_back(value):
    assert parse_json(json.dumps(value)) == value


def flipped(text: str, at: float, bit: int) -> str:
    content = bytearray(text.encode())
    content[int(at * len(content))] ^= 1 << bit
    return content.decode(errors="replace")


SAID = {"rounds": 100, "vary": {"algorithm.lr": [0.1, 0.25]}, "label": "ä"}
PLACES = {"at": st.floats(0, 1, exclude_max=True), "bit": st.integers(0, 7)}


@example(at=0.4140625, bit=3)  # the line of the digest is then no comment
@given(**PLACES)
def test_a_bit_that_was_flipped_in_a_sealed_document_is_told_or_changes_nothing(at, bit):
    text = sealed_text(yaml.safe_dump(SAID))
    check_text(text)
    assert parse(text) == SAID
    damaged = flipped(text, at, bit)
    with suppress(ValueError):
        check_text(damaged)
        assert parse(damaged) == SAID


@given(**PLACES)
def test_a_bit_that_was_flipped_in_a_sealed_line_is_told_or_gives_it_another_key(at, bit):
    line = sealed_event(SAID)
    assert checked_event(parse_json(line)) == SAID
    with suppress(ValueError):
        damaged = parse_json(flipped(line, at, bit))
        assert {key: value for key, value in checked_event(damaged).items() if key in SAID} == SAID


def test_what_is_added_to_a_hard_link_is_not_in_the_other_file(tmp_path):
    mine, other = tmp_path / "events.jsonl", tmp_path / "other"
    other.write_text("a\n")
    os.link(other, mine)
    with appending(mine) as file:
        file.write("b\n")
    assert (mine.read_text(), other.read_text()) == ("a\nb\n", "a\n")


@given(st.lists(WORDS, min_size=1, max_size=3), WORDS)
def test_a_key_that_json_gives_twice_is_refused(path, again):
    inner = f"{{{json.dumps(again)}: 1, {json.dumps(again)}: 1}}"
    text = "".join(f"{{{json.dumps(key)}: [" for key in path) + inner + "]}" * len(path)
    assert "is given twice" in str(refusal(parse_json, text))


def test_halves_of_characters_are_no_text():
    assert parse_json('{"\\ud800": ["\\udc00", "\\ud83d\\ude00"]}') == {"?": ["?", "\U0001f600"]}


@given(text=st.text(max_size=40))
def test_any_text_is_read_or_refused_in_one_line(text):
    for read in (parse, parse_json):
        assert "\n" not in (refusal(read, text) or "")


def refusal(read: Callable[[Any], Any], given: Any) -> str | None:
    """Return what a reader refuses something with, None where it takes it."""
    try:
        read(given)
    except ValueError as e:
        return str(e)
    return None


def test_what_would_take_for_ever_is_refused(subtests, monkeypatch):
    monkeypatch.setattr(documents, "MOST", 1000)
    rows = [
        *((parse, text) for text in ("[" * 9999, "{" * 9999, "a: " * 9999, "- " * 9999, BOMB, "? " * 9999, "&a [*a]")),
        *((parse, text) for text in (f"[{'1, ' * 1001}]", "9" * 5000, "!!python/object:os.system {}")),
        *((parse_json, text) for text in ("[" * 100_000, '{"a":' * 100_000, "9" * 5000, "[" * 70 + "]" * 70)),
    ]
    for read, text in rows:
        with subtests.test(f"{read.__name__} {text[:9]}"), pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            read(text)


def test_only_regular_files_of_some_size_are_read(tmp_path, subtests):
    (tmp_path / "a folder").mkdir()
    os.mkfifo(tmp_path / "a pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "a list").write_text("[]")
    for path in sorted(tmp_path.iterdir()):
        with subtests.test(path.name):
            refused(lambda path=path: json_of(path), f"{path}: not readable as JSON")
            refused(lambda path=path: parquet.read(path), f"{path}: not readable as Parquet")
    (tmp_path / "large").write_text(" " * (YAML_BYTES + 1))
    with pytest.raises(OSError, match="larger than"):
        text_of(tmp_path / "large", YAML_BYTES)
    with pytest.raises(FileNotFoundError):
        json_of(tmp_path / "nothing")
    assert list(json_lines(tmp_path / "nothing")) == []


def test_lines_that_are_none_are_told_apart(tmp_path):
    (tmp_path / "events").write_text('{"a": 1}\n[]\n{"b": 2}\n' + "[" * 99_999 + '\n{"c')
    assert list(json_lines(tmp_path / "events")) == [{"a": 1}, None, {"b": 2}, None, None]


@given(at=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_a_flipped_bit_of_a_page_is_seen(tmp_path_factory, at, bit):
    path = tmp_path_factory.mktemp("table") / "t.parquet"
    frame = pd.DataFrame({"round": range(400), "value": [i / 7 for i in range(400)]})
    parquet.write(frame, path)
    content = bytearray(path.read_bytes())
    with parquet.readable(path) as file:
        column = file.metadata.row_group(0).column(1)
        start, size = column.dictionary_page_offset or column.data_page_offset, column.total_compressed_size
    content[start + 60 + at % (size - 60)] ^= 1 << bit  # after the head of its first page
    path.write_bytes(content)
    line = refusal(parquet.read, path)
    if line is not None:
        assert line.startswith(f"{path}: not readable as Parquet")
    else:
        pd.testing.assert_frame_equal(parquet.read(path), frame)  # a bit of statistics, which nobody reads


def test_a_small_table_that_would_fill_memory_is_refused(tmp_path, monkeypatch):
    frame = pd.DataFrame({"round": [0] * 100_000})
    parquet.write(frame, tmp_path / "t.parquet")
    assert len(parquet.read(tmp_path / "t.parquet")) == 100_000
    monkeypatch.setattr(parquet, "DENSEST", 1)
    refused(lambda: parquet.read(tmp_path / "t.parquet"), f"{tmp_path / 't.parquet'}: not readable")


def test_files_are_written_anew_and_through_no_link(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file.txt"
    victim.write_text("mine")
    for name in ("file.txt", "file.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_text(path, "new")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("mine", "new", False)
    assert not (tmp_path / "file.tmp").exists()
    with suppress(RuntimeError), replacing(path) as scratch:
        scratch.write_text("half")
        raise RuntimeError
    assert (path.read_text(), sorted(p.name for p in tmp_path.iterdir())) == ("new", ["file.txt", "victim"])
    (tmp_path / "log").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), appending(tmp_path / "log"):
        pass
    (tmp_path / "below").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(OSError, match="below is a link"):
        own_folder(tmp_path / "below")
    assert own_folder(tmp_path / "new") == own_folder(tmp_path / "new") == tmp_path / "new"
