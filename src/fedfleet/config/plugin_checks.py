"""Checks of an author's own models of clients and server before a run: a few clients, twice, together and one by one.

Each check returns what it was told, by name, since another model made of the same seed has to say the same. It raises
ConfigError, or Impure for a model that is not a function of what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.algorithm import Problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.side_effects import Impure, repeated, untouched
from fedfleet.simulator.driver.codec import encode
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.availability import Chances
from fedfleet.simulator.fleet.devices import Load, Times
from fedfleet.simulator.population import Population

FEW = 64  # clients that are asked about
HOUR_S = 3600.0
ROUNDS = (0, 3, 1000)  # that a process in rounds is asked about
Told = Mapping[str, Tensor]


def _few(population: Population) -> Tensor:
    """Return clients from the first to the last."""
    return torch.linspace(0, population.size - 1, min(FEW, population.size), dtype=torch.float64).long()


def _needs(x: Any, *wanted: str) -> None:
    lacking = [name for name in wanted if not callable(getattr(x, name, None))]
    if isinstance(x, type) or lacking:
        what = (
            f"the class {x.__name__} itself" if isinstance(x, type) else f"a {type(x).__name__} without {lacking[0]!r}"
        )
        raise ConfigError(f"{what}: return an object with {', '.join(wanted)}")


def _alone(who: str, ask: Callable[[Tensor], Tensor], clients: Tensor) -> Tensor:
    """Return the answers of clients (S,), the same when asked again, of each alone and in another order. Raises Impure."""
    result = ask(torch.arange(len(clients)))
    alone = torch.cat([ask(place) for place in torch.arange(len(clients)).split(1)])
    turned = ask(torch.arange(len(clients)).flip(0)).flip(0)
    if not (torch.equal(result, alone) and torch.equal(result, turned)):
        raise Impure(
            f"{who} says something else of a client when others are asked about with it, so that who is asked would change the "
            f"rest: make it a function of the key, the client and the moment alone"
        )
    return result


def check_online(model: Any, population: Population) -> Told:
    """Try a model of availability; a process in rounds in some of them."""
    if not hasattr(model, "during"):
        return _check_online(model, population)
    _needs(model, "during")
    each = {t: _check_online(model.during(t), population) for t in ROUNDS}
    return {f"{name} in round {t}": result for t, told in each.items() for name, result in told.items()}


def _check_online(model: Any, population: Population) -> Told:
    _needs(model, "online")
    key, clients = rng.fold(rng.key(0), "trial"), _few(population)
    seconds = torch.arange(len(clients), dtype=torch.float64) * HOUR_S
    keys, who = rng.fold(key, torch.zeros_like(clients)), "its 'online'"

    def online(at: Tensor, keys: Tensor = keys) -> Tensor:
        return model.online(keys[at] if keys.dim() else keys, clients[at], seconds[at])

    every = torch.arange(len(clients))
    result = repeated(who, lambda: online(every, key), model)
    if not isinstance(result, Tensor) or result.dtype != torch.bool or result.shape != clients.shape:
        raise ConfigError(f"{who} returned {_kind(result)} for {len(clients)} clients: return bool ({len(clients)},)")
    _alone(who, lambda at: online(at, key), clients)
    told = {"online": result, "each by its key": _alone(who, online, clients)}
    return {**told, **(_check_chances(model, clients, seconds) if isinstance(model, Chances) else {})}


def _check_chances(model: Chances, clients: Tensor, seconds: Tensor) -> Told:
    """Try the chances that a model tells."""

    def chance(at: Tensor) -> Tensor:
        return model.chance(clients[at], seconds[at], seconds[at] / 2)

    asked = {"chance": chance, "long_run": lambda at: model.long_run(clients[at])}
    for name, ask in asked.items():
        result = repeated(f"its {name!r}", lambda ask=ask: ask(torch.arange(len(clients))), model)
        shaped = isinstance(result, Tensor) and result.dtype == torch.float64 and result.shape == clients.shape
        if not shaped or not bool(((result >= 0) & (result <= 1)).all()):
            raise ConfigError(
                f"its {name!r} returned {_kind(result)} for {len(clients)} clients: return float64 ({len(clients)},), from 0 to 1"
            )
    return {name: _alone(f"its {name!r}", ask, clients) for name, ask in asked.items()}


def check_times(model: Any, population: Population) -> Told:
    """Try a model of devices."""
    _needs(model, "times")
    clients, who = _few(population), "its 'times'"
    keys = rng.fold(rng.fold(rng.key(0), "trial"), clients)
    steps = torch.arange(len(clients)) % 3 + 1

    def times(at: Tensor) -> Times:
        return model.times(keys[at], clients[at], Load(steps[at], 5 * steps[at], 1e6, 1e6, 1e6))

    every = torch.arange(len(clients))
    result = repeated(who, lambda: times(every), model, tuple)
    for part in result if isinstance(result, Times) else (result,):
        shaped = isinstance(part, Tensor) and part.dtype == torch.float64 and part.shape == clients.shape
        if not shaped or not bool((part.isfinite() & (part >= 0)).all()):
            raise ConfigError(
                f"{who} returned {_kind(part)} for {len(clients)} clients: return "
                f"fedfleet.simulator.fleet.devices.Times of float64 ({len(clients)},), finite and not below 0"
            )
    return {name: _alone(who, lambda at, name=name: getattr(times(at), name), clients) for name in Times._fields}


def check_selection(model: Any, problem: Problem, size: int) -> Told:
    """Try a selection of ``size`` clients."""
    _needs(model, "init", "invite", "observe")
    if not isinstance(getattr(model, "feedback", None), bool):
        raise ConfigError("it does not say whether it learns from losses: give it feedback, true or false")
    state, key, who = model.init(), rng.fold(rng.key(0), "trial"), "its 'invite'"
    encode(state)
    with untouched(who, state):
        result = repeated(who, lambda: model.invite(state, key, size, problem, replace=False), model, lambda x: x[0])[0]
    if not isinstance(result, Tensor) or result.dtype != torch.int64 or result.dim() != 1:
        raise ConfigError(
            f"{who} returned {_kind(result)}: return the numbers of clients, int64 (S,), and the new state"
        )
    if bool(((result < 0) | (result >= problem.clients)).any()) or len(result.unique()) < len(result):
        raise ConfigError(
            f"{who} named clients twice, or such as there are not: each of 0 … {problem.clients - 1} once at most"
        )
    return {"invited": result}


def check_transform(x: Any) -> None:
    """Refuse what is no transform. What it does is tried with the work of clients."""
    _needs(x, "encode")
    if not isinstance(getattr(x, "error_feedback", None), bool):
        raise ConfigError(
            "it does not say whether a client remembers what is lost: give it error_feedback, true or false"
        )


def _kind(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else f"a {type(x).__name__}"
