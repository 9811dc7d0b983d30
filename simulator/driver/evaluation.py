"""Measure a model: on the server's splits in fixed chunks, and on every client's own data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.chunk import Chunk, run_chunk
from fedfleet.simulator.driver.label_free import label_free
from fedfleet.simulator.driver.records import numbers
from fedfleet.simulator.errors import ClientError, FedfleetError, one_line
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.signals import contained
from fedfleet.simulator.work import Message

TENTH = 10
HIGH_IS_BAD = re.compile(
    r"loss|err|entropy|mse|mae|nll|perplexity|regret|gap|violation|cost|distance|divergence|deviance|penalty|risk|wrong|fail|forgetting|attack_success"
    r"|(^|[_/])(misclass|mismatch|miscalib|miss(_|$|ed|es)|fid(_|$)|kl(_|$)|ece(_|$)|brier)",
    re.IGNORECASE,
)
SPREAD, END = re.compile(r"(^|[_/])(spread|std|gap)(_|$)"), re.compile(r"(loss|score)(?:_|$)", re.IGNORECASE)
VALIDATION = "validation"
AIMED_AT = {"attack": "test", "all_attack": "all"}
"""Splits of the examples that an attack is aimed at, with the labels that it wants, and of which they are."""
TESTED = ("test", "all")
"""Splits of which is told what a model says of each class; the later one of those that are there counts."""
CLASSES = 1000
"""Classes above which recall is not told of each at every evaluation."""
CHUNK = 500  # fixed, since the chunk decides the bits


def measure(task: Task, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
    """Return a task's metrics of outputs on data. Raises FedfleetError where one is no number, or raises."""
    try:
        with contained():
            result = task.metrics(outputs, data)
    except FedfleetError:
        raise
    except Exception as e:
        raise ClientError(f"the task's metrics: {type(e).__name__}: {one_line(e)}") from e
    return numbers(result, "the task's metrics")


class Measured(NamedTuple):
    """Metrics by name; where test examples have domains those by domain, see ``by_domain``; and classes, see ``confusions``."""

    metrics: dict[str, float]
    domains: dict[str, Tensor]
    classes: dict[str, Tensor] | None = None


class Measurement:
    """A model under evaluation, chunk by chunk while the next round runs, if the executor has workers."""

    def __init__(self, executor: Executor, task: Task, z: Tree, data: Mapping[str, Mapping[str, Tensor]]):
        self._task, self._z, self._data = task, z, data
        self._outputs = {split: self._start(executor, z, split) for split in data}

    def _start(self, executor: Executor, z: Tree, split: str) -> Iterator[Any]:
        size = len(next(iter(self._data[split].values())))
        whole = getattr(self._task, "whole", False)
        step = size if whole else CHUNK
        chunks = [Chunk("predict", split, i, min(i + step, size), whole) for i in range(0, size, step)]
        return executor.map(run_chunk, Message(send={"z": z}), chunks, background=True)

    def result(self) -> Measured:
        """Return the task's metrics on every split; those of the split "test" have no prefix. To be called once."""
        result: dict[str, float] = {}
        domains: dict[str, Tensor] = {}
        classes = None
        for split, pending in self._outputs.items():
            outputs, data = T.concat(list(pending)), self._data[split]
            metrics, by, of_split = measured(self._task, split, outputs, data)
            domains, classes = by or domains, of_split or classes
            result |= {f"{'' if split == 'test' else f'{split}_'}{name}": value for name, value in metrics.items()}
        return Measured(result | of_model(self._task, self._z, self._data), domains, classes)


def of_model(task: Task, z: Tree, data: Mapping[str, Any]) -> dict[str, float]:
    """Return what a task says of a model alone, where it is measured on the split "test". Raises FedfleetError."""
    told = getattr(task, "model_metrics", None)
    return numbers(told(z), "the task's model_metrics") if told is not None and "test" in data else {}


def measured(task: Task, split: str, outputs: Tree, data: Mapping[str, Tensor]) -> Measured:
    """Return the metrics of a split: of all, of sources and targets apart; of the split "test" also by domain.

    Of what an attack is aimed at it is the share of examples that the model says of what the attackers want. Where targets are held
    out, what can be said of them without labels is said, if the task gives ``probabilities``.
    """
    result, domains = dict(measure(task, outputs, data)), {}
    if split in AIMED_AT:
        return Measured({"success": result["accuracy"]}, domains)
    if not has_rows(outputs, len(data["y"])):
        return Measured(result, domains)
    if "domain" in data:
        each = by_domain(task, outputs, data)
        result |= summarised(each) if split == "test" else worst_domains(each)
        domains = each if split == "test" else {}
        if "target" in data:
            result |= by_roles_of_domains(each, data["domain"][data["target"]].unique(), gap=split == "test")
    result |= by_role(task, outputs, data)
    guess = getattr(task, "probabilities", None)
    if split == VALIDATION and guess is not None and "target" in data and data["target"].any():
        measures = label_free(guess(T.index(outputs, data["target"])))
        result |= {f"target_{name}": value for name, value in measures.items()}
    return Measured(result, domains, confusions(task, outputs, data) if split in TESTED else None)


