"""Models between a run and plain PyTorch: a run's net with its weights, and weights from elsewhere to start a run from.

``model.safetensors`` has the names of the net's ``state_dict`` after ``x.``, those of what its layers count after ``b.``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfleet.assembly import onnx_file, task_setup
from fedfleet.config import schema as C
from fedfleet.config.reading import read
from fedfleet.config.schema import Config
from fedfleet.config.trust import check as check_trusted
from fedfleet.config.user_data import Data
from fedfleet.datasets.vocabulary import VOCABULARY, Vocabulary
from fedfleet.files import tensors as files
from fedfleet.files.writing import whole
from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line
from fedfleet.simulator.work import BUFFERS
from fedfleet.tasks import peft_files, transformer
from fedfleet.tasks.adapters import Adapted, plain
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.maker import Maker
from fedfleet.tasks.module import ModuleTask
from fedfleet.tasks.options import DataShape, named_net
from fedfleet.tasks.stateful import takes_mask
from fedfleet.tasks.transformer import Logits
from fedfleet.tasks.weights_file import file_of, marked, marks, read_weights, vocabulary_of

NET = "net.json"
STATE_DICTS = (".safetensors", ".pt")
COUNTED = "num_batches_tracked"  # which torch's BatchNorm has, and ours does without
NAMED = 1000  # clients whose names a run keeps, at most
PLAYERS = ("x", BUFFERS)  # parts whose leaves have the names of a net's state_dict


def nets(config: Config) -> dict[str, str]:
    """Return what a run keeps of its net beside the code that it names: the configuration of a transformer, by its file's name."""
    model = named_net(config.task).model
    return {NET: transformer.told(model)} if model is not None and transformer.is_transformer(model) else {}


def told(data: Data, y: Tensor, trained_on: float) -> dict[str, Any]:
    """Return what is to be known of examples by whoever reads a model, tested on examples with labels y (n, ...).

    ``trained_on`` is how many examples all clients have.
    """
    test, names = data.test, data.names
    known = {
        "words": test.words,
        "pixels": test.x.dtype == torch.uint8,
        **marks(names.vocabulary),
        "client_names": list(names.clients[:NAMED]) if len(names.clients) <= NAMED else [],
        "class_names": list(names.classes),
        "features": list(names.features),
    }
    tested_on = names.tested_on(y, test.classes, len(test) / (len(test) + trained_on))
    result = {"shape": list(test.x.shape[1:]), "classes": test.classes, "tested_on": tested_on}
    return result | {what: of for what, of in known.items() if of}


def check_vocabularies(config: Config, mine: Vocabulary | None) -> None:
    """Refuse weights that have learnt to read tokens numbered otherwise than the data's. Raises ConfigError."""
    adapters = named_net(config.task).adapters
    base = None if adapters is None else adapters.base
    for key, path in {"warm_start": config.warm_start, "task.adapters.base": base}.items():
        theirs = None if path is None or mine is None else vocabulary_of(path)
        if theirs is not None and mine is not None and theirs != mine.digest:
            raise ConfigError(
                f"{key}={path}: it has learnt with another vocabulary ({theirs}) than the data's ({mine.digest}), of other tokens "
                f"or numbered otherwise: read these with tokenizer=vocabulary:PATH, its run's {VOCABULARY}"
            )


def net_of(
    folder: Path, summary: Mapping[str, Any], file: str | None, task: Task | None, *, trust: bool = False
) -> nn.Module:
    """Return the net of a run with the weights in one of its files, adapters among them, in eval mode; ``task`` is the run's.

    Without a file it is what adapters were put on. Raises ConfigError where the task is of no single net, or was made in Python and
    is not given.
    """
    task = task_of(folder, summary, trust=trust) if task is None else task
    if file is not None:
        net = with_weights(folder, file, task)
    elif isinstance(make := getattr(task, "make", None), Adapted):
        net = make(0)
    else:
        raise ConfigError(f"{folder}: its task has no adapters: give last or best")
    net = plain(net).eval()
    return net.net if isinstance(net, Logits) else net


def plain_code(task: Task) -> tuple[str, str] | None:
    """Return the net of a task in Python without fedfleet: a line that says where it is from, empty for torch, and an expression.

    None for what is not one of torch's layers after another, and not made by a function or a class that has a name; and for nets
    that take a mask beside what they read.
    """
    if not isinstance(task, Classification | ModuleTask):
        return None
    net = plain(task.net())
    if (layers := onnx_file.code(net)) is not None:
        return "", layers
    return task.make.code() if isinstance(task.make, Maker) and not takes_mask(type(net)) else None


def save_state_dict(net: nn.Module, path: Path, about: Mapping[str, str]) -> Path:
    """Write a net's ``state_dict`` by the end of the file's name. Raises ConfigError for another, FedfleetError where it fails."""
    if path.suffix not in STATE_DICTS:
        raise ConfigError(f"{path}: its name does not say the format: end it in {' or '.join(STATE_DICTS)}")
    apart = torch.contiguous_format  # and shared ones apart: safetensors asks for both
    state = net.state_dict()
    tensors = {name: leaf.detach().clone(memory_format=apart) for name, leaf in state.items()}
    try:
        if path.suffix == ".pt":
            with whole(path) as scratch:
                torch.save(marked(tensors, getattr(state, "_metadata", {}), about), scratch)
        else:
            files.write(path, tensors, about)
    except (*files.UNREADABLE, RuntimeError) as e:
        raise FedfleetError(
            f"{path}: cannot be written ({one_line(e)}): give a file in a folder you may write to"
        ) from None
    return path


