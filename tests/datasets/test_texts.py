"""Texts to tokens: what each tokenizer makes, whose text a vocabulary is made from, windows, what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from fedfleet.config import population
from fedfleet.data import DataError, from_dataframe, from_hf, from_texts
from fedfleet.datasets import keep
from fedfleet.datasets.examples import Examples, FederatedDataset
from fedfleet.datasets.parts import put_together
from fedfleet.datasets.sources import SOURCES
from tests.datasets.test_sources import leaf
from tests.refusals import all_say, tells

HELD = [False, False, True]


def test_a_vocabulary_is_of_the_training_texts_most_frequent_first():
    data = from_texts(["B b a! c", "b A", "c c c c"], [0, 1, 0], test=HELD, words=4)
    assert (data.train.words, data.train.classes) == (4, 2)
    assert data.train.x.tolist() == [[1, 1, 2, 3, 0], [1, 2, -1, -1, -1]]  # b, a, then ! before c, which is unknown
    assert data.test.x.tolist() == [[0, 0, 0, 0, -1]]
    whole = from_texts(["B b a! c", "b A", "c c c d"], [0, 1, 0], test=HELD)
    assert whole.test.x.tolist() == [[4, 4, 4, 0, -1]]
    assert whole.test.words == whole.test.sample(1).words == 5


@pytest.mark.parametrize(("tokenizer", "found", "words"), [
    ("bytes", [[195, 164, 98], [97, -1, -1]], 256), ("characters", [[3, 2], [1, -1]], 4), ("words", [[2], [1]], 3),
])  # fmt: skip
def test_tokenizers(tokenizer: str, found: list[list[int]], words: int):
    """ä is two bytes; of what is equally frequent the first in order comes first."""
    data = from_texts(["äb", "a", "a"], [0, 1, 0], test=HELD, tokenizer=tokenizer)
    assert (data.train.x[:, : len(found[0])].tolist(), data.train.words) == (found, words)


def test_a_text_without_any_word_is_unknown_and_one_too_long_is_cut_off():
    data = from_texts(["", "a b c d e", "- -"], [0, 1, 0], test=HELD, length=3)
    assert (data.train.x.tolist(), data.test.x[0, 0]) == ([[0, -1, -1], [1, 2, 3]], 0)
    numbers = from_texts([[3, 2, 1], [1]], [0, 1], test=([[0, 4]], [1]), length=2)
    assert numbers.train.x.tolist() == [[3, 2], [1, -1]]
    assert (numbers.test.words, numbers.test.classes) == (5, 2)


def test_without_labels_a_long_text_is_read_in_windows_that_lose_no_pair():
    texts = [[*range(7)], [3, 4], [5, 6, 0], [1, 2, 3, 4]]
    data = from_texts(texts, client=["u", "v", "u", "w"], test=([[6, 5, 4, 3]],), length=3)
    x = data.population.data["x"]  # pyright: ignore[reportAttributeAccessIssue]
    assert x.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [3, 4, -1, -1], [5, 6, 0, -1], [1, 2, 3, 4]]
    assert (data.population.num_examples(torch.arange(3)).tolist(), data.test.x.tolist()) == ([3, 1, 1], [[6, 5, 4, 3]])
    assert (data.test.words, data.test.classes) == (7, 7)
    longest = from_texts(texts, test=([[6, 5]],))
    assert longest.train.x.shape == (4, 7)


def test_a_data_frame_of_texts_is_the_same_as_its_columns():
    texts, labels, who = ["a b", "b", "c a a", "b b"], [0, 1, 1, 0], ["u", "v", "u", "v"]
    df = pd.DataFrame(
        {"said": texts, "mood": labels, "who": who, "held": [False, False, True, False], "at": 3 * [0] + [1]}
    )
    plain = from_texts(texts, labels, test=df["held"].to_numpy())
    framed = from_dataframe(df, text="said", label="mood", test="held")
    assert (framed.train.x.tolist(), framed.test.y.tolist()) == (plain.train.x.tolist(), [1])
    apart = from_dataframe(df[:2], text="said", label="mood", client="who", test=df[2:], length=2)
    assert apart.test.x.tolist() == [[0, 2], [1, 1]]
    foretold = from_dataframe(df.drop(index=1), text="said", label=None, tokenizer="bytes", test=0.3)
    assert foretold.test.classes == 256


def test_tweets_as_tokens(tmp_path: Path):
    tweet = lambda text: ["1", "Mon", "NO_QUERY", "someone", text, "training"]  # noqa: E731
    train = {"u": ([tweet("Good good day"), tweet("bad")], [1, 0]), "v": ([tweet("good day, day")], [1])}
    source = SOURCES["leaf"]
    at = leaf(tmp_path / "s", train, {"w": ([tweet("day of good good")], [1])})
    read = lambda **more: source.build(source.options(path=str(at), **more))  # noqa: E731
    parts = read(tokenizer="words", length=3)
    data = put_together("leaf", parts)
    assert isinstance(data, FederatedDataset)
    assert parts.train.x.tolist() == [[2, 2, 1], [4, -1, -1], [2, 1, 3]]  # day and good are as frequent
    assert (data.test.x.tolist(), data.test.words) == ([[1, 0, 2]], 5)
    assert (read(tokenizer="words", words=3).words, read(tokenizer="bytes").words) == (3, 256)
    more = put_together("leaf", parts._replace(words=6))
    assert population._digest(more) != population._digest(data)
    assert keep.write(parts, tmp_path / "kept").words == 5
    tells(lambda: read(length=3), "length: is 3, and there is no tokenizer", DataError)
    numbers = leaf(tmp_path / "n", {"u": ([[1.0]], [0])}, {"u": ([[1.0]], [0])})
    tells(lambda: source.build(source.options(path=str(numbers), tokenizer="bytes")), "are no tweets", DataError)


def test_a_column_of_hugging_faces():
    datasets = pytest.importorskip("datasets")
    told = {"text": ["a b", "b", "c a a", "b b"], "label": [0, 1, 1, 0], "who": ["u", "v", "u", "v"]}
    both = datasets.DatasetDict({"train": datasets.Dataset.from_dict(told), "test": datasets.Dataset.from_dict(told)})
    data = from_hf(both, client="who", text="text", length=2)
    assert isinstance(data, FederatedDataset)
    assert data.test.x.tolist() == [[2, 1], [1, -1], [3, 2], [1, 1]]
    foretold = from_hf(both["train"].select([0, 2, 3]), text="text", label=None, tokenizer="characters", test=0.4)
    assert foretold.test.classes == foretold.test.words
    tells(lambda: from_hf(both, tokenizer="bytes"), "tokenizer: is 'bytes', and no column is text", DataError)
    tells(lambda: from_hf(both, text="txt"), "no column 'txt': choose text among text, label, who", DataError)


def saved(folder: Path, start: str = "[CLS]") -> Path:
    """A tokenizer of Hugging Face's that puts marks around a text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "a": 4, "b": 5}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    made.post_processor = processors.TemplateProcessing(f"{start} $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])  # pyright: ignore
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.mark.extras("transformers")
def test_a_tokenizer_of_hugging_faces_in_a_folder(tmp_path: Path):
    name = f"transformers:{saved(tmp_path / 'made')}"
    data = from_texts(["a b b a", "c", "b"], [0, 1, 0], test=HELD, tokenizer=name, length=4)
    assert data.train.x.tolist() == [[1, 4, 5, 2], [1, 3, 2, -1]]  # cut off, it still ends as it should
    assert data.train.words == 6
    known = data.names.vocabulary
    assert known.encode(["a b b a", "c"]).tokens.tolist() == [[1, 4, 5, 2], [1, 3, 2, 0]]
    assert known.digest == from_texts(["b"] * 3, [0, 1, 0], test=HELD, tokenizer=name).names.vocabulary.digest  # pyright: ignore
    (tmp_path / "vocabulary.json").write_text(known.dumped())
    kept = from_texts(["a", "c", "b"], [0, 1, 0], test=HELD, tokenizer=f"vocabulary:{tmp_path}")
    assert kept.test.x.tolist() == [[1, 5, 2]]
    saved(tmp_path / "made", start="[SEP]")
    for again in (
        lambda: known.encode(["a"]),
        lambda: from_texts(["a"] * 3, [0, 1, 0], test=HELD, tokenizer=f"vocabulary:{tmp_path}"),
    ):
        with pytest.raises(DataError, match=r"made: it is another tokenizer by now \(\w{12}, not \w{12}\): bring back"):
            again()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty', of which transformers reads none"):
        from_texts(["a"] * 3, [0, 1, 0], test=HELD, tokenizer=f"transformers:{tmp_path / 'empty'}")