def confusions(task: Task, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return of which label (k,) a model says which (k,), and of how many examples (k,), none left out that is not 0; int64.

    Where there are domains, their number (k,) comes first; rows rise. What a model says is the task's ``predicted``, else the
    likeliest of its ``probabilities``; None where it has neither.
    """
    if not says_classes(task):
        return None
    says: Any = getattr(task, "predicted", None)
    said = says(outputs) if says is not None else _likeliest(task.probabilities(outputs))  # type: ignore[attr-defined]
    y = data["y"]
    if said.shape != y.shape or y.dim() != 1 or (y.is_floating_point() and bool((y != y.round()).any())):
        return None  # numbers, several labels, or a task of one's own that says something else
    columns = ({"domain": data["domain"]} if "domain" in data else {}) | {"label": y, "predicted": said}
    kept = (y >= 0) & (y != getattr(task, "ignored", -1))  # not those that are left out
    columns = {name: column[kept] for name, column in columns.items()}
    rows, counts = torch.stack(list(columns.values()), 1).long().unique(dim=0, return_counts=True)
    return dict(zip(columns, rows.T, strict=True)) | {"examples": counts}


def recalls(classes: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return of what ``confusions`` says, by class (k,): "examples", and "recall" and "precision" float64, NaN where of none.

    k is ``size`` at least; nothing comes back where it is above ``CLASSES``.
    """
    label, said, examples = (classes[name] for name in ("label", "predicted", "examples"))
    size = max([size, *(int(column.max()) + 1 for column in (label, said) if len(column))])
    if size > CLASSES or (len(label) and int(said.min()) < 0):
        return {}
    right = (label == said).long() * examples
    of, taken, found = (
        torch.zeros(size, dtype=torch.int64).index_add_(0, where, rows)
        for where, rows in ((label, examples), (said, examples), (label, right))
    )
    return {"examples": of, "recall": found.double() / of, "precision": found.double() / taken}


def says_classes(task: Task) -> bool:
    """Say whether a task can be asked for the class of an example."""
    return any(getattr(task, name, None) is not None for name in ("predicted", "probabilities"))


def _likeliest(likely: Tensor) -> Tensor:
    return likely.argmax(1) if likely.dim() == 2 else likely[:0]


def has_rows(outputs: Tree, size: int) -> bool:
    """Say whether outputs have an entry an example, so that those of a domain can be looked at apart."""
    return all(leaf.dim() > 0 and len(leaf) == size for leaf in T.leaves(outputs))


def by_domain(task: Task, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return "examples" (p,) int64 and a task's metrics (p,) float64 in each domain 0, ..., p - 1; NaN where it has no example."""
    examples = data["domain"].bincount()
    result: dict[str, Tensor] = {"examples": examples}
    order = data["domain"].argsort(stable=True)
    for domain, rows in enumerate(order.split(examples.tolist())):
        if len(rows):
            for name, value in measure(task, T.index(outputs, rows), T.index(data, rows)).items():
                result.setdefault(name, torch.full((len(examples),), torch.nan, dtype=torch.float64))[domain] = value
    return result


def by_role(task: Task, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
    """Return "source_<metric>" and "target_<metric>" where some of the examples are of targets."""
    if "target" not in data:
        return {}
    result: dict[str, float] = {}
    for role, rows in (("source", ~data["target"]), ("target", data["target"])):
        if rows.any():
            each = measure(task, T.index(outputs, rows), T.index(data, rows))
            result |= {f"{role}_{name}": value for name, value in each.items()}
    return result


def by_roles_of_domains(domains: Mapping[str, Tensor], targets: Tensor, *, gap: bool) -> dict[str, float]:
    """Return "source_<metric>_worst_domain" where there are several sources, and "gap_<metric>".

    The generalisation gap is the mean over sources less the mean over ``targets``, numbers of domains, the other way round where
    less of the metric is better: what is lost where nobody has learnt.
    """
    role = torch.zeros(len(domains["examples"]), dtype=torch.bool)
    role[targets] = True
    sources = {name: each[~role] for name, each in domains.items()}
    several = int((sources["examples"] > 0).sum()) > 1
    result = {f"source_{name}": value for name, value in worst_domains(sources).items()} if several else {}
    for name, each in domains.items() if gap else ():
        if name != "examples":
            lost = float(sources[name].nanmean() - each[role].nanmean())
            result[f"gap_{name}"] = -lost if less_is_better(name) else lost
    return result


def worst_domains(domains: Mapping[str, Tensor]) -> dict[str, float]:
    """Return "<metric>_worst_domain" alone of what is ``summarised``."""
    return {name: value for name, value in summarised(domains).items() if name.endswith("_worst_domain")}


def summarised(domains: Mapping[str, Tensor]) -> dict[str, float]:
    """Return of each metric by domain the worst, the mean of the worst tenth (from ten domains on) and the spread.

    A domain whose loss is no number counts as the worst; another metric may not exist there, as AUC with one class.
    """
    result: dict[str, float] = {}
    there = domains.get("examples", torch.ones(1)) > 0
    for name, each in domains.items():
        known = each[there.expand_as(each)]
        known = known.nan_to_num(torch.inf, torch.inf) if less_is_better(name) else known[~known.isnan()]
        if name == "examples" or not len(known):
            continue
        worst = known.sort(descending=less_is_better(name)).values
        result[f"{name}_worst_domain"] = float(worst[0])
        if len(worst) >= TENTH:
            result[f"{name}_worst_tenth"] = float(worst[: len(worst) // TENTH].mean())
        result[f"{name}_spread"] = float(worst[-1] - worst[0]) * (-1 if less_is_better(name) else 1)
    return result


def less_is_better(metric: str) -> bool:
    """Say by its name whether a metric is one of losses, a spread or a gap, rather than of merit.

    A task says it by the end of a name, whatever else is in it: ``…_loss`` for what is to be small, ``…_score`` for what is not.
    """
    if SPREAD.search(metric):
        return True
    if ends := END.findall(metric):
        return ends[-1].lower() == "loss"
    return HIGH_IS_BAD.search(metric) is not None


def improved(best: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are better than ever before."""
    sign = {name: -1 if less_is_better(name) else 1 for name in metrics}
    return {
        name: value
        for name, value in metrics.items()
        if math.isfinite(value) and (name not in best or sign[name] * value > sign[name] * best[name])
    }
