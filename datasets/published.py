"""Options of published data sets: some of the classes or domains, labels as domains, the scale of features."""

import difflib
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import DataError
from fedfleet.simulator.population import decode
from fedfleet.simulator.registry import Options


class Published(Options):
    """Options of every data set that comes as it was published."""

    classes: list[int] | None = Field(default=None, min_length=2)
    """Keep the examples of these labels, which become 0, 1, ... in this order."""
    label_domains: bool = False
    """Let the label be the domain an example comes from."""
    domain: str | None = None
    """Let the value in this column be the domain an example comes from; of ``adult``: workclass, education, marital-status,
    occupation, relationship, race, sex, native-country; of ``celeba_blond``: Male."""
    domains: list[str] | None = Field(default=None, min_length=1)
    """Keep the examples of these domains, which become 0, 1, ... in this order."""
    per_domain: int | None = Field(default=None, ge=1)
    """Keep so many training examples of each domain, at most, or of all if there are no domains: a draw, the same for every seed.
    Test examples are kept."""
    hold_out: float = Field(default=0.0, ge=0, lt=1)
    """Test on this share of the training examples, drawn in each domain and left out of training, rather than on the test
    examples: to choose hyper-parameters by."""
    standardise: bool = False
    """Subtract from each number its mean, and divide it by its standard deviation + 0.001, both over all training examples of
    all classes, pixels counted from 0 to 255."""


class Photographs(Published):
    """Options of photographs whose sizes differ."""

    side: int = Field(default=224, ge=1)
    """Pixels that each side is resized to."""


def chosen(data: Dataset, options: Published) -> Dataset:
    """Return what the options leave of a data set. Raises DataError."""
    if options.label_domains and options.domain is not None:
        raise DataError(
            f"population.dataset.domain={options.domain!r}: label_domains says the domains too: leave one of them out"
        )
    train, test, names = data.train, data.test, data.domains
    if options.domain is not None:
        train, test, names = _by_column(data, options.domain)
    if options.standardise:
        if train.x.dtype == torch.int64:
            raise DataError("population.dataset.standardise=True: words are no numbers: leave it out")
        train, test = _standardised(train, test)
    if options.classes is not None:
        unknown = [c for c in options.classes if not 0 <= c < train.classes]
        if unknown or len(set(options.classes)) < len(options.classes):
            raise DataError(
                f"population.dataset.classes={options.classes}: give different labels from 0 to {train.classes - 1}"
            )
        train, test = _of_classes(train, options.classes), _of_classes(test, options.classes)
    if options.label_domains:
        train, test = replace(train, domain=train.y), replace(test, domain=test.y)
        names = tuple(map(str, options.classes or range(train.classes)))
    if options.domains is not None:
        train, test, names = _of_domains(data.name, train, test, names, options.domains)
    train, test, names = _without_gaps(train, test, names)
    if options.per_domain is not None:
        train = _rows(train, _first(train, torch.full_like(_domain(train).bincount(), options.per_domain)))
    if options.hold_out:
        train, test = _held_out(train, options.hold_out)
    return Dataset(data.name, train, test, names)


def _by_column(data: Dataset, name: str) -> tuple[Examples, Examples, tuple[str, ...]]:
    """Return training and test examples with the values of a column as domains, and these values."""
    if name not in data.columns:
        known = f"choose one of {', '.join(data.columns)}" if data.columns else f"{data.name} has none: leave it out"
        raise DataError(f"population.dataset.domain={name!r}: no such column: {known}")
    names, train, test = data.columns[name]
    return replace(data.train, domain=train), replace(data.test, domain=test), names


def _without_gaps(
    train: Examples, test: Examples, names: tuple[str, ...]
) -> tuple[Examples, Examples, tuple[str, ...]]:
    """Number the domains of the training examples from 0 without a gap, in their order; refuse others in the test examples."""
    if train.domain is None or test.domain is None:
        return train, test, names
    there = train.domain.unique()
    if len(strange := test.domain[~torch.isin(test.domain, there)]):
        raise DataError(
            f"population.dataset: there are test examples of the domain {names[int(strange[0])]!r}, and none to train on: choose "
            f"other domains, or population.dataset.hold_out"
        )
    train = replace(train, domain=torch.searchsorted(there, train.domain))
    test = replace(test, domain=torch.searchsorted(there, test.domain))
    return train, test, tuple(names[i] for i in there) if names else ()


def _held_out(examples: Examples, share: float) -> tuple[Examples, Examples]:
    """Split off a share of each domain, the same for every seed."""
    counts = _domain(examples).bincount()
    out = _first(examples, (share * counts).round().long().clamp(min=1).minimum(counts - 1))
    return _rows(examples, ~out), _rows(examples, out)


def _first(examples: Examples, sizes: Tensor) -> Tensor:
    """Return which examples (n,) come first in a permutation, `sizes` (domains,) of each domain; the same for every seed."""
    domain = _domain(examples)
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    order = order[domain[order].argsort(stable=True)]
    counts = domain.bincount()
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    result = torch.zeros(len(order), dtype=torch.bool)
    result[order] = place < sizes[domain[order]]
    return result


def _domain(examples: Examples) -> Tensor:
    return torch.zeros_like(examples.y) if examples.domain is None else examples.domain


def _of_domains(
    name: str, train: Examples, test: Examples, names: tuple[str, ...], wanted: list[str]
) -> tuple[Examples, Examples, tuple[str, ...]]:
    """Return the training and the test examples of the domains `wanted`, in whose order they are numbered."""
    key = f"population.dataset.domains={wanted}"
    if train.domain is None or test.domain is None or not names:
        raise DataError(f"{key}: {name} has no domains: leave it out")
    for domain in wanted:
        if domain not in names:
            nearest = difflib.get_close_matches(domain, names, n=1)
            hint = f"did you mean {nearest[0]!r}? Known: " if nearest else "choose among "
            raise DataError(f"{key}: {name} has no domain {domain!r}: {hint}{', '.join(names)}")
    if len(set(wanted)) < len(wanted):
        raise DataError(f"{key}: a domain is there twice: give each once")
    new = torch.full((len(names),), -1, dtype=torch.int64)
    new[torch.tensor([names.index(domain) for domain in wanted])] = torch.arange(len(wanted))
    result = []
    for part in (train, test):
        kept = _rows(part, new[_domain(part)] >= 0)
        result.append(replace(kept, domain=new[_domain(kept)]))
    if missing := set(range(len(wanted))) - set(_domain(result[0]).tolist()):
        raise DataError(f"{key}: no training example is of the domain {wanted[min(missing)]!r}: leave it out")
    return result[0], result[1], tuple(wanted)


def _rows(examples: Examples, mask: Tensor) -> Examples:
    domain = None if examples.domain is None else examples.domain[mask]
    return Examples(examples.x[mask], examples.y[mask], examples.classes, domain)


def _of_classes(examples: Examples, classes: list[int]) -> Examples:
    new = torch.full((examples.classes,), -1, dtype=torch.int64)
    new[torch.tensor(classes)] = torch.arange(len(classes))
    kept = _rows(examples, new[examples.y] >= 0)
    return Examples(kept.x, new[kept.y], len(classes), kept.domain)


def _standardised(train: Examples, test: Examples) -> tuple[Examples, Examples]:
    raw = _pixels(train.x)
    mean, deviation = raw.mean(0), raw.std(0, correction=0) + 1e-3
    return tuple(replace(e, x=(_pixels(e.x) - mean) / deviation) for e in (train, test))  # pyright: ignore


def _pixels(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype == torch.uint8 else decode(x)