def test_a_tokenizer_that_is_not_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DataError, match="and nowhere is no folder: give the folder that a tokenizer was saved to"):
        from_texts(["a"] * 3, [0, 1, 0], test=HELD, tokenizer="transformers:nowhere")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("fedfleet.datasets.vocabulary.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"transformers is not installed: pip install 'fedfleet\[transformers\]'"):
        from_texts(["a"] * 3, [0, 1, 0], test=HELD, tokenizer=f"transformers:{tmp_path}")


def test_what_cannot_be_used_is_said(subtests):
    def call(row):
        texts, given = row
        from_texts(texts, **{"y": [0, 1, 0], "test": HELD[: len(texts)], **given})

    rows = [
        ((["a", "b", "c"], {"tokenizer": "wrds"}), "tokenizer: is 'wrds'"),
        ((["a", "b", "c"], {"tokenizer": {"a": 1}}),
         "tokenizer: is a dict, and a run names what it read: keep it by its save_pretrained(PATH), and give transf"),
        ((["a", "b", "c"], {"tokenizer": "bytes", "words": 3}), "words: is 3, and bytes has a vocabulary of its own"),
        ((["a", "b", "c"], {"length": 0}), "length: is 0: give a whole number from 1"),
        ((["a", "b", "c"], {"words": True}), "words: is True: give a whole number from 2"),
        ((["a", [1], "c"], {}), "texts, row 0: is neither text nor a list of token numbers"),
        ((["a", None, "c"], {}), "texts, row 1: is missing"), ((["a", "b", math.nan], {}), "texts, row 2: is missing"),
        (([[1], [1], [2]], {"tokenizer": "bytes"}), "tokenizer: is 'bytes', and not all rows are text"),
        (([[1], [0, -1], [2]], {}), "texts, row 1: has a token -1: number tokens from 0"),
        (([[1], [0], [0, 7]], {"words": 5}), "texts, row 2: has a token 7: number tokens from 0 to 4"),
        (([[1], [], [2]], {}), "texts, row 1: has 0 tokens"),
        ((["", "b", "c"], {"tokenizer": "bytes"}), "texts, row 0: has 0 tokens"),
        (([[1, 2], [1, 2], [2]], {"y": None}), "texts, row 2: has 1 token and none to foresee"),
        (([[1, 2], [1, 2]], {"y": None, "test": ([[1, 2], [2]],)}),
         "test texts, row 1: has 1 token and none to foresee"),
        ((["a", "b", "c"], {"y": None, "classes": 2}), "classes: is 2, and there are no labels"),
        ((["a", "b", "c"], {"test": (["a"],)}), "test: has 1 entries: give (texts, y)"),
        (([], {"y": [], "test": 0.5}), "texts: there are none"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)


def test_tokens_come_first(subtests):
    rows = [
        (torch.tensor([[1, -1, 2]]), "does not begin with its tokens"),
        (torch.tensor([[-1, -1]]), "does not begin with its tokens"), (torch.tensor([[1, 3]]), "below words=3"),
        (torch.zeros(1, 2), "below words=3"),
    ]  # fmt: skip
    all_say(subtests, lambda x: Examples(x, torch.zeros(1, dtype=torch.int64), 2, words=3), rows, ValueError)
