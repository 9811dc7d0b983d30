"""The start of a gradient inversion attack: what a curious server has of a client in one round, and what it knows.

It knows the model and whatever else it sent, and the client's code with its rates, steps and batches. It knows how
many examples the client has, what transforms have done to the message, and the range of the examples. To be on the
safe side it also knows what the client draws, such as the order of its examples, but not the noise that is to hide
them. It does not know the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.assembly import task_setup
from fedfleet.assembly.prepared import Prepared
from fedfleet.inversion.differentiable_client import differentiable_client
from fedfleet.inversion.observed_update import Exchange, observed_update, total, upload
from fedfleet.middleware.privacy.gradients import Gradients, private_examples
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import Total
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.uplink import SERVERS, alike, compressible
from fedfleet.simulator.driver.simulate import Position
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.population import decode, gather
from fedfleet.simulator.work import BUFFERS, Message, Phase, only_scales
from fedfleet.tasks.models import first_linear
from fedfleet.tasks.options import named_net

CALLS = 8  # gradients that a step may take
SHOWN = 8  # clients that a refusal names


class Parts(NamedTuple):
    """Places in the vector of all numbers that are sent: of the last layer's biases, and of a first layer's weights and biases."""

    head: slice | None
    first: tuple[slice, slice] | None


class Attacked(NamedTuple):
    """What is set out from, and what would be found.

    Attributes:
        client: whose examples are wanted.
        clients: (k,) those of the sum that is seen, in its order; the client alone where its own message is.
        owner: (n,) whose each example is.
        x, y: all their examples, (n, ...) as the net gets them, and labels (n,).
        observed: (d,) what came, as a difference from the server's own model where it is one.
        compared: (d,) which of these numbers tell something; None for all.
        simulate: examples, labels -> what would have come (d,).
        parts: where in it layers are.
        box: range of test examples.
        blind: (n, ...) what the labels alone tell: means of test examples.
        seen: in words, what the server has.

    """

    client: int
    clients: Tensor
    owner: Tensor
    x: Tensor
    y: Tensor
    observed: Tensor
    compared: Tensor | None
    simulate: Callable[[Tensor, Tensor], Tensor]
    parts: Parts
    box: tuple[float, float]
    blind: Tensor
    seen: str


def check(x: Prepared) -> None:
    """Refuse runs whose clients' examples cannot be looked for. Raises ConfigError."""
    name, task = x.config.algorithm.name, x.config.task.name
    if x.algorithm.asynchronous:
        raise ConfigError(
            f"algorithm.name={name!r}: it is asynchronous, and invert takes a round's first exchange: choose another"
        )
    if BUFFERS in x.z:
        model = named_net(x.config.task).model
        raise ConfigError(
            f"task.model={model!r}: what BatchNorm counts makes examples of a batch depend on one another, and invert knows no "
            f"such nets: choose one without"
        )
    some = gather(x.population.local_data(torch.zeros(1, dtype=torch.int64)).data, torch.zeros(1, dtype=torch.int64))
    if some.keys() != {"x", "y"}:
        raise ConfigError(
            "domains.target: some clients have no labels, and invert rebuilds labelled examples: leave it out"
        )
    if not some["x"].is_floating_point() or some["y"].is_floating_point():
        what = "targets, not labels" if some["x"].is_floating_point() else "whole numbers, such as words"
        raise ConfigError(
            f"task.name={task!r}: its examples have {what}, and invert looks for inputs that are floats, with labels: choose "
            f"classification of images or features"
        )


