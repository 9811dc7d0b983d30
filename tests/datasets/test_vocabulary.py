"""A vocabulary reads new texts as those were read that it was made of, and is the same out of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedfleet.config.population import load_data
from fedfleet.config.schema import load
from fedfleet.data import DataError, from_texts
from fedfleet.datasets.text import windows
from fedfleet.datasets.vocabulary import VOCABULARY, Vocabulary, counted, read_vocabulary
from tests.datasets.test_sources import leaf
from tests.refusals import all_say, tells

TEXTS, LIKED = ["a b b, c", "B, c d", "", "e"], [0, 1, 0, 1]
HELD = [False, False, False, True]


@pytest.mark.parametrize("tokenizer", ["words", "characters", "bytes"])
def test_the_texts_themselves_become_the_tokens_that_were_learnt_from(tokenizer: str, tmp_path: Path):
    texts = ["a", *TEXTS[1:]] if tokenizer == "words" else [text or "x" for text in TEXTS]
    data = from_texts(texts, LIKED, test=HELD, tokenizer=tokenizer, length=3)
    known = data.names.vocabulary
    assert (known.tokenizer, known.words, known.length) == (tokenizer, data.test.words, 3)
    (tmp_path / VOCABULARY).write_text(known.dumped(), encoding="utf-8")
    for one in (known, read_vocabulary(tmp_path), read_vocabulary(tmp_path / VOCABULARY)):
        assert (one, one.digest) == (known, known.digest)
        tokens, mask = one.encode(texts[:3])
        assert tokens.where(mask, -1).tolist() == data.train.x.tolist()
        assert tokens[~mask].eq(0).all()


def test_one_that_is_kept_numbers_other_texts_alike(tmp_path: Path):
    first = from_texts(TEXTS, LIKED, test=HELD, length=2)
    (tmp_path / VOCABULARY).write_text(str(first.names.vocabulary and first.names.vocabulary.dumped()))
    other = from_texts(["d z", "c c c c", "a"], LIKED[:3], test=HELD[1:], tokenizer=f"vocabulary:{tmp_path}")
    number = first.names.vocabulary.tokens if first.names.vocabulary else {}
    assert other.train.x.tolist() == [[number["d"], 0, -1, -1], [number["c"]] * 4]  # z is unknown; no length is kept
    assert other.test.words == first.test.words
    assert other.names.vocabulary.digest == first.names.vocabulary.digest


def test_digests_tell_vocabularies_that_number_otherwise():
    known = counted("words", ["a b b"], 9)
    assert known.tokens == {"b": 1, "a": 2}
    assert known.digest == counted("words", ["b a b"], 9).digest == known.cut_at(4).digest
    others = [
        counted("words", ["a a b"], 9), counted("words", ["a b b c"], 9), counted("words", ["a b b c c"], 3),
        counted("characters", ["abb"], 9), Vocabulary("words", 3, known.tokens, unknown=1),
        Vocabulary("words", 4, known.tokens), Vocabulary("transformers:x", 3, source="one"),
        Vocabulary("transformers:x", 3, source="two"),
    ]  # fmt: skip
    assert len({known.digest, *(one.digest for one in others)}) == 1 + len(others)
    assert others[-1].digest == Vocabulary("transformers:y", 3, source="two").digest  # wherever it lies


def test_named_texts_and_leafs_say_theirs_too(tmp_path: Path):
    lines = [["The fox; a fox!"] * 30, ["a dog"] * 30]
    data = windows("own", lines, lines, 5)
    known = data.names.vocabulary
    assert known.tokens == {"a": 2, "fox": 3, "dog": 4}  # 0 is all else, 1 the end of a line
    assert known.encode(["A fox_ barks"]).tokens.tolist() == [[2, 3, 0]]
    assert data.train.x[0, :5].tolist() == [0, 3, 2, 3, 1]
    leaf(tmp_path, {"u": (["ab", "c?"], ["c", "d"])}, {"u": (["b~"], ["a"])})
    plays = load_data(load({"population": {"dataset": {"name": "leaf", "path": str(tmp_path)}}}))
    characters = plays.names.vocabulary
    assert characters.encode(["b~a"]).tokens.tolist() == plays.test.x.tolist()  # ~ is read as a blank


def test_numbers_of_tokens_have_none():
    assert from_texts([[1, 2], [3], [4]], LIKED[:3], test=HELD[1:]).names.vocabulary is None


@pytest.mark.parametrize("texts", ["one text", [], [1], None])
def test_what_is_no_list_of_texts_is_refused(texts: object):
    tells(lambda: counted("words", ["a"], 5).encode(texts), "^texts: is … , no list of texts", DataError)


def test_a_file_that_was_changed_is_refused(subtests, tmp_path):
    def call(change):
        told = json.loads(counted("words", ["a b c"], 9).dumped())
        (tmp_path / VOCABULARY).write_text(json.dumps(told | change))
        from_texts(TEXTS, LIKED, test=HELD, tokenizer=f"vocabulary:{tmp_path}")

    rows = [
        ({"tokenizer": "wrds"}, "is of the tokenizer 'wrds'"), ({"words": 2}, "numbers a token beyond its words"),
        ({"tokens": {"a": -1}}, "is no vocabulary (1 faults)"), ({"words": None}, "is no vocabulary (1 faults)"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    given = {"test": HELD, "tokenizer": f"vocabulary:{tmp_path}"}
    tells(lambda: from_texts(TEXTS, LIKED, **given), f"{VOCABULARY} cannot be read (No such file", DataError)
    tells(lambda: from_texts(TEXTS, LIKED, test=HELD, tokenizer="vocabulary:x", words=3), "words: is 3", DataError)
