"""Data sets of Hugging Face's `datasets` library, in memory, in a local folder, or by their name on the hub.

The library (4 or newer, which runs no script of a data set) is imported when it is asked for. Images are decoded here, from their
bytes, and as JPEG or PNG alone.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from pydantic import Field, model_validator

from fedfleet.datasets import arrays, user_data
from fedfleet.datasets.examples import Dataset, FederatedDataset
from fedfleet.datasets.files import DataError
from fedfleet.datasets.image_folder import MODES, read_images
from fedfleet.datasets.parts import Parts, put_together, split
from fedfleet.datasets.texts import Reading, check_reading, tokenised
from fedfleet.datasets.user_data import Held, Rows, fail
from fedfleet.simulator.errors import one_line
from fedfleet.simulator.registry import Options

PATIENCE_S = 5.0
"""Seconds in which the hub has to answer."""
LABEL = user_data.Unsaid("label")


class HuggingFaceOptions(Options):
    """A data set of Hugging Face's library."""

    path: str
    """Folder that ``save_to_disk`` wrote, or of files of data; else the name of a data set on the hub."""
    subset: str | None = None
    """Configuration of a data set on the hub, or of a folder of files, that has several."""
    client: str | None = None
    """Column that says which client holds a row; ``population.partition`` deals them if not given."""
    label: str | None = "label"
    """Column of integer labels from 0; of texts null, for ``task=language_model``."""
    target: str | list[str] | None = Field(default=None, min_length=1)
    """Instead, for ``task.name=module``: the column, or columns, of numbers to be foreseen."""
    features: list[str] | None = Field(default=None, min_length=1)
    """Columns that make an example, or one of images or of lists; all others if not given."""
    text: str | None = None
    """Instead of features, the column of texts, or of lists of token numbers, of several lengths."""
    tokenizer: str | None = None
    """Of texts: bytes, characters, words (if not given), vocabulary:PATH of an earlier run, or transformers:PATH, a folder."""
    length: int | None = Field(default=None, ge=1)
    """Of texts: tokens at which one is cut off; without labels, tokens read at once. That of the longest if not given."""
    words: int | None = Field(default=None, ge=2)
    """Of texts: tokens at most of a vocabulary of words or characters, 10,000 if not given."""
    domain: str | None = None
    """Column that says the domain."""
    train: str = "train"
    """Split of training examples."""
    test: Held = "test"
    """Split of test examples; where there is none, ``hold_out``."""
    hold_out: float = Field(default=0.1, gt=0, lt=1)
    """Without a split of test examples: the share, of clients if there are any, of examples else, that are tested on."""
    side: int | None = Field(default=None, ge=1)
    """Of images: pixels that both sides are resized to."""
    channels: int = Field(default=3, ge=1, le=3)
    """Of images: 3, or 1 for grey."""
    classes: int | None = Field(default=None, ge=1)
    """Labels are below it; one more than the largest, if not given."""
    sha256: str | None = None
    """Digest of what was read; a run says here what it was."""

    @model_validator(mode="before")
    @classmethod
    def _one_aim(cls, asked: Any) -> Any:
        if not isinstance(asked, dict) or asked.get("target") is None:
            return asked
        user_data.check_aim(asked.get("label"), asked["target"])
        return {**asked, "label": None}


def from_hf(
    dataset: Any,
    *,
    client: str | None = None,
    label: str | None = LABEL,
    target: str | Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    text: str | None = None,
    tokenizer: str | None = None,
    length: int | None = None,
    words: int | None = None,
    domain: str | None = None,
    test: Any = None,
    side: int | None = None,
    channels: int = 3,
    classes: int | None = None,
    name: str = "hf",
) -> Dataset | FederatedDataset:
    """Return a data set of Hugging Face's library as data for ``fedfleet.run(data=…)``.

    Args:
        dataset: a ``datasets.Dataset``, or a ``DatasetDict`` with the splits "train" and, maybe, "test".
        client, label, target, features, text, tokenizer, length, words, domain, classes, name: as in `from_dataframe`; a single
            feature may be images or lists.
        test: another ``Dataset``, or a share as in `from_arrays`; the split "test", else 0.1, if not given.
        side, channels: of images, as in `from_image_folder`.

    Raises DataError, a ValueError of one line.

    """
    train, there = dataset, test
    if isinstance(dataset, Mapping):
        if "train" not in dataset:
            fail("dataset", f"has the splits {', '.join(map(str, dataset))}", "give one of them, or call one 'train'")
        train = dataset["train"]
        there = dataset.get("test") if test is None else test
    for where, one in {"dataset": train, "test": there}.items():
        if not (hasattr(one, "column_names") and hasattr(one, "features") and hasattr(one, "to_pandas")):
            if where == "dataset":
                fail(where, f"is a {type(one).__name__}", "give a datasets.Dataset, or a DatasetDict of them")
            if one is not None and not isinstance(one, int | float):
                fail(where, f"is a {type(one).__name__}", "give a share, or a datasets.Dataset")
    share = 0.1 if there is None else there
    if isinstance(features, str):
        fail("features", f"is {features!r}", "give a list of columns")
    user_data.check_aim(label, target)
    asked = HuggingFaceOptions.model_construct(
        client=client,
        label=label if target is None else None,
        target=target,
        features=features,
        domain=domain,
        side=side,
        channels=channels,
        classes=classes,
        **{"text": text, "tokenizer": tokenizer, "length": length, "words": words},
    )
    return put_together(name, _parts(train, share, asked))


