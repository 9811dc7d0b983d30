"""Data in the HDF5 layout of TensorFlow Federated: `examples/<client>/<field>`, an array a field, a row an example.

As `fed_emnist_train.h5`, `fed_emnist_test.h5` and `fed_cifar100_*.h5` of its simulation data sets are. Files are read by h5py.
Links, and data that lie in another file, are refused: a file that was sent says what is in it, and no more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator

from fedfleet.datasets import user_data
from fedfleet.datasets.files import DataError
from fedfleet.datasets.parts import Parts, split
from fedfleet.datasets.texts import Reading, check_reading, tokenised
from fedfleet.datasets.user_data import Held, Rows, fail
from fedfleet.simulator.errors import one_line
from fedfleet.simulator.registry import Options

FEATURES, LABELS = ("pixels", "image", "x"), ("label", "y", "target")
TEXTS = ("snippets", "tokens")


class TffOptions(Options):
    """Data in the HDF5 layout of TensorFlow Federated."""

    path: str
    """HDF5 file of the clients."""
    test: Held | None = None
    """HDF5 file of test examples; if not given, those of a share of the clients are, ``hold_out``."""
    hold_out: float = Field(default=0.1, gt=0, lt=1)
    """Without ``test``: the share of clients, a fixed draw, whose examples are the test examples."""
    features: str | None = None
    """Field of the examples; pixels, image or x if not given."""
    label: str | None = None
    """Field of the labels; label, y or target if not given, of texts none."""
    target: str | None = None
    """Instead, for ``task.name=module``: field of numbers to be foreseen."""
    classes: int | None = Field(default=None, ge=1)
    """Labels are below it; one more than the largest, if not given."""
    text: str | None = None
    """Field of texts, instead of features; snippets or tokens if they are there, and neither pixels nor image nor x."""
    tokenizer: str | None = None
    """Of texts: bytes, characters, words (if not given), vocabulary:PATH of an earlier run, or transformers:PATH, a folder."""
    length: int | None = Field(default=None, ge=1)
    """Of texts: tokens at which one is cut off; without labels, tokens read at once. That of the longest if not given."""
    words: int | None = Field(default=None, ge=2)
    """Of texts: tokens at most of a vocabulary of words or characters, 10,000 if not given."""
    sha256: str | None = None
    """Digest of what was read; a run says here what it was."""

    @model_validator(mode="after")
    def _one_aim(self) -> TffOptions:
        user_data.check_aim(self.label, self.target)
        return self


def read(options: TffOptions) -> Parts:
    """Return the examples of a file. Raises DataError."""
    classes, texts = user_data.check_classes(options.classes, options.target), list[str]()
    train = _rows(Path(options.path).expanduser(), options, texts, clients=True)
    test = None if options.test is None else _rows(Path(options.test).expanduser(), options, texts, clients=False)
    if test is not None and (len(texts) > 0) != (len(texts) == len(train.y) + len(test.y)):
        fail(test.where, f"only one of it and {train.where} has texts", "name the same field of both")
    text, how = "text" if texts else None, Reading(options.tokenizer, options.length, options.words)
    aim = options.target if options.label is None else options.label
    check_reading(how, options.text or text, aim if text else "y", options.features, classes)
    parts = split(train, options.hold_out if test is None else test, classes)
    return tokenised(parts, texts, how, foretell=aim is None, drop_short=True) if texts else parts


def _rows(path: Path, options: TffOptions, texts: list[str], *, clients: bool) -> Rows:
    """Return checked rows; of texts, which are added to ``texts``, x are their numbers (n, 1)."""
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path}: HDF5 is read by h5py, which is not installed: pip install h5py") from None
    if not path.exists():
        fail(f"{path}", "there is no such file", "give the path of one")
    try:
        with h5py.File(path, "r") as file:
            names, xs, ys = _fields(f"{path}", h5py, file, options)
    except DataError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, UnicodeDecodeError) as e:
        fail(f"{path}", f"is not readable as HDF5 ({one_line(e)})", "fetch it again")
    if len({array.dtype == object for array in xs}) > 1:
        fail(f"{path}", "some clients have texts, and others numbers", "name the field as text, or as features")
    for what, arrays in (("examples", xs), ("labels" if options.target is None else "targets", ys)):
        first = arrays[0].shape[1:]
        for name, array in zip(names, arrays, strict=True):
            if (shape := array.shape[1:]) != first:
                fail(f"{path}: client {name!r}", f"{what} are of shape {shape}, and the first's of {first}", "mend it")
    x = np.concatenate(xs)
    if x.dtype == object:
        texts += x.tolist()
        x = np.arange(len(texts) - len(x), len(texts))[:, None]
    elif x.ndim == 3:  # grey images without an axis of channels
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in user_data.CHANNELS and x.shape[1] not in user_data.CHANNELS:
        x = x.transpose(0, 3, 1, 2)
    owner = np.repeat(np.arange(len(xs)), [len(part) for part in xs])
    count = len(x)
    client = user_data.Codes(torch.from_numpy(owner), tuple(names)) if clients else None
    result = np.concatenate(ys)
    if options.target is None:
        y = user_data.labels(result, f"{path}: labels", options.classes, count)
    else:
        y = user_data.targets(result, f"{path}: {options.target}", count)
    return Rows(f"{path}", user_data.inputs(x, f"{path}: examples"), y, client)


def _fields(
    where: str, h5py: Any, file: Any, options: TffOptions
) -> tuple[list[str], list[np.ndarray], list[np.ndarray]]:
    """Return the clients' names in their order, and of each x (n, ...) and y (n,); clients without examples are left out."""
    groups = _member(where, h5py, file, "examples", "give a file in the layout examples/<client>/<field>")
    if not isinstance(groups, h5py.Group):
        fail(where, "'examples' is no group", "give a file in the layout examples/<client>/<field>")
    names, xs, ys = [], [], []
    fields: dict[bool, tuple[str, str]] = {}  # of texts, and of others
    for name in sorted(groups):
        client = _member(where, h5py, groups, name, "fetch it again")
        there = sorted(client) if isinstance(client, h5py.Group) else []
        text = options.text or (_text(where, there) if options.features is None else None)
        if text is None:
            field = _field(where, there, options.features, FEATURES, "features")
        else:
            field = _field(where, there, text, (), "text")
        x = _array(where, h5py, client, field, text=text is not None)
        aim = _aim(where, there, options, of_text=text is not None)
        mine, first = (field, aim), fields.setdefault(text is not None, (field, aim))
        for result, before in zip(mine, first, strict=True):
            if result != before:
                told = [f"the field {one}" if one else "no labels" for one in (result, before)]
                fail(f"{where}: client {name!r}", f"has {told[0]}, and others {told[1]}", "mend it")
        y = _array(where, h5py, client, aim) if aim else np.zeros(len(x), dtype=np.int64)
        what = "labels" if options.target is None else "targets"
        if len(x) != len(y):
            fail(f"{where}: client {name!r}", f"has {len(x)} examples and {len(y)} {what}", "fetch it again")
        if len(x):
            names.append(name)
            xs.append(x)
            ys.append(y)
    if not names:
        fail(where, "holds no examples", "give a file with some")
    return names, xs, ys


