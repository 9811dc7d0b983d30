"""What may be chosen of a data set as it was published: some of its classes, its labels as domains, its scale."""

from dataclasses import replace

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import DataError
from fedfleet.simulator.population import decode


class Published(BaseModel):
    """Options of every data set that comes as it was published."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    classes: list[int] | None = Field(default=None, min_length=2)
    """Keep the examples of these labels, which become 0, 1, ... in this order."""
    label_domains: bool = False
    """Let the label be the domain an example comes from."""
    hold_out: float = Field(default=0.0, ge=0, lt=1)
    """Test on this share of the training examples, drawn in each domain and left out of training, rather than on the test
    examples: to choose hyper-parameters by."""
    standardise: bool = False
    """Subtract from each number its mean, and divide it by its standard deviation + 0.001, both over all training examples of
    all classes, pixels counted from 0 to 255."""


def chosen(data: Dataset, options: Published) -> Dataset:
    """Return what the options leave of a data set. Raises DataError."""
    train, test = data.train, data.test
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
    names = data.domains
    if options.label_domains:
        train, test = replace(train, domain=train.y), replace(test, domain=test.y)
        names = tuple(map(str, options.classes or range(train.classes)))
    if options.hold_out:
        train, test = _held_out(train, options.hold_out)
    return Dataset(data.name, train, test, names)


def _held_out(examples: Examples, share: float) -> tuple[Examples, Examples]:
    """Split off a share of each domain, the same for every seed."""
    domain = torch.zeros_like(examples.y) if examples.domain is None else examples.domain
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    order = order[domain[order].argsort(stable=True)]
    counts = domain.bincount()
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    out = torch.zeros(len(order), dtype=torch.bool)
    out[order] = place < (share * counts).round().long().clamp(min=1).minimum(counts - 1)[domain[order]]
    return _rows(examples, ~out), _rows(examples, out)


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