def read(options: HuggingFaceOptions) -> Parts:
    """Return what a data set of the library holds. Raises DataError."""
    result = _loaded(options)
    splits = result if isinstance(result, Mapping) else {options.train: result}
    if options.train not in splits:
        fix = f"set population.dataset.train to one of {', '.join(map(str, splits))}"
        fail(options.path, f"there is no split {options.train!r}", fix)
    unsaid = options.train == options.test and "test" not in options.model_fields_set
    held = options.hold_out if unsaid else splits.get(options.test, options.hold_out)
    return _parts(splits[options.train], held, options)


def _loaded(options: HuggingFaceOptions) -> Any:
    path = Path(options.path).expanduser()
    from_hub = not path.is_dir()
    try:
        import huggingface_hub

        import datasets
    except ImportError:
        raise DataError(
            f"{path}: it is read by Hugging Face's datasets, which is not installed: pip install datasets"
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        fail(
            f"{path}",
            f"datasets {datasets.__version__} may run a script that comes with data",
            "pip install 'datasets>=4'",
        )
    libraries: tuple[Any, ...] = (vars(datasets)["config"], huggingface_hub.constants)
    before = [library.HF_HUB_OFFLINE for library in libraries]
    if from_hub and not _reached():  # what has been downloaded is used, and nothing is tried again and again
        for library in libraries:
            library.HF_HUB_OFFLINE = True
    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return datasets.load_from_disk(str(path))
        return datasets.load_dataset(options.path if from_hub else str(path), options.subset)
    except Exception as e:  # of any of the formats that the library reads
        fix = "give a folder of save_to_disk or of files of data, or a name on the hub, where there is a network"
        fail(options.path, f"cannot be read ({type(e).__name__}: {one_line(e)[:200]})", fix)
    finally:
        for library, was in zip(libraries, before, strict=True):
            library.HF_HUB_OFFLINE = was


def _reached() -> bool:
    """Say whether the hub answers, or may behind a proxy."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.create_connection(
            (hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)), timeout=PATIENCE_S
        ).close()
    except OSError:
        return False
    return True


def _parts(train: Any, test: Any, options: HuggingFaceOptions) -> Parts:
    if options.channels not in MODES:
        fail("channels", f"is {options.channels}", "give 3, or 1 for grey")
    how = Reading(options.tokenizer, options.length, options.words)
    foretell = options.label is None and options.target is None
    check_reading(how, options.text, None if foretell else LABEL, options.features, options.classes)
    declared = _names(train, options.label if options.target is None else None)
    if declared and options.classes not in (None, len(declared)):
        fail("classes", f"is {options.classes}, and column {options.label!r} names {len(declared)}", "leave it out")
    classes = user_data.check_classes(options.classes, options.target)
    classes = len(declared) if classes is None and declared else classes
    rows = _rows("train", train, options, 0, clients=True)
    if isinstance(test, int | float):
        held = test
    else:
        held = _rows("test", test, options, len(train), clients=False)
        names = [declared, _names(test, options.label)]
        if all(names) and names[0] != names[1]:
            fix = "give both the same names in the same order, as by cast_column"
            fail(f"test: column {options.label!r}", "its labels are called otherwise than those of train", fix)
    parts = split(rows, held, classes)
    parts = parts.called(classes=declared or parts.names.classes)
    if options.text is None:
        return parts.called(features=user_data.feature_names(_features(train, options), rows.x))
    sides = (train,) if isinstance(test, int | float) else (train, test)
    texts = [text for side in sides for text in side.with_format(None)[options.text]]
    return tokenised(parts, texts, how, foretell=foretell)


def _names(data: Any, column: str | None) -> tuple[str, ...]:
    """Return what the numbers of a column stand for, where the library knows it (a ClassLabel)."""
    return () if column is None else tuple(getattr(data.features.get(column), "names", None) or ())


def _features(data: Any, options: HuggingFaceOptions) -> list[str]:
    own = [options.client, *arrays.aims(options.label, options.target).values(), options.domain]
    return [c for c in data.column_names if c not in own] if options.features is None else [*options.features]


def _rows(where: str, data: Any, options: HuggingFaceOptions, first: int, *, clients: bool) -> Rows:
    """Return checked rows; of texts x are their numbers (n, 1) from ``first``."""
    plain = data.with_format(None)
    client = options.client if clients else None
    domain = options.domain if clients or options.domain in data.column_names else None
    own = {"client": client, **arrays.aims(options.label, options.target), "domain": domain}
    named = [column for column in own.values() if column is not None]
    features = _features(data, options)
    said = [c for c in dict.fromkeys(named) if c in data.column_names]
    about = plain.select_columns(said or data.column_names[:1]).to_pandas()
    arrays.check_frame(about, where)
    arrays.check_own(about, where, own, data.column_names)
    if options.text is not None and options.text not in data.column_names:
        fail(where, f"no column {options.text!r}", f"choose text among {', '.join(data.column_names)}")
    if missing := [c for c in features if c not in data.column_names]:
        fail(where, f"no column {missing[0]!r}", f"choose among {', '.join(data.column_names)}")
    if not features:
        fail(where, "no columns are left for features", "name some")
    if options.text is None:
        _check_kinds(plain, features, where)
    if options.text is None and options.features is None:
        user_data.check_left(where, features, LABEL, options.target)
    count = len(about)
    for column in {client, domain} - {None}:
        if names := _names(data, column):
            about[column] = [names[i] if 0 <= i < len(names) else None for i in about[column]]

    def at(column: Any) -> str:
        return f"{where}: column {column!r}"

    aims, names = _aims(about, options, at)
    return Rows(
        where,
        _examples(plain, features, options, at)
        if options.text is None
        else torch.arange(first, first + count)[:, None],
        aims,
        None if client is None else user_data.codes(about[client], at(client), "client", count),
        None if domain is None else user_data.codes(about[domain], at(domain), "domain", count, rising=True),
        names,
    )


def _aims(about: Any, options: HuggingFaceOptions, at: Any) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return labels (n,) and their names where they are text, targets (n, ...), or zeros where there are neither."""
    if options.target is not None:
        return arrays.targets(about, options.target, at), ()
    if options.label is None:
        return torch.zeros(len(about), dtype=torch.int64), ()
    return user_data.named_labels(about[options.label], at(options.label), options.classes, len(about))


def _check_kinds(plain: Any, features: list[str], where: str) -> None:
    """Refuse text, and lists or images beside other features. Raises DataError."""
    kinds = {name: plain.features[name] for name in features}
    texts = [name for name, kind in kinds.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
    whole = [name for name, kind in kinds.items() if type(kind).__name__ not in ("Value", "ClassLabel")]
    if whole and len(features) > 1:
        others = ", ".join(repr(name) for name in features if name != whole[0])
        fail(
            where,
            f"column {whole[0]!r} is of lists or images, which are an example alone, and there is {others}",
            f"give features=[{whole[0]!r}]",
        )
    if texts:
        fix = f"name it as text={texts[0]!r}, make it lists of integers by a tokeniser, or name features= without it"
        fail(f"{where}: column {texts[0]!r}", "is text, no numbers", fix)


def _examples(plain: Any, features: list[str], options: HuggingFaceOptions, at: Any) -> Any:
    kind = plain.features[features[0]]
    if len(features) == 1 and type(kind).__name__ == "Image":
        import datasets

        kept = plain.cast_column(features[0], datasets.Image(decode=False))
        files = [_file(row[features[0]], at(features[0]), i) for i, row in enumerate(kept.select_columns(features))]
        return read_images(files, options.side, options.channels)
    if len(features) == 1 and type(kind).__name__ != "Value":
        inner = kind
        while hasattr(inner, "feature"):
            inner = inner.feature
        rows = [row[features[0]] for row in plain.select_columns(features)]
        x = user_data.inputs(rows, at(features[0]))
        return x.to(torch.uint8) if getattr(inner, "dtype", None) == "uint8" else x
    return arrays.example_columns(plain.select_columns(features).to_pandas(), features, at)


def _file(image: Any, where: str, row: int) -> Path | io.BytesIO:
    if image is None:
        fail(f"{where}, row {row}", "has no image", "fill it in, or leave the row out")
    return io.BytesIO(image["bytes"]) if image["bytes"] is not None else Path(image["path"])
