"""Setup of the task: the configured one, a digest of its code, and checks of a net of one's own, before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedfleet.algorithms.registry import ALGORITHMS, around
from fedfleet.assembly import user_parts
from fedfleet.assembly.identity import identity
from fedfleet.config import resolve
from fedfleet.config import schema as C
from fedfleet.config.advice import of_outputs
from fedfleet.config.plugins import made, offered, options_class, package_of, place, places, recorded
from fedfleet.config.population import Data
from fedfleet.config.schema import Config
from fedfleet.datasets.examples import Dataset
from fedfleet.datasets.vocabulary import PADDING
from fedfleet.simulator import named
from fedfleet.simulator.algorithm import Algorithm, Task
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.block.side_effects import ClosureTensors, Impure, SideEffects
from fedfleet.simulator.errors import ConfigError, one_line, show
from fedfleet.simulator.population import InMemoryPopulation, decode
from fedfleet.simulator.registry import ByPath
from fedfleet.simulator.signals import EndsProgram, contained, put_off
from fedfleet.simulator.work import Batch
from fedfleet.tasks import transformer
from fedfleet.tasks.adapters import Adapted
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.options import DataShape, TaskOptions, named_net
from fedfleet.tasks.registry import TASKS
from fedfleet.tasks.transformer import is_transformer

HALF_BYTES = 2
ROWS, CLIENTS = 3, 2  # examples and clients that a net is tried on; the last row counts for nothing
CLOSE = 1e-3  # of the largest output
LABELLED = "module"  # the one task that data with targets are for


def configured(config: Config, data: Data) -> Task:
    """Return the configured task for these data. Raises ConfigError."""
    name, built_in = config.task.name, not isinstance(config.task, ByPath)
    if not data.test.classes and built_in and name != LABELLED:
        raise ConfigError(
            f"task.name={name!r}: it is of labels, and {data.name} has targets: set task.name=module, with your net as task.model "
            f"and task.loss=mse, or give labels"
        )
    if data.test.words and built_in and not config.task.texts:
        readers = ", ".join(n for n, row in TASKS.items() if issubclass(row.options, TaskOptions) and row.options.texts)
        raise ConfigError(
            f"task.name={name!r}: it reads no text, which the examples of {data.name} are: choose one of {readers}"
        )
    return of_shape(config, DataShape(tuple(data.test.x.shape[1:]), data.test.classes, data.test.words))


def of_shape(config: Config, shape: DataShape) -> Task:
    """Return the configured task for examples of a shape and so many classes. Raises ConfigError."""
    chosen = config.task
    if (here := place(config, "task")) is not None:
        told: dict[str, Any] = {"shape": shape.example, **({"classes": shape.classes} if shape.classes else {})}
        return made(config, here, user_parts.check_task, **told)
    paths = named_net(chosen).paths
    for key, text in paths.items():  # found here first, since the task knows nothing of code_dir
        named.found(f"task.{key}", text, config.code_dir)
    try:
        with put_off(), torch.device("meta"):  # count the floats before any memory is taken
            floats = T.count(TASKS.build(chosen, shape).init(config.seed))
    except (ValueError, RuntimeError) as e:
        if not paths:
            key = "" if str(e).startswith("task.") else f"task.model={named_net(chosen).model!r}: "
            raise ConfigError(f"{key}{one_line(e)}") from None
        floats = 0  # one's own may look at values, which there are none of yet
    except Exception:
        if not paths:
            raise
        floats = 0
    resolve.check_model(config, floats)
    try:
        return TASKS.build(chosen, shape)
    except ConfigError:
        raise
    except ValueError as e:
        raise ConfigError(f"task.model={named_net(chosen).model!r}: {one_line(e)}") from None


def algorithm(config: Config, task: Task) -> Algorithm:
    """Return the configured algorithm for a task. Raises ConfigError."""
    if (here := place(config, "algorithm")) is not None:
        own = made(config, here, user_parts.check_algorithm, task=task, cohort=config.cohort, **offered(here))
        return around(config.algorithm, own)
    return ALGORITHMS.build(config.algorithm, task, config.cohort)


def with_sources(config: Config, sections: Iterable[str] | None = None) -> Config:
    """Return the configuration with a digest of all code that sections of it name by a path, and the folder it lies in.

    Raises ConfigError where a digest is given and is another.
    """
    config = _with_task(config)
    for here in places(config, sections):
        make = here.found(config.code_dir)
        options = options_class(here, make)
        whole = (make,) if options is None else (make, options)
        config = recorded(config, here, source=identity(whole).digest, version=package_of(here, make))
        config = _at_home(config, [make])
    return config


def _with_task(config: Config) -> Config:
    """Return the configuration with a digest of the code that the options of its task name by a path."""
    chosen: Any = config.task
    model, _, paths = named_net(chosen)
    configured = {"model": model} if model is not None and is_transformer(model) else {}
    if not paths and not configured:
        return config
    things = [named.found(f"task.{key}", text, config.code_dir) for key, text in paths.items()]
    about = [transformer.source(text) for text in configured.values()]
    source = identity((*things, *about)).digest
    if chosen.source not in (None, source):
        raise ConfigError(
            f"task.source={show(chosen.source)}: the code of {', '.join({**configured, **paths}.values())} is other by now "
            f"({source}): bring back what it was, or leave this out in a new run"
        )
    return _at_home(C.replaced(config, "task", chosen.model_copy(update={"source": source})), things)


def _at_home(config: Config, things: Iterable[Any]) -> Config:
    """Return the configuration with the folder that its modules lie in."""
    homes = (home for home in map(named.home, things) if home is not None)
    folder = next(homes, None) if config.code_dir is None else str(Path(config.code_dir).expanduser().absolute())
    return config.model_copy(update={"code_dir": folder})


def with_base(config: Config, task: Task) -> Config:
    """Return the configuration with a digest of the weights that adapters leave as they are.

    Raises ConfigError where a digest is given and is another.
    """
    make: Any = getattr(task, "make", None)
    chosen = named_net(config.task).adapters
    if chosen is None or not isinstance(make, Adapted):
        return config
    result = make.digest()
    if chosen.digest not in (None, result):
        raise ConfigError(
            f"task.adapters.digest={show(chosen.digest)}: the base has other weights by now ({result}): bring back what it was, or "
            f"leave this out in a new run"
        )
    return C.replaced(config, "task.adapters", chosen.model_copy(update={"digest": result}))


def begun(task: Task, seed: int) -> Tree:
    """Return the initial tree of a task. Raises ConfigError where a part of it is missing."""
    z = task.init(seed)
    there = list(z) if isinstance(z, Mapping) else []
    if missing := [part for part in task.parts if part not in there]:
        raise ConfigError(
            f"the task's init: it returned {', '.join(there) or f'a {type(z).__name__}'}, and its parts are "
            f"{', '.join(task.parts)}: return {{{missing[0]!r}: {{…}}}} with it"
        )
    return z


def net_advice(config: Config, task: Task, z: Tree, data: Data) -> list[str]:
    """Refuse a net of one's own that does not fit the data, or cannot be trained as clients train; return what it should be told.

    Raises ConfigError.
    """
    make: Any = getattr(task, "make", None)
    if make is None:
        return []
    try:
        with put_off(insist=True), contained():
            return _checked(config, make, task, z, data)
    except EndsProgram as e:
        raise ConfigError(f"{make.said}: {e}: let it raise another error") from e


def _checked(config: Config, make: Any, task: Any, z: Tree, data: Data) -> list[str]:
    if not _alike(task.init(config.seed), z):
        raise ConfigError(
            f"{make.said}: two nets of one seed begin with other weights: draw them from torch's generator, or from `seed`"
        )
    few = min(ROWS, len(data.test))
    batch = Batch({"x": decode(data.test.x[:few]), "y": data.test.y[:few]}, torch.ones(few))
    told = _check_outputs(make.said, task, z, batch, data)
    if data.test.words:
        _check_padding(make.said, task, z, batch)
    _check_training(config, make, task, z, batch)
    if data.test.classes and not getattr(task, "chosen", True):
        told.append("the loss is your own, so nothing but the loss is measured: give metrics, such as [accuracy]")
    return told


def _check_outputs(said: str, task: Any, z: Tree, batch: Batch, data: Data) -> list[str]:
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            outputs = task.functions["predict"](z, batch)
    except Exception as e:
        raise ConfigError(f"{said}: {_failed(e, batch)}") from e
    if not isinstance(outputs, Tensor):
        raise ConfigError(f"{said}: its forward returned a {type(outputs).__name__}: return a tensor (examples, …)")
    if not outputs.isfinite().all():
        raise ConfigError(
            f"{said}: its outputs are not finite: let it begin with others, and keep parameters as attributes or in "
            f"nn.ParameterList, for those in a plain list are not found"
        )
    if not torch.equal(before, torch.get_rng_state()):
        raise ConfigError(
            f"{said}: it draws from torch's generator also where it is measured (eval mode): leave that out there"
        )
    if outputs.dim() == 0 or len(outputs) != len(batch.weight):
        raise ConfigError(
            f"{said}: it has outputs of shape {tuple(outputs.shape)} for {len(batch.weight)} examples: return (examples, …)"
        )
    try:
        misfit = task.loss.misfit(outputs, batch.y)
    except Exception as e:
        raise ConfigError(
            f"{said}: its loss failed on outputs {tuple(outputs.shape)} and targets {tuple(batch.y.shape)} of {len(batch.y)} "
            f"examples ({type(e).__name__}: {one_line(e)}): let it take such, (examples, …)"
        ) from e
    if not misfit and isinstance(task, Classification) and outputs.shape != (len(outputs), data.test.classes):
        misfit = f"it has outputs of shape {tuple(outputs.shape)}, and there are {data.test.classes} classes: end it in as many"
    for y in [] if misfit else _all(data):
        misfit = misfit or task.loss.astray(outputs, y)
    if misfit:
        raise ConfigError(f"{said}: {misfit}")
    return [] if task.loss.axis is None else of_outputs(outputs, task.loss.axis, data.test.classes, task.loss.name)


def _check_padding(said: str, task: Any, z: Tree, batch: Batch) -> None:
    """Refuse a net of whose outputs something depends on how many places follow after the end of a text. Raises ConfigError."""
    longest = batch.x.shape[1]
    if longest < ROWS:
        return
    x = torch.cat([batch.x[:, :-1], torch.full_like(batch.x[:, :1], PADDING)], 1)
    fix = "let it leave out where its mask is False, and take any number of tokens"
    with torch.no_grad():
        wide = task.functions["predict"](z, Batch({**batch.data, "x": x}, batch.weight))
        try:
            near = task.functions["predict"](z, Batch({**batch.data, "x": x[:, :-1]}, batch.weight))
        except Exception as e:
            raise ConfigError(
                f"{said}: it takes {longest} tokens and not {longest - 1} ({one_line(e)[:200]}): {fix}"
            ) from e
    if wide.dim() > 1 and wide.shape[1] == longest and near.shape[1] == longest - 1:  # outputs of each token
        wide, near = (
            torch.where((x[:, :-1] >= 0).view(*x[:, :-1].shape, *(1 for _ in near.shape[2:])), v, 0.0)
            for v in (wide[:, :-1], near)
        )
    if float((wide - near).abs().max()) > CLOSE * float(near.abs().max()):
        raise ConfigError(f"{said}: what follows after the end of a text changes its outputs: {fix}")


def _all(data: Data) -> list[Tensor]:
    """Return all labels or targets that are at hand."""
    if isinstance(data, Dataset):
        return [data.train.y, data.test.y]
    return [data.test.y, *([data.population.data["y"]] if isinstance(data.population, InMemoryPopulation) else [])]


def _check_training(config: Config, make: Any, task: Task, z: Tree, batch: Batch) -> None:
    said, ops = make.said, EngineOps(task.objectives, task.functions)
    weight = torch.ones(len(batch.weight))
    weight[1:][-1:] = 0
    keys = rng.fold(rng.key(0), torch.arange(CLIENTS))

    def gradient(z: Tree, x: Tensor, y: Tensor, key: Tensor) -> Tree:
        return ops.grad("train", z, Batch({"x": x, "y": y}, weight), key)

    def padded(padding: Tensor) -> Tree:
        return gradient(z, torch.where(_rows(weight, batch.x), batch.x, padding), batch.y, keys[0])

    version = batch.x._version
    generator = torch.get_rng_state()
    try:
        with torch.no_grad():
            gradient(z, batch.x, batch.y, keys[0])
    except Exception as e:
        raise ConfigError(f"{said}: in training {_failed(e, batch)}") from e
    if not torch.equal(generator, torch.get_rng_state()):
        torch.set_rng_state(generator)
        raise ConfigError(
            f"{said}: in training it draws from torch's generator, which no run could repeat: {_drawn(make(0))}"
        )
    if batch.x._version != version:
        raise ConfigError(
            f"{said}: it writes in place into the examples that it is given: return new tensors, and begin with no inplace=True"
        )
    roots = task.objectives, task.functions
    pure = SideEffects(f"{said}: it", {"z": z}, {"x": batch.x, "y": batch.y}, partial(ClosureTensors().tensors, roots))
    try:
        with torch.no_grad():
            pure.trial(partial(padded, batch.x[:1]), partial(padded, batch.x[:1] * 0 + 1), holds=roots)
            pure.check()
    except Impure as e:
        raise ConfigError(str(e)) from None
    _check_replaced(said, task, z, Batch(batch.data, weight), keys[0])
    _check_rows(said, ops, z, batch, weight, keys)
    if config.executor.inner == "serial":
        return
    many = "runs for one client and not for many at once"
    halves = Halves()
    fix = "avoid branches on values, .item(), .numpy() and writing in place, or set executor.inner=serial"
    try:
        with torch.no_grad():
            x, y = (v.expand(CLIENTS, *v.shape) for v in (batch.x, batch.y))
            torch.func.vmap(gradient, in_dims=(None, 0, 0, 0), randomness="error")(z, x, y, keys)
    except Exception as e:
        raise ConfigError(f"{said}: it {many} ({type(e).__name__}: {one_line(e)[:200]}): {fix}") from e
    try:
        with torch.no_grad():
            several = T.map(lambda leaf: torch.stack([leaf, leaf + leaf / 8]), z)
            guess = lambda z: task.functions["predict"](z, Batch({"x": batch.x, "y": batch.y}, weight))  # noqa: E731
            at_once = torch.func.vmap(guess)(several)
            with halves:
                wanted = torch.stack([guess(T.index(several, which)) for which in range(CLIENTS)])
                each = [gradient(T.index(several, which), batch.x, batch.y, keys[which]) for which in range(CLIENTS)]
    except Exception as e:
        raise ConfigError(f"{said}: it {many} ({type(e).__name__}: {one_line(e)[:200]}): {fix}") from e
    if halves.kind is not None:
        many = f"computes in {halves.kind}, whose few digits come out otherwise for many clients at once"
        fix = "make its layers float32, as by net.float(), and leave such types out of forward, or set executor.inner=serial"
    if halves.padding:
        raise ConfigError(
            f"{said}: it gives F.embedding a padding_idx, which torch forgets for many clients at once: take nn.Embedding, or set "
            f"executor.inner=serial"
        )
    if float((at_once - wanted).abs().max()) > CLOSE * float(wanted.abs().max()):
        raise ConfigError(f"{said}: it {many}, where it has other outputs: {fix}")
    with torch.no_grad():
        at_once = torch.func.vmap(gradient, randomness="error")(several, x, y, keys)
    if (leaf := _differing(at_once, T.map(lambda *alone: torch.stack(alone), *each))) is not None:
        raise ConfigError(f"{said}: it {many}, where {leaf} has another gradient: {fix}")


def _check_replaced(said: str, task: Task, z: Tree, batch: Batch, key: Tensor) -> None:
    """Refuse a net whose forward puts other data into a parameter, which are gone after the call. Raises ConfigError."""
    given = T.map(Tensor.clone, z)
    before = [leaf.data_ptr() for leaf in T.leaves(given)]
    with torch.no_grad():
        task.objectives["train"].loss(given, batch, None, key)
    for (name, leaf), at in zip(T.named_leaves(given), before, strict=True):
        if leaf.data_ptr() != at:
            raise ConfigError(
                f"{said}: in training it gives {name} other data, which are gone after the call: leave .data as it is, and "
                f"compute with other numbers, as by F.linear(x, w.clamp(-1, 1))"
            )


def _check_rows(said: str, ops: EngineOps, z: Tree, batch: Batch, weight: Tensor, keys: Tensor) -> None:
    """Refuse a net or loss by whose gradient a row of weight 0 is more than none. Raises ConfigError."""
    if len(weight) < ROWS:
        return

    def of(rows: int, key: Tensor) -> Tree:
        with torch.no_grad():
            return ops.grad("train", z, Batch({"x": batch.x[:rows], "y": batch.y[:rows]}, weight[:rows]), key)

    whole, drawn = of(ROWS, keys[0]), of(ROWS, keys[1])
    try:
        fewer = of(ROWS - 1, keys[0])
    except Exception as e:
        raise ConfigError(f"{said}: in training {_failed(e, Batch(batch.data, weight[:-1]))}") from e
    if _differing(whole, drawn) is None and (leaf := _differing(fewer, whole)) is not None:  # draws go by the shape
        raise ConfigError(
            f"{said}: where a row more fills the batch up, {leaf} has another gradient, so that a client's result would depend on "
            f"those it shares a block with: let neither forward nor loss go by how many rows there are, as len(x) says"
        )


def _differing(result: Tree, wanted: Tree) -> str | None:
    """Return the name of the first leaf by which gradients, and what comes with them, differ by more than rounding."""
    largest = max(map(_largest, T.leaves(wanted[0])), default=0.0)
    for (name, a), b in zip(T.named_leaves(result), T.leaves(wanted), strict=True):
        if not torch.allclose(a, b, 0, CLOSE * max(largest, _largest(b)), equal_nan=True):
            return name.partition(".")[2]
    return None


class Halves(TorchDispatchMode):
    """Watches for results of 16 bits or fewer, of which ``kind`` is the first type, and for padding of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: str | None = None
        self.padding = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that nothing here is compiled: to leave it out torch would import its compiler."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it returns."""
        result = function(*args, **(kwargs or {}))
        self.padding = self.padding or (function is torch.ops.aten.embedding.default and args[2:3] >= (0,))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype.itemsize <= HALF_BYTES:
                self.kind = self.kind or str(tensor.dtype).removeprefix("torch.")
        return result


