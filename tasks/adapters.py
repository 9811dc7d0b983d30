"""Low-rank adapters: a net whose weights are constants, and small matrices beside them that are learnt and travel.

Hu et al., "LoRA: low-rank adaptation of large language models", ICLR 2022. A linear layer W (o x i) becomes

    h = W x + s B A x,    A (r x i) drawn as PEFT draws it (Kaiming uniform, a = √5), B (o x r) zero, s = alpha / r

    paper                                          here
    A, B, r, alpha                                 ``lora_A.weight``, ``lora_B.weight``, ``rank``, ``alpha``
    s = alpha / √r (rsLoRA, Kalajdzievski 2023)    ``scaling: rslora``
    A drawn once, B alone learnt (FFA-LoRA,        ``learn: B``: A is a constant, the same for all and for every seed, so a mean
      Sun et al., ICLR 2024)                       of Bs is the mean of the B A, which of As and Bs (FedIT) it is not

Leaves have the names that PEFT gives them. What is not learnt is a constant of the net (``stateful.py``): all clients of a worker
share it, it is sent to a worker once, and no message, client's state, optimiser or checkpoint holds it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.errors import ConfigError
from fedfleet.tasks.maker import Maker
from fedfleet.tasks.options import AdapterOptions
from fedfleet.tasks.weights_file import read_weights

FEW = 8  # names that are told
CONV1D = "Conv1D"  # GPT-2's linear layer, whose weight is (i, o)


class Lora(nn.Module):
    """A linear layer that is a constant, and its adapter."""

    def __init__(self, base: nn.Module, options: AdapterOptions):
        super().__init__()
        (width, height), dtype = sizes(base), next(base.parameters()).dtype
        self.base_layer, self.scale = base, options.scale
        self.lora_dropout = nn.Dropout(options.dropout)
        self.lora_A = nn.Linear(width, options.rank, bias=False, dtype=dtype)  # torch draws it as PEFT does
        self.lora_B = nn.Linear(options.rank, height, bias=False, dtype=dtype)
        nn.init.zeros_(self.lora_B.weight)
        self.lora_A.weight.requires_grad_(options.learn == "both")

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b + s B A x (..., o) of x (..., i)."""
        return self.base_layer(x) + self.scale * self.lora_B(self.lora_A(self.lora_dropout(x)))

    def merged(self) -> nn.Module:
        """Return the linear layer of weight W + s B A."""
        layer: Any = self.base_layer
        change = self.scale * (self.lora_B.weight @ self.lora_A.weight).detach()
        layer.weight = nn.Parameter(layer.weight.detach() + (change.T if is_conv1d(layer) else change))
        return layer


def is_conv1d(layer: nn.Module) -> bool:
    """Say whether a layer is a linear one of Hugging Face's with its weight the other way round."""
    return type(layer).__name__ == CONV1D


def is_linear(layer: nn.Module) -> bool:
    """Say whether a layer can have an adapter; not torch's attention, which takes its weights past its layers."""
    return type(layer) is nn.Linear or is_conv1d(layer)