def _aim(where: str, there: list[str], options: TffOptions, *, of_text: bool) -> str:
    """Return the field of targets or labels; nothing for texts without."""
    if options.target is not None:
        return _field(where, there, options.target, (), "target")
    if of_text and options.label is None:
        return ""
    return _field(where, there, options.label, LABELS, "label")


def _text(where: str, there: list[str]) -> str | None:
    """Return the field of texts, where there are some and no other examples."""
    result = [name for name in TEXTS if name in there]
    if len(result) > 1 and not {*there} & {*FEATURES}:
        fail(where, f"a client has the fields {' and '.join(result)}", "set population.dataset.text to one of them")
    return None if {*there} & {*FEATURES} or not result else result[0]


def _field(where: str, there: list[str], asked: str | None, known: tuple[str, ...], option: str) -> str:
    result = [name for name in ((asked,) if asked else known) if name in there]
    fix = f"set population.dataset.{option} to one of {', '.join(result or there) or 'none'}"
    if not result:
        fail(where, f"a client has no field {asked or ' or '.join(known)}", fix)
    if len(result) > 1:
        fail(where, f"a client has the fields {' and '.join(result)}", fix)
    return result[0]


def _member(where: str, h5py: Any, group: Any, name: str, fix: str) -> Any:
    link = group.get(name, getlink=True)
    if link is None:
        fail(where, f"has no {name!r}", fix)
    if not isinstance(link, h5py.HardLink):
        fail(where, f"{name!r} is a link", "give a file that holds its data itself")
    return group[name]


def _array(where: str, h5py: Any, client: Any, field: str, *, text: bool = False) -> np.ndarray:
    """Return numbers (n, ...), or texts (n,) as objects."""
    result = _member(where, h5py, client, field, "fetch it again")
    if not isinstance(result, h5py.Dataset):
        fail(where, f"{field!r} is no array", "fetch it again")
    if result.external or result.is_virtual:
        fail(where, f"{field!r} lies in another file", "give a file that holds its data itself")
    if text:
        if result.ndim != 1 or h5py.check_string_dtype(result.dtype) is None:
            fail(where, f"{field!r} is {result.dtype} of shape {result.shape}, no texts", "name another field as text")
        return result.asstr()[()].astype(object)
    if result.ndim == 0 or result.dtype.kind not in user_data.KINDS:
        fail(where, f"{field!r} is {result.dtype}, no numbers", "name another field, or this one as text")
    return result[()]
