"""Models between a run and plain PyTorch: a run's net with its weights, and weights from elsewhere to start a run from.

``model.safetensors`` has the names of the net's ``state_dict`` after ``x.``, those of what its layers count after ``b.``.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedfleet.config import schema as C
from fedfleet.config.reading import read
from fedfleet.experiments import learnt
from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line
from fedfleet.simulator.work import BUFFERS
from fedfleet.tasks.options import DataShape

PICKLED = (".pt", ".pth", ".bin")
COUNTED = "num_batches_tracked"  # which torch's BatchNorm has, and ours does without
PLAYERS = ("x", BUFFERS)  # parts whose leaves have the names of a net's state_dict


def net_of(folder: Path, summary: Mapping[str, Any], file: str, task: Task | None) -> nn.Module:
    """Return the net of a run with the weights in one of its files, in eval mode; ``task`` is the run's, where it is at hand.

    Raises ConfigError where the task is of no single net, or was made in Python and is not given.
    """
    task = _task(folder, summary) if task is None else task
    make: Any = getattr(task, "net", None)
    if make is None:
        raise ConfigError(f"{folder}: its task is of no single net: read {file} with safetensors.torch.load_file")
    net: nn.Module = make()
    try:
        found = load_file(folder / file)
    except (OSError, SafetensorError) as e:
        raise FedfleetError(f"{folder / file}: cannot be read ({one_line(e)}): let the run come to its end") from None
    missing, strange = net.load_state_dict({name.partition(".")[2]: leaf for name, leaf in found.items()}, strict=False)
    wanted = {name for name, p in net.named_parameters() if p.requires_grad}  # of shared ones the first name alone
    lacking = sorted(wanted & set(missing))
    if strange or lacking:
        what = f"has {strange[0]!r}" if strange else f"lacks {lacking[0]!r}"
        raise ConfigError(f"{folder / file}: it {what}, unlike the net: give the task that the run had")
    return net.eval()


def _task(folder: Path, summary: Mapping[str, Any]) -> Task:
    """Return the task that a run's folder tells of. Raises ConfigError."""
    raw, examples = read(folder / "config.yaml"), summary.get("examples")
    if "own" in (raw.get("task") or {}):
        raise ConfigError(
            f"{folder}: its task was made in Python, which no file brings back: take the Run that fedfleet.run or "
            f"fedfleet.resume(…, task=…) returned"
        )
    if examples is None:
        raise ConfigError(
            f"{folder}: its summary does not say of what shape examples were: give the run one more round"
        )
    config = learnt.with_source(C.load(C.without_own(raw, ("task", "algorithm", "data", "population"))), "task")
    shape = DataShape(tuple(examples["shape"]), examples["classes"])
    return learnt.of_shape(config, shape)


def load_model(path: Path, like: Tree, task: Task | None = None) -> Tree:
    """Read a tree of the structure of ``like`` from a run's file, or from a net's ``state_dict`` in safetensors or .pt.

    Raises ConfigError naming the file and what does not fit.
    """
    found, wanted = _read(path), dict(T.named_leaves(like))
    if not found.keys() & wanted.keys():  # a state_dict: names alone, without their part
        known = {name.partition(".")[2]: name for name in wanted if name.partition(".")[0] in PLAYERS}
        found = {known.get(name, name): leaf for name, leaf in found.items()}
        found = _without_constants(path, found, wanted.keys(), task)
    wrong = [n for n in wanted if n not in found or found[n].shape != wanted[n].shape] + [
        n for n in found if n not in wanted
    ]
    if wrong:
        raise ConfigError(
            f"warm_start={path}: it does not fit this task's model at {wrong[0]!r}: use the same task and model"
        )
    return T.unflatten(like, [found[n].to(leaf.dtype) for n, leaf in wanted.items()])


def _without_constants(path: Path, found: Mapping[str, Tensor], wanted: Any, task: Task | None) -> dict[str, Tensor]:
    """Leave out what a state_dict holds beside what is learnt: counts of batches, a second name, constants as the net has them.

    Raises ConfigError where the net's constants are others.
    """
    make: Any = getattr(task, "net", None)
    has: Mapping[str, Tensor] = {} if make is None else make().state_dict(keep_vars=True)
    kept = {}
    for name, leaf in found.items():
        mine = has.get(name)
        if name in wanted or mine is None:
            if not name.endswith(COUNTED):
                kept[name] = leaf
            continue
        first = next((n for n, other in has.items() if other is mine and n != name), None)
        if not name.endswith(COUNTED) and first is None and not torch.equal(mine.detach(), leaf.to(mine.dtype)):
            raise ConfigError(
                f"warm_start={path}: {name!r} is not learnt, and it is another than the net's: let the net be made with it"
            )
    return kept


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix not in PICKLED:
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as e:
        raise ConfigError(
            f"warm_start={path}: not a readable safetensors file ({one_line(e)}): give a model.safetensors of an earlier run, or a "
            f"state_dict in safetensors or .pt"
        ) from None
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as e:
        raise ConfigError(
            f"warm_start={path}: no file of weights alone ({one_line(e)[:120]}): write it with torch.save(net.state_dict(), …)"
        ) from None
    found = found.get("state_dict", found) if isinstance(found, Mapping) else found
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ConfigError(f"warm_start={path}: it holds no state_dict: write it with torch.save(net.state_dict(), …)")
    return {str(name): leaf for name, leaf in found.items()}