def _largest(leaf: Tensor) -> float:
    """Return the largest size of the numbers in a tensor, NaN apart."""
    return float(leaf.abs().nan_to_num(nan=0.0, posinf=torch.inf).max()) if leaf.numel() else 0.0


def _rows(weight: Tensor, x: Tensor) -> Tensor:
    return (weight > 0).view(-1, *(1 for _ in x.shape[1:]))


def _alike(a: Tree, b: Tree) -> bool:
    pairs = zip(T.named_leaves(a), T.named_leaves(b), strict=False)
    return len(T.leaves(a)) == len(T.leaves(b)) and all(n == m and torch.equal(u, v) for (n, u), (m, v) in pairs)


def _failed(e: Exception, batch: Batch) -> str:
    x = batch.x
    kind = f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"
    whole, packed = not x.is_floating_point(), "PackedSequence" in str(e)
    fix = "let it take such examples"
    if "must have the same dtype" in str(e) or "expected scalar type" in str(e):
        fix = "make its layers float32, as by net.float(), or turn examples into their type in forward"
    if packed:
        fix = "sequences are not packed here: give the layer all places, and take what its mask lets through of its outputs"
    elif whole and bool((x < 0).any()):
        fix = "they are tokens, and -1 after the end of a text: name the arguments of its forward tokens and mask"
    elif "to have 1 channels, but got 3" in str(e):
        fix = "images have three channels: channels=1 makes them grey where they are read"
    elif whole:
        fix = "they are integers: begin its forward with x.float(), or give floats"
    return f"it fails on {len(batch.weight)} examples of {kind} ({type(e).__name__}: {one_line(e)[:200]}): {fix}"


def _drawn(net: nn.Module) -> str:
    named_layers = ((name, layer) for name, layer in net.named_modules() if isinstance(layer, nn.MultiheadAttention))
    for name, layer in named_layers:
        if layer.dropout:
            return (
                f"its attention {name!r} has dropout={layer.dropout:g}, so make it with 0 (nn.Dropout layers may stay)"
            )
    return "take nn.Dropout, nn.Dropout1d, 2d or 3d, which draw from keys here, in the place of functional dropout and the like"