def sizes(layer: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer."""
    return tuple(layer.weight.shape) if is_conv1d(layer) else tuple(reversed(layer.weight.shape))


@dataclass(frozen=True)
class Adapted:
    """Makes a net with adapters, as a ``Maker`` makes nets: for one seed the same adapters, and for all seeds one base.

    All nets that it has made share the tensors of the base. Of ``heads``, names of layers, those that the net has are learnt whole
    if nothing is said.
    """

    plain: Maker
    adapters: AdapterOptions
    key: str = "task.adapters"
    heads: tuple[str, ...] = ()
    _kept: dict[str, nn.Module] = field(default_factory=dict, compare=False, repr=False)

    @property
    def said(self) -> str:
        """Return how messages call it."""
        return self.plain.said

    @property
    def name(self) -> str:
        """Return what makes the net, by its name."""
        return self.plain.name

    @property
    def offered(self) -> Mapping[str, Any]:
        """Return what the plain maker is told."""
        return self.plain.offered

    def __call__(self, seed: int) -> nn.Module:
        """Return a new net in its training mode. Raises ConfigError."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(crc32(f"adapters {seed}".encode()))  # not what the base has drawn
            return adapted(self._base(), self.adapters, self.key, self.heads)

    def digest(self) -> str:
        """Return what tells the base from others: the SHA-256 of its weights and buffers."""
        return digest("", self._base().state_dict())

    def _base(self) -> nn.Module:
        if (kept := self._kept.get("base")) is None:
            given = self.plain.make
            kept = given if isinstance(given, nn.Module) else self.plain(0)
            kept.requires_grad_(requires_grad=False)
            if torch.get_default_device().type == "meta":  # floats are only counted
                return kept
            if self.adapters.base is not None:
                load(kept, self.adapters.base, f"{self.key}.base")
            self._kept["base"] = kept
        return kept


def adapted(base: nn.Module, options: AdapterOptions, key: str, heads: Iterable[str] = ()) -> nn.Module:
    """Return a copy of a net that shares its tensors, all constants, with adapters drawn from torch's generator.

    Raises ConfigError where a name is of no such layer, or the rank is not below a layer's sizes.
    """
    shared = {id(t): t for t in [*base.parameters(), *base.buffers()]}
    net = copy.deepcopy(base, shared).train()
    for layer in net.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()  # by the statistics of the base, which nobody counts on
    there = {name.rpartition(".")[2] for name, _ in net.named_modules()}
    full = [name for name in heads if name in there] if options.full is None else options.full
    whole = _found(net, full, f"{key}.full", lambda layer: bool([*layer.parameters()]), "layer with weights")
    for name in whole:
        for child in net.get_submodule(name).modules():
            for leaf, p in child.named_parameters(recurse=False):
                setattr(child, leaf, nn.Parameter(p.detach().clone()))
    linear = {name: layer for name, layer in net.named_modules() if is_linear(layer)}
    places = {name: layer for name, layer in linear.items() if not _within(name, whole)}
    if options.targets is not None:
        wanted = _found(net, options.targets, f"{key}.targets", is_linear, "linear layer")
        if both := [name for name in wanted if name not in places]:
            raise ConfigError(f"{key}.full: {both[0]!r} is learnt whole, and has an adapter too: leave it out of one")
        places = {name: places[name] for name in wanted}
    elif len(places) > 1:
        places.pop([*linear][-1], None)  # PEFT's all-linear does without it, too
    if not places:
        raise ConfigError(
            f"{key}: the net has no linear layer that could have an adapter: leave it out, or take another net"
        )
    made: dict[int, nn.Module] = {}
    for name, layer in places.items():
        if options.rank >= min(sizes(layer)):
            i, o = sizes(layer)
            raise ConfigError(
                f"{key}.rank={options.rank}: layer {name!r} of {i} inputs and {o} outputs has no larger rank itself: lower it, or "
                f"leave the layer out of {key}.targets"
            )
        made[id(layer)] = Lora(layer, options)
    return put(net, made)


def put(net: nn.Module, made: Mapping[int, nn.Module]) -> nn.Module:
    """Put others in the place of some layers, by their ids, wherever they are in a net."""
    if id(net) in made:
        return made[id(net)]
    for parent in [*net.modules()]:
        for name, child in parent._modules.items():
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    return net


def plain(net: nn.Module) -> nn.Module:
    """Return a net without adapters; one that has some as a copy, in whose weights they are, all to be learnt."""
    if not any(isinstance(layer, Lora) for layer in net.modules()):
        return net
    net = copy.deepcopy(net)  # the base is others', too
    return put(net, {id(layer): layer.merged() for layer in net.modules() if isinstance(layer, Lora)}).requires_grad_()


def load(net: nn.Module, path: str, key: str) -> None:
    """Put weights of a file into a net. Raises ConfigError where they are not its own."""
    result = read_weights(path, f"{key}={path}")
    if all(name.partition(".")[0] in ("x", "b") for name in result):  # a run's
        result = {name.partition(".")[2]: leaf for name, leaf in result.items()}
    try:
        missing, strange = net.load_state_dict(result, strict=False)
    except RuntimeError as e:
        raise ConfigError(
            f"{key}={path}: it does not fit the net ({str(e).splitlines()[-1].strip()}): give the net's own"
        ) from None
    lacking = sorted({name for name, _ in net.named_parameters()} & {*missing})
    if lacking or strange:
        what = f"lacks {lacking[0]!r}" if lacking else f"has {strange[0]!r}"
        raise ConfigError(f"{key}={path}: it {what}, unlike the net: give weights of the same task.model")


def _within(name: str, layers: Iterable[str]) -> bool:
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def _found(net: nn.Module, wanted: Iterable[str], key: str, fits: Callable[[nn.Module], bool], what: str) -> list[str]:
    """Return the names of layers that are so called or end so. Raises ConfigError for one that is of none."""
    there = {name: layer for name, layer in net.named_modules() if name}
    result: dict[str, None] = {}
    for each in wanted:
        called = [name for name in there if name == each or name.endswith(f".{each}")]
        here = [name for name in called if fits(there[name])]
        if not here:
            known = dict.fromkeys(name for name, layer in there.items() if fits(layer))
            why = (
                f"{called[0]!r} is a {type(there[called[0]]).__name__}"
                if called
                else f"no {what} is called so or ends so"
            )
            more = ", …" if len(known) > FEW else ""
            raise ConfigError(f"{key}={each!r}: {why}: take of {', '.join([*known][:FEW]) or 'none'}{more}")
        result |= dict.fromkeys(here)
    return [*result]