def save_adapters(
    folder: Path, summary: Mapping[str, Any], file: str, task: Task | None, out: Path, *, trust: bool = False
) -> Path:
    """Write the adapters in one of a run's files as PEFT does. Raises ConfigError where it has none."""
    task = task_of(folder, summary, trust=trust) if task is None else task
    if not isinstance(make := getattr(task, "make", None), Adapted):
        raise ConfigError(f"{folder}: its task has no adapters: give it task.adapters")
    return peft_files.write(out, with_weights(folder, file, task), make.adapters, make.digest())


def with_weights(folder: Path, file: str, task: Task) -> nn.Module:
    """Return a task's net with the weights in a run's file. Raises ConfigError."""
    make: Any = getattr(task, "net", None)
    if make is None:
        raise ConfigError(f"{folder}: its task is of no single net: read {file} with safetensors.torch.load_file")
    net: nn.Module = make()
    try:
        result = files.read(folder / file)
    except files.UNREADABLE as e:
        raise FedfleetError(f"{folder / file}: cannot be read ({one_line(e)}): let the run come to its end") from None
    missing, strange = net.load_state_dict(
        {name.partition(".")[2]: leaf for name, leaf in result.items()}, strict=False
    )
    wanted = {name for name, p in net.named_parameters() if p.requires_grad}  # of shared ones the first name alone
    lacking = sorted(wanted & set(missing))
    if strange or lacking:
        what = f"has {strange[0]!r}" if strange else f"lacks {lacking[0]!r}"
        raise ConfigError(f"{folder / file}: it {what}, unlike the net: give the task that the run had")
    return net


def shape_of(folder: Path, summary: Mapping[str, Any]) -> DataShape:
    """Return the shape of a run's examples, as its summary says. Raises ConfigError where it does not."""
    match summary.get("examples"):
        case {"shape": [*shape], "classes": int() as classes, **more} if all(
            isinstance(x, int) for x in (*shape, more.get("words", 0))
        ):
            return DataShape(tuple(shape), classes, more.get("words", 0))
        case _:
            raise ConfigError(
                f"{folder}: its summary does not say of what shape examples were: give the run one more round"
            )


def task_of(folder: Path, summary: Mapping[str, Any], *, trust: bool = False) -> Task:
    """Return the task that a run's folder tells of; ``trust`` its code wherever it was written. Raises ConfigError."""
    raw = read(folder / "config.yaml")
    if "own" in (raw.get("task") or {}):
        raise ConfigError(
            f"{folder}: its task was made in Python, which no file brings back: take the Run that fedfleet.run "
            f"returned, or fedfleet.open_run({str(folder)!r}, task=…)"
        )
    shape = shape_of(folder, summary)
    check_trusted(folder / "config.yaml", trust=trust, section="task.")
    config = C.load(C.without_own(raw, ("task", "algorithm", "data", "population")))
    adapters = named_net(config.task).adapters  # of which the base is where it was
    if adapters is None and (folder / NET).exists():
        config = C.with_overrides(config, {"task.model": f"{transformer.PREFIX}{folder / NET}"})
    config = task_setup.with_sources(config, ("task",))
    task = task_setup.of_shape(config, shape)
    task_setup.with_base(config, task)  # of another base the weights are not
    return task


def load_model(path: Path, like: Tree, task: Task | None = None) -> Tree:
    """Read a tree of the structure of ``like`` from a run's file, a net's ``state_dict`` in safetensors or .pt, or PEFT's folder.

    Raises ConfigError naming the file and what does not fit.
    """
    wanted, path = dict(T.named_leaves(like)), file_of(path)
    if not _is_folder(path):
        result = read_weights(path, f"warm_start={path}")
    elif isinstance(make := getattr(task, "make", None), Adapted):
        result = peft_files.read(path, make(0), make.adapters, "warm_start")
    else:
        raise ConfigError(f"warm_start={path}: it is a folder, as adapters are kept: give a file, or set task.adapters")
    if not result.keys() & wanted.keys():  # a state_dict: names alone, without their part
        known = {name.partition(".")[2]: name for name in wanted if name.partition(".")[0] in PLAYERS}
        result = {known.get(name, name): leaf for name, leaf in result.items()}
        result = _without_constants(path, result, wanted.keys(), task)
    wrong = [n for n in wanted if n not in result or result[n].shape != wanted[n].shape] + [
        n for n in result if n not in wanted
    ]
    if wrong:
        raise ConfigError(
            f"warm_start={path}: it does not fit this task's model at {wrong[0]!r}: use the same task and model"
        )
    return T.unflatten(like, [result[n].to(leaf.dtype) for n, leaf in wanted.items()])


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long is that of no folder
        return False


def _without_constants(path: Path, result: Mapping[str, Tensor], wanted: Any, task: Task | None) -> dict[str, Tensor]:
    """Leave out what a state_dict holds beside what is learnt: counts of batches, a second name, constants as the net has them.

    Raises ConfigError where the net's constants are others.
    """
    make: Any = getattr(task, "net", None)
    has: Mapping[str, Tensor] = {} if make is None else make().state_dict(keep_vars=True)
    kept = {}
    for name, leaf in result.items():
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