def attacked(x: Prepared, at: Position, client: int | None, most: int, dtype: torch.dtype = torch.float64) -> Attacked:
    """Return what the server has in the next round of a position, of a client, or of the first that is heard.

    Raises ConfigError for what cannot be attacked, among it clients that are not heard, and more than ``most`` examples; and what
    a round does.
    """
    exchange, setup = observed_update(x.algorithm, at, x.problem, x.conditions()), x.setup()
    wrapped = setup.phases[exchange.phase]
    plain = _as_known(x, task_setup.algorithm(x.config, x.task), exchange.phase)
    _check_phase(x, plain)
    client = _heard(exchange, client, at.index)
    alone = wrapped.secure is None
    clients = torch.tensor([client]) if alone else exchange.clients
    owner, data = _examples(setup, clients)
    counts = torch.stack([(owner == c).sum() for c in clients])
    if len(owner) > most:
        whose = f"client {client} has" if alone else f"the {len(clients)} clients of the sum have"
        raise ConfigError(
            f"--examples {most}: {whose} {len(owner):,} to be rebuilt together: give more (it takes as many times as long), or let "
            f"clients have fewer, such as by population.clients"
        )
    came = upload(setup.placed(), exchange, client) if alone else total(setup.placed(), exchange, plain)
    shared = replace(exchange.shared, known={k: v for k, v in exchange.shared.known.items() if k != SERVERS})
    slots = [s for s, tree in came.items() if alike(tree, shared.send.get(s)) or alike(tree, x.z)]
    if not slots:
        raise ConfigError(
            f"algorithm.name={x.config.algorithm.name!r}: in its first exchange clients send neither models nor gradients but "
            f"{', '.join(came)}: choose another"
        )
    origin = {**shared.send, **exchange.shared.known.get(SERVERS, {})}
    observed = _vector(came, slots, origin, dtype)
    partial = any(getattr(t, "partial", False) for t in wrapped.uplink)
    compared = observed != 0 if partial else None
    simulate = _simulation(x, exchange, plain, wrapped, _cast(shared, dtype), clients.tolist(), counts, slots)
    _check_simulation(x, simulate, data["x"].to(dtype), data["y"])
    test = x.evaluation["test"]
    return Attacked(
        client=client,
        clients=clients,
        owner=owner,
        x=data["x"].to(dtype),
        y=data["y"],
        observed=observed if compared is None else observed[compared],
        compared=compared,
        simulate=simulate if compared is None else lambda x, y: simulate(x, y)[compared],
        parts=Parts(None, None) if compared is not None else _parts(x, came, slots),
        box=_range(test["x"]),
        blind=_blind(test, data["y"]).to(dtype),
        seen=_seen(x, alone, len(clients)),
    )


def _as_known(x: Prepared, algorithm: Algorithm, phase: str) -> Phase:
    """Return the phase as its code is known: where examples are hidden, gradients are clipped, and the noise is not known."""
    if (hides := x.config.example_privacy) is not None:
        stages = {(p.name, i): CALLS for p in algorithm.phases for i in range(len(p.work.loops))}
        made = Gradients(hides.clip_norm, 0.0, drawn=hides.batches == "drawn", calls=stages)
        algorithm = private_examples(algorithm, made)
    return next(p for p in algorithm.phases if p.name == phase)


def _check_phase(x: Prepared, phase: Phase) -> None:
    name = x.config.algorithm.name
    if phase.client_state is not None:
        raise ConfigError(
            f"algorithm.name={name!r}: its clients keep states, which the server does not know: choose another, such as fedavg"
        )
    if not all(stage.batches.works for stage in phase.work.loops):
        raise ConfigError(
            f"algorithm.name={name!r}: its clients look at examples that they hold out, too: choose another, such as fedavg"
        )


def _check_simulation(
    x: Prepared, simulate: Callable[[Tensor, Tensor], Tensor], examples: Tensor, labels: Tensor
) -> None:
    """Refuse client code whose message cannot be differentiated by its examples."""
    try:
        sent = simulate(examples.clone().requires_grad_(), labels)
        why = "" if sent.requires_grad else "it does not depend on them"
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as e:
        why = one_line(e)
    if why:
        name = x.config.algorithm.name
        raise ConfigError(
            f"algorithm.name={name!r}: what a client sends first cannot be differentiated by its examples ({why}): choose another"
        )


def _heard(exchange: Exchange, client: int | None, index: int) -> int:
    heard = exchange.clients.sort().values.tolist()
    if client is None:
        return heard[0]
    if client not in heard:
        few = ", ".join(map(str, heard[:SHOWN])) + (", …" if len(heard) > SHOWN else "")
        raise ConfigError(
            f"--client {client}: it is not heard in round {index}: choose one of {few}, or another --round"
        )
    return client


