"""Data in the HDF5 layout of TensorFlow Federated: `examples/<client>/<field>`, an array a field, a row an example.

As `fed_emnist_train.h5`, `fed_emnist_test.h5` and `fed_cifar100_*.h5` of its simulation data sets are. Files are read by h5py.
Links, and data that lie in another file, are refused: a file that was sent says what is in it, and no more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedfleet.datasets import given
from fedfleet.datasets.files import DataError
from fedfleet.datasets.given import Held, Parts, Rows, fail
from fedfleet.simulator.errors import one_line

FEATURES, LABELS = ("pixels", "image", "x"), ("label", "y", "target")


class TffOptions(BaseModel):
    """Data in the HDF5 layout of TensorFlow Federated."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    path: str
    """HDF5 file of the clients."""
    test: Held | None = None
    """HDF5 file of test examples; if not given, those of a share of the clients are, ``hold_out``."""
    hold_out: float = Field(default=0.1, gt=0, lt=1)
    """Without ``test``: the share of clients, a fixed draw, whose examples are the test examples."""
    features: str | None = None
    """Field of the examples; pixels, image or x if not given."""
    label: str | None = None
    """Field of the labels; label, y or target if not given."""
    target: str | None = None
    """Instead, for ``task.name=module``: field of numbers to be foreseen."""
    classes: int | None = Field(default=None, ge=1)
    """Labels are below it; one more than the largest, if not given."""
    sha256: str | None = None
    """Digest of what was read; a run says here what it was."""

    @model_validator(mode="after")
    def _one_aim(self) -> TffOptions:
        given.check_aim(self.label, self.target)
        return self


def read(options: TffOptions) -> Parts:
    """Return the examples of a file. Raises DataError."""
    classes = given.check_classes(options.classes, options.target)
    train = _rows(Path(options.path).expanduser(), options, clients=True)
    test = None if options.test is None else _rows(Path(options.test).expanduser(), options, clients=False)
    return given.split(train, options.hold_out if test is None else test, classes)


def _rows(path: Path, options: TffOptions, *, clients: bool) -> Rows:
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
    for what, arrays in (("examples", xs), ("labels" if options.target is None else "targets", ys)):
        first = arrays[0].shape[1:]
        for name, array in zip(names, arrays, strict=True):
            if (shape := array.shape[1:]) != first:
                fail(f"{path}: client {name!r}", f"{what} are of shape {shape}, and the first's of {first}", "mend it")
    x = np.concatenate(xs)
    if x.ndim == 3:  # grey images without an axis of channels
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in given.CHANNELS and x.shape[1] not in given.CHANNELS:
        x = x.transpose(0, 3, 1, 2)
    owner = np.repeat(np.arange(len(xs)), [len(part) for part in xs])
    count = len(x)
    client = given.Codes(torch.from_numpy(owner), tuple(names)) if clients else None
    found = np.concatenate(ys)
    if options.target is None:
        y = given.labels(found, f"{path}: labels", options.classes, count)
    else:
        y = given.targets(found, f"{path}: {options.target}", count)
    return Rows(f"{path}", given.inputs(x, f"{path}: examples"), y, client)


def _fields(
    where: str, h5py: Any, file: Any, options: TffOptions
) -> tuple[list[str], list[np.ndarray], list[np.ndarray]]:
    """Return the clients' names in their order, and of each x (n, ...) and y (n,); clients without examples are left out."""
    groups = _member(where, h5py, file, "examples", "give a file in the layout examples/<client>/<field>")
    if not isinstance(groups, h5py.Group):
        fail(where, "'examples' is no group", "give a file in the layout examples/<client>/<field>")
    names, xs, ys = [], [], []
    for name in sorted(groups):
        client = _member(where, h5py, groups, name, "fetch it again")
        there = sorted(client) if isinstance(client, h5py.Group) else []
        fields = [
            _field(where, there, asked, known, option)
            for asked, known, option in (
                (options.features, FEATURES, "features"),
                (options.label, LABELS, "label") if options.target is None else (options.target, (), "target"),
            )
        ]
        x, y = (_array(where, h5py, client, field) for field in fields)
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


def _field(where: str, there: list[str], asked: str | None, known: tuple[str, ...], option: str) -> str:
    found = [name for name in ((asked,) if asked else known) if name in there]
    if not found:
        mend = f"set population.dataset.{option} to one of {', '.join(there) or 'none'}"
        fail(where, f"a client has no field {asked or ' or '.join(known)}", mend)
    return found[0]


def _member(where: str, h5py: Any, group: Any, name: str, mend: str) -> Any:
    link = group.get(name, getlink=True)
    if link is None:
        fail(where, f"has no {name!r}", mend)
    if not isinstance(link, h5py.HardLink):
        fail(where, f"{name!r} is a link", "give a file that holds its data itself")
    return group[name]


def _array(where: str, h5py: Any, client: Any, field: str) -> np.ndarray:
    found = _member(where, h5py, client, field, "fetch it again")
    if not isinstance(found, h5py.Dataset):
        fail(where, f"{field!r} is no array", "fetch it again")
    if found.external or found.is_virtual:
        fail(where, f"{field!r} lies in another file", "give a file that holds its data itself")
    if found.ndim == 0 or found.dtype.kind not in given.KINDS:
        fail(where, f"{field!r} is {found.dtype}, no numbers", "name another field; text is not read from this layout")
    return found[()]
