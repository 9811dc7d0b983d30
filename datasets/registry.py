"""The data sets by name: a new one is a file with a loader, and a line here. Beside them: partitions, domains, traces of devices.

The folder is no package, or it would hide Hugging Face's ``datasets``; so what it says of itself stands here.

May import: simulator, simulator.arithmetic, simulator.fleet.online.
"""

import difflib
from collections.abc import Callable, Mapping
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

# A loader takes the data directory; one of `Photographs` their side, too. `emnist` is short for the balanced split, the one most
# papers report.
LOADERS: Mapping[str, Callable[..., Dataset]] = {
    "digits": digits.load,
    **{f"digits_to_{target}": partial(digits_shifted.load, target=target) for target in digits_shifted.SOURCES},
    **GREY,
    "emnist": mnist.load_emnist,
    **{f"emnist_{split}": partial(mnist.load_emnist, split=split) for split in mnist.EMNIST_SPLITS},
    "adult": adult.load,
    "small_texts": text.load_small_texts,
    "cornell_ptb": text.load_cornell_ptb,
    "cifar10": cifar.load_cifar10,
    "cifar100": cifar.load_cifar100,
    "celeba": celeba.load_celeba,
    "celeba_blond": celeba.load_blond,
    "svhn": svhn.load_svhn,
    "usps": usps.load_usps,
    "domains_digits": domains_digits.load,
    "rect4": rect4.load,
    "mnist_shifts": shifts.load_mnist_shifts,
    "fashion_mnist_shifts": shifts.load_fashion_mnist_shifts,
    "digit_five": digit_five.load_digit_five,
    "mnistm": mnistm.load_mnistm,
    "mnistm_unpaired": partial(mnistm.load_mnistm, paired=False),
    **{f"rotated_{of}": partial(environments.load_rotated, of=load) for of, load in GREY.items()},
    **{f"coloured_{of}": partial(environments.load_coloured, of=load) for of, load in GREY.items()},
    **{name: partial(folders.load, name=name) for name in folders.SETS},
}
OPTIONS: Mapping[str, type[Published]] = {
    **dict.fromkeys(LOADERS, Published),
    **dict.fromkeys(folders.SETS, Photographs),
}


ABOUT: Mapping[str, str] = {
    "digits": "1,797 scanned digits of 8 x 8, scikit-learn's: comes along",
    **{
        f"digits_to_{target}": f"digits, {', '.join(sources)} with labels, {target} without: comes along"
        for target, sources in digits_shifted.SOURCES.items()
    },
    "mnist": "70,000 grey digits of 28 x 28",
    "fashion_mnist": "70,000 grey clothes of 28 x 28, 10 classes",
    "emnist": "131,600 grey letters and digits of 28 x 28, 47 classes: emnist_balanced",
    **{f"emnist_{split}": f"EMNIST's split {split}, 28 x 28" for split in mnist.EMNIST_SPLITS},
    "adult": "48,842 people of a census, more than 50K or not, by domains",
    "small_texts": "words of a document and of conversation, two domains",
    "cornell_ptb": "words of the Penn Treebank and of Cornell's movie lines, two domains",
    "cifar10": "60,000 photographs of 32 x 32, 10 classes",
    "cifar100": "60,000 photographs of 32 x 32, 100 classes",
    "celeba": "182,732 faces of 64 x 64, by person",
    "celeba_blond": "182,732 faces of 64 x 64, blond or not",
    "svhn": "99,289 house numbers' digits of 32 x 32, in colour",
    "usps": "9,298 grey digits of 16 x 16",
    "domains_digits": "26,612 digits of five origins, 32 x 32",
    "rect4": "points of a plane in four domains: comes along",
    "mnist_shifts": "MNIST under six shifts, 28 x 28",
    "fashion_mnist_shifts": "Fashion-MNIST under six shifts, 28 x 28",
    "digit_five": "145,298 digits of five origins, 32 x 32",
    "mnistm": "MNIST, and MNIST-M: the same digits on photographs, 28 x 28",
    "mnistm_unpaired": "mnistm, whose halves are of different digits",
    **{f"rotated_{of}": f"{of} turned by six angles, a domain each" for of in GREY},
    **{f"coloured_{of}": f"{of} in two colours that go with the label, by domain" for of in GREY},
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
    clients: int | None
    seed: int


Load = Callable[[Any, Asked], Dataset | FederatedDataset]
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


def _published(name: str) -> Entry[Load]:
    return Entry(OPTIONS[name], lambda options, asked: load(name, asked.folder, options), ABOUT[name])


def _read(name: str) -> Entry[Load]:
    options, read, about = SOURCES[name]
    return Entry(options, lambda given, asked: put_together(name, read(given)), about)


DATASETS = Registry(
    "dataset",
    {**{name: _published(name) for name in LOADERS}, **FEDERATED, **{name: _read(name) for name in SOURCES}},
    key="name",
    default="digits",
    group="fedfleet.datasets",
    by_path=DataByPath,
    given=("data", "population"),
)


def load(name: str, folder: Path, options: Published | None = None) -> Dataset:
    """Return what `options` leave of the data set `name` from the data directory `folder`.

    Raises DataError for an unknown name, with the nearest known one, and for files that are missing or broken.
    """
    if name not in LOADERS:
        nearest = difflib.get_close_matches(name, LOADERS, n=1)
        hint = f"did you mean {nearest[0]!r}? Known: " if nearest else "use one of "
        raise DataError(f"unknown data set {name!r}: {hint}{', '.join(LOADERS)}")
    options = OPTIONS[name]() if options is None else options
    side = {"side": options.side} if isinstance(options, Photographs) else {}
    return chosen(LOADERS[name](folder, **side), options)
