"""What an evaluation measures, found out by evaluating a few examples before the run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.chunk import TRIED, Chunk, run_chunk
from fedfleet.simulator.block.purity import Impure, repeated
from fedfleet.simulator.driver.evaluation import measure, measured, of_model
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.population import gather
from fedfleet.simulator.signals import put_off
from fedfleet.simulator.work import Batch, Message


def try_evaluation(task: Task, setup: Setup, z: Tree, functions: list[str]) -> None:
    """Evaluate a few rows of every split. Raises Impure; what else there is, the run itself will say."""
    for split, tensors in setup.evaluation.items():
        try:
            few = min(TRIED, len(tensors["y"]))
            with put_off():
                *_, outputs = [run_chunk(setup, Message(send={"z": z}), Chunk(f, split, 0, few)) for f in functions]
            data = T.index(tensors, slice(few))
            repeated("the task's metrics", lambda o=outputs, d=data: dict(task.metrics(o, d)), task)
        except Impure:
            raise
        except Exception:
            continue


def metric_names(task: Task, z: Tree, splits: Mapping[str, Mapping[str, torch.Tensor]]) -> list[str]:
    """Ask the task for ``eval/<metric>`` names by evaluating a few examples."""
    if (told := getattr(task, "measured", None)) is not None:
        return [f"eval/{'' if split == 'test' else f'{split}_'}{name}" for split in splits for name in told]
    found = []
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
            told = dict.fromkeys(measure(task, outputs, few), 0.0)  # a metric may have no value on so few
            named: Any = SimpleNamespace(metrics=lambda outputs, data, told=told: told)
            named.probabilities = getattr(task, "probabilities", None)
            found += [f"eval/{prefix}{name}" for name in measured(named, split, outputs, few).metrics]
        found += [f"eval/{name}" for name in of_model(task, z, splits)]
    return found


def _one_of_each(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the first row of each domain, those of targets first."""
    kinds, kind = tensors["domain"].unique(return_inverse=True)
    rows = torch.arange(len(kind))
    first = torch.full_like(kinds, len(kind)).scatter_reduce_(0, kind, rows, "amin")
    return first[tensors["target"][first].argsort(descending=True, stable=True)] if "target" in tensors else first