def _examples(setup: Setup, clients: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the owner of each example (n,), and the examples, client by client, as they learn from them."""
    local = setup.population.local_data(clients)
    real = torch.arange(local.rows.shape[1]) < local.counts[:, None]
    return clients.repeat_interleave(local.counts), gather(local.data, local.rows[real])


def _cast(shared: Message, dtype: torch.dtype) -> Message:
    def cast(v: Any) -> Any:
        return v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v

    trees = {part: T.map(cast, dict(getattr(shared, part))) for part in ("send", "known")}
    return replace(shared, **trees)


def _vector(sent: Mapping[str, Tree], slots: list[str], origin: Mapping[str, Tree], dtype: torch.dtype) -> Tensor:
    """Return all floats of slots (d,), as differences from models that were sent under the same names."""
    result = []
    for slot in slots:
        start = dict(T.named_leaves(origin[slot])) if alike(sent[slot], origin.get(slot)) else {}
        for name, leaf in compressible(sent[slot]).items():
            result.append((leaf.to(dtype) - start[name].to(dtype) if start else leaf.to(dtype)).flatten())
    return torch.cat(result)


def _simulation(
    x: Prepared,
    exchange: Exchange,
    plain: Phase,
    wrapped: Phase,
    shared: Message,
    clients: list[int],
    counts: Tensor,
    slots: list[str],
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what would have come of clients with examples, one client's after another's."""
    uplink = tuple(filter(only_scales, wrapped.uplink))
    works = []
    for client, n in zip(clients, counts.tolist(), strict=True):
        block, row = exchange.place(client)
        client_input = None if block.client_input is None else T.index(block.client_input, row)
        limit = None if block.limit is None else int(block.limit[row])
        key = rng.fold(block.key, client, block.copies[row])
        works.append(differentiable_client(plain, x.task, shared, client_input, n, key, uplink, block.steps, limit))
    weight = counts.double() if plain.weight == "num_examples" else torch.ones(len(counts), dtype=torch.float64)
    adds_up = all(isinstance(plain.reduce[s], Total) for s in slots)
    shares = (torch.ones_like(weight) if adds_up else weight / weight.sum()).tolist()
    sizes = counts.tolist()

    def simulate(x: Tensor, y: Tensor) -> Tensor:
        each = zip(works, x.split(sizes), y.split(sizes), shares if len(works) > 1 else [1.0], strict=True)
        vectors = [
            _vector(work(mine, labels), slots, shared.send, x.dtype) * share for work, mine, labels, share in each
        ]
        return torch.stack(vectors).sum(0) if len(vectors) > 1 else vectors[0]

    return simulate


def _parts(x: Prepared, came: Mapping[str, Tree], slots: list[str]) -> Parts:
    """Return where the last layer's biases are, and a linear first layer, in what is sent of the first slot."""
    places, before = dict[str, slice](), 0
    for name, leaf in compressible(came[slots[0]]).items():
        places[name] = slice(before, before + leaf.numel())
        before += leaf.numel()
    head = [f"x.{name}" for name in getattr(x.task, "leaves", {}).get("head", ()) if name.endswith("bias")]
    net = getattr(x.task, "net", None)
    layer = None if net is None else first_linear(net())
    first = None if layer is None else (f"x.{layer}.weight", f"x.{layer}.bias")
    biases = places.get(head[0]) if head else None
    whole = biases is not None and biases.stop - biases.start == x.examples["classes"]
    return Parts(
        biases if whole else None,
        None if first is None or not places.keys() >= {*first} else (places[first[0]], places[first[1]]),
    )


def _range(x: Tensor) -> tuple[float, float]:
    """Return the least and the largest number of examples as nets get them."""
    ends = decode(torch.stack([x.min(), x.max()]))
    return float(ends[0]), float(ends[1])


def _blind(test: Mapping[str, Tensor], y: Tensor) -> Tensor:
    """Return the mean test example of each label of y (n,); of a label that has none, of all."""
    known = {label: test["x"][test["y"] == label] for label in set(y.tolist())}
    means = {label: decode(few if len(few) else test["x"]).double().mean(0) for label, few in known.items()}
    return torch.stack([means[label] for label in y.tolist()])


def _seen(x: Prepared, alone: bool, clients: int) -> str:
    """Say what the server has, and where noise comes in."""
    config = x.config
    what = "what the client sent" if alone else f"the sum of what {clients} clients sent (secure aggregation)"
    if config.transforms.up:
        what += f", through {', '.join(t.name for t in config.transforms.up)}"
    if config.example_privacy is not None:
        what += ", whose gradients are noised by the client (example_privacy)"
    if config.privacy is not None:
        noise = config.privacy.noise
        of = "its part of the noise" if noise == "clients" else "no noise: the server adds that itself, to the sum"
        what += f", clipped to {config.privacy.clip_norm:g}, with {of} (privacy.noise={noise})"
    if x.attack is not None:
        what += f", in a run with attackers ({config.attack.kind})"
    return what
