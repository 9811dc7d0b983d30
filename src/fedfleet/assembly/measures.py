"""Metrics of an evaluation, found by evaluating a few examples before the run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from fedfleet.config.resolve import memory_bytes
from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.chunk import TRIED, Chunk, run_chunk
from fedfleet.simulator.block.side_effects import Impure, repeated
from fedfleet.simulator.driver.evaluation import less_is_better, measure, measured, of_model
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.population import gather
from fedfleet.simulator.signals import contained, put_off
from fedfleet.simulator.work import Batch, Message
from fedfleet.tasks.metrics import Library, made_up, told
from fedfleet.tasks.targets import guessed

COPIES = 8  # of the outputs, in double precision, that measuring them takes at most


def try_evaluation(task: Task, setup: Setup, z: Tree, functions: list[str]) -> None:
    """Evaluate a few rows of every split. Raises Impure; what else there is, the run itself will say."""
    for split, tensors in setup.evaluation.items():
        try:
            few = min(TRIED, len(tensors["y"]))
            with put_off(), contained():
                *_, outputs = [run_chunk(setup, Message(send={"z": z}), Chunk(f, split, 0, few)) for f in functions]
            data = T.index(tensors, slice(few))
            with contained():
                repeated("the task's metrics", lambda o=outputs, d=data: dict(task.metrics(o, d)), task)
        except Impure:
            raise
        except Exception:
            continue


def check_libraries(task: Task, z: Tree, splits: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Try the metrics that libraries have on made-up predictions of the task's kind, and reckon what they take.

    Raises ConfigError where one fails, is better the other way than its name says, or this machine has not the memory.
    """
    of = {name: metric for name, metric in getattr(task, "chosen", {}).items() if isinstance(metric, Library)}
    if not of:
        return
    examples = max(len(tensors["y"]) for tensors in splits.values())
    few = gather(splits["test"], torch.arange(min(2, len(splits["test"]["y"]))))
    with torch.no_grad():
        outputs: Any = task.functions["predict"](z, Batch(few, torch.ones(len(few["y"]))))
    loss: Any = getattr(task, "loss", None)
    kind = made_up(told(guessed(loss, outputs, few["y"]), outputs, few["y"]))
    needed = COPIES * 8 * outputs.numel() / len(outputs) * examples
    for name, metric in of.items():
        metric.of(kind)
        higher = metric.higher_is_better(kind)
        if higher is not None and higher == less_is_better(name):
            raise ConfigError(
                f"{metric.said}: {'more' if higher else 'less'} of it is better, and its name says otherwise: give it a label that "
                f"ends in {'_score' if higher else '_loss'}"
            )
        if needed > memory_bytes():
            raise ConfigError(
                f"{metric.said}: it needs the predictions of all {examples:,} examples at once, some {needed / 1e9:,.3g} GB, and "
                f"this machine has {memory_bytes() / 1e9:,.3g} GB: lower evaluation.test_examples, or leave it out"
            )


def metric_names(task: Task, z: Tree, splits: Mapping[str, Mapping[str, torch.Tensor]]) -> list[str]:
    """Ask the task for ``eval/<metric>`` names by evaluating a few examples."""
    if (said := getattr(task, "measured", None)) is not None:
        return [f"eval/{'' if split == 'test' else f'{split}_'}{name}" for split in splits for name in said]
    result = []
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # a few examples may hold one class only
        for split, tensors in splits.items():
            few = gather(tensors, torch.arange(min(100, len(tensors["y"]))))
            try:
                outputs = task.functions["predict"](z, Batch(few, torch.ones(len(few["y"]))))
            except Exception as e:
                raise ConfigError(
                    f"task {type(task).__name__}: its 'predict' fails on examples of shape {tuple(few['x'].shape)} and "
                    f"{few['x'].dtype} ({type(e).__name__}: {one_line(e)}): give one that takes them"
                ) from e
            prefix = "" if split == "test" else f"{split}_"
            if "domain" in tensors:  # some of each, though the first rows may be alike
                rows = _one_of_each(tensors)[torch.arange(len(few["y"])) % len(tensors["domain"].unique())]
                few |= {column: tensors[column][rows] for column in ("domain", "target") if column in tensors}
            names = dict.fromkeys(measure(task, outputs, few), 0.0)  # a metric may have no value on so few
            named: Any = SimpleNamespace(metrics=lambda outputs, data, names=names: names)
            named.probabilities = getattr(task, "probabilities", None)
            result += [f"eval/{prefix}{name}" for name in measured(named, split, outputs, few).metrics]
        result += [f"eval/{name}" for name in of_model(task, z, splits)]
    return result


def _one_of_each(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the first row of each domain, those of targets first."""
    kinds, kind = tensors["domain"].unique(return_inverse=True)
    rows = torch.arange(len(kind))
    first = torch.full_like(kinds, len(kind)).scatter_reduce_(0, kind, rows, "amin")
    return first[tensors["target"][first].argsort(descending=True, stable=True)] if "target" in tensors else first
