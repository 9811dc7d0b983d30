"""The data sets by name: a new one is a file with a loader, and a line here. Beside them: partitions, domains, traces of devices.

The folder is no package, or it would hide Hugging Face's ``datasets``; so what it says of itself stands here.

May import: simulator, simulator.arithmetic, simulator.fleet.online.
"""

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

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
from fedfleet.datasets.published import Photographs, Published, chosen
from fedfleet.datasets.sources import SOURCES

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


class Federated(NamedTuple):
    """A data set that comes in clients: its options, its loader, one line for `fedfleet list`.

    The loader takes the options, the number of clients asked for, or None, and the seed that decides who they are.
    """

    options: type[BaseModel]
    load: Callable[[Any, int | None, int], FederatedDataset]
    about: str


FEDERATED: Mapping[str, Federated] = {
    "synthetic": Federated(synthetic.SyntheticOptions, synthetic.load, "any number of clients, drawn when invited"),
    "disk": Federated(disk.DiskOptions, disk.load, "clients of your own, from Parquet by `fedfleet convert`"),
}


NAMES: Mapping[str, str] = dict.fromkeys(LOADERS, "") | {k: v.about for k, v in {**FEDERATED, **SOURCES}.items()}
"""Every data set that a configuration can name, and a line on those that say more than their name."""


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
