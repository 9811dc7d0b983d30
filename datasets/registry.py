"""The data sets by name: a new one is a file with a loader, and a line here. Beside them: partitions, domains, traces of devices.

The folder is no package, or it would hide Hugging Face's ``datasets``; so what it says of itself stands here.

May import: files, simulator, simulator.arithmetic, simulator.fleet.online.
"""

import difflib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedfleet.datasets import (
    adult,
    celeba,
    cifar,
    digit_five,
    digits,
    digits_shifted,
    disk,
    domains_digits,
    environments,
    folders,
    mnist,
    mnistm,
    rect4,
    shifts,
    svhn,
    synthetic,
    text,
    usps,
)
from fedfleet.datasets.examples import Dataset, FederatedDataset
from fedfleet.datasets.files import DataError
from fedfleet.datasets.parts import put_together
from fedfleet.datasets.published import Photographs, Published, chosen
from fedfleet.datasets.sources import SOURCES
from fedfleet.simulator.registry import ByPath, Entry, Registry

GREY = {"mnist": mnist.load_mnist, "fashion_mnist": mnist.load_fashion_mnist}
PHOTOGRAPHS = {
    "office31": "4,110 photographs of 31 classes, three domains",
    "office_caltech10": "2,533 photographs of 10 classes, four domains",
    "pacs": "9,991 photographs and drawings of 7 classes, four domains",
    "vlcs": "10,729 photographs of 5 classes, four domains",
    "office_home": "15,588 photographs and drawings of 65 classes, four domains",
    "terra_incognita": "24,788 photographs of 10 classes of animals, four places",
}


class DataByPath(ByPath):
    """Data that are made by what is named as ``module:name``, or by a package that is installed."""

    sha256: str | None = None
    """Digest of the examples, and of who holds them; a run says here what they were."""


class Asked(NamedTuple):
    """What a data set may depend on besides its options.

    Attributes:
        folder: the data directory.
        clients: the number of clients asked for, or None; of data that come in clients.
        seed: what decides who they are.

    """

    folder: Path
    clients: int | None = None
    seed: int = 0


Load = Callable[[Any, Asked], Dataset | FederatedDataset]


def _published(read: Callable[..., Dataset], about: str, options: type[Published] = Published) -> Entry[Load]:
    """Return the row of a data set that is read from the data directory; photographs at a side that is asked for."""

    def load(given: Published, asked: Asked) -> Dataset:
        side = {"side": given.side} if isinstance(given, Photographs) else {}
        return chosen(read(asked.folder, **side), given)

    return Entry(options, load, about)


def _source(name: str) -> Entry[Load]:
    source = SOURCES[name]
    return Entry(source.options, lambda given, asked: put_together(name, source.build(given)), source.about)


# `emnist` is short for the balanced split, the one most papers report.
PUBLISHED: dict[str, Entry[Load]] = {
    "digits": _published(
        digits.load,
        "1,797 scanned digits of 8 x 8, scikit-learn's, tested on the last fifth of each class: comes along",
    ),
    **{
        f"digits_to_{target}": _published(
            partial(digits_shifted.load, target=target),
            f"digits, {', '.join(sources)} with labels, {target} without: comes along",
        )
        for target, sources in digits_shifted.SOURCES.items()
    },
    "mnist": _published(mnist.load_mnist, "70,000 grey digits of 28 x 28"),
    "fashion_mnist": _published(mnist.load_fashion_mnist, "70,000 grey clothes of 28 x 28, 10 classes"),
    "emnist": _published(mnist.load_emnist, "131,600 grey letters and digits of 28 x 28, 47 classes: emnist_balanced"),
    **{
        f"emnist_{split}": _published(partial(mnist.load_emnist, split=split), f"EMNIST's split {split}, 28 x 28")
        for split in mnist.EMNIST_SPLITS
    },
    "adult": _published(adult.load, "48,842 people of a census, more than 50K or not, by domains"),
    "small_texts": _published(text.load_small_texts, "words of a document and of conversation, two domains"),
    "cornell_ptb": _published(
        text.load_cornell_ptb, "words of the Penn Treebank and of Cornell's movie lines, two domains"
    ),
    "cifar10": _published(cifar.load_cifar10, "60,000 photographs of 32 x 32, 10 classes"),
    "cifar100": _published(cifar.load_cifar100, "60,000 photographs of 32 x 32, 100 classes"),
    "celeba": _published(celeba.load_celeba, "182,732 faces of 64 x 64, by person"),
    "celeba_blond": _published(celeba.load_blond, "182,732 faces of 64 x 64, blond or not"),
    "svhn": _published(svhn.load_svhn, "99,289 house numbers' digits of 32 x 32, in colour"),
    "usps": _published(usps.load_usps, "9,298 grey digits of 16 x 16"),
    "domains_digits": _published(domains_digits.load, "26,612 digits of five origins, 32 x 32"),
    "rect4": _published(rect4.load, "points of a plane in four domains: comes along"),
    "mnist_shifts": _published(shifts.load_mnist_shifts, "MNIST under six shifts, 28 x 28"),
    "fashion_mnist_shifts": _published(shifts.load_fashion_mnist_shifts, "Fashion-MNIST under six shifts, 28 x 28"),
    "digit_five": _published(digit_five.load_digit_five, "145,298 digits of five origins, 32 x 32"),
    "mnistm": _published(mnistm.load_mnistm, "MNIST, and MNIST-M: the same digits on photographs, 28 x 28"),
    "mnistm_unpaired": _published(
        partial(mnistm.load_mnistm, paired=False), "mnistm, whose halves are of different digits"
    ),
    **{
        f"rotated_{of}": _published(
            partial(environments.load_rotated, of=load), f"{of} turned by six angles, a domain each"
        )
        for of, load in GREY.items()
    },
    **{
        f"coloured_{of}": _published(
            partial(environments.load_coloured, of=load), f"{of} in two colours that go with the label, by domain"
        )
        for of, load in GREY.items()
    },
    **{name: _published(partial(folders.load, name=name), about, Photographs) for name, about in PHOTOGRAPHS.items()},
}
FEDERATED: dict[str, Entry[Load]] = {
    "synthetic": Entry(
        synthetic.SyntheticOptions,
        lambda options, asked: synthetic.load(options, asked.clients, asked.seed),
        "any number of clients, drawn when invited",
    ),
    "disk": Entry(
        disk.DiskOptions,
        lambda options, asked: disk.load(options, asked.clients, asked.seed),
        "clients of your own, from Parquet by `fedfleet convert`",
    ),
}
"""Data sets that come in clients."""
DATASETS = Registry(
    "dataset",
    {**PUBLISHED, **FEDERATED, **{name: _source(name) for name in SOURCES}},
    key="name",
    default="digits",
    group="fedfleet.datasets",
    by_path=DataByPath,
    given=("data", "population"),
)


def load(name: str, folder: Path, options: Published | None = None) -> Dataset:
    """Return what `options` leave of the published data set `name` from the data directory `folder`.

    Raises DataError for an unknown name, with the nearest known one, and for files that are missing or broken.
    """
    if name not in PUBLISHED:
        nearest = difflib.get_close_matches(name, PUBLISHED, n=1)
        hint = f"did you mean {nearest[0]!r}? Known: " if nearest else "use one of "
        raise DataError(f"unknown data set {name!r}: {hint}{', '.join(PUBLISHED)}")
    entry: Any = PUBLISHED[name]
    return entry.build(options or entry.options(), Asked(folder))
