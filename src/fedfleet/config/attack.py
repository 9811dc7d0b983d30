"""Who attacks, and how: what is refused before a run, and what the run is then made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.attacks.base import Attack
from fedfleet.config.reading import show
from fedfleet.config.schema import Config
from fedfleet.simulator.algorithm import Algorithm, Task
from fedfleet.simulator.attackers import Attackers, drawn
from fedfleet.simulator.driver.attacked import attacked, can_collude
from fedfleet.simulator.driver.evaluation import AIMED_AT, measure
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.poisoned import Poisoned
from fedfleet.simulator.population import Population, gather
from fedfleet.simulator.work import Batch

DRAWN_UP_TO = 10_000_000
"""Clients above which no share of them is drawn."""
FEW = 16  # examples that a task is asked about


class Attacking(NamedTuple):
    """An attack under way: who attacks, how, on examples of how many classes, drawn from a seed."""

    attackers: Attackers
    attack: Attack
    classes: int
    seed: int

    def on(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm under attack."""
        forge = self.attack.forged if self.attack.forges else None
        return attacked(algorithm, self.attackers, forge, self.attack.colluded if self.attack.colludes else None)

    def clients(self, population: Population) -> Population:
        """Return the clients, the attackers' examples poisoned if that is how they attack."""
        attack, classes = self.attack, self.classes
        if not attack.poisons:
            return population

        def poison(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return attack.poison(x, y, classes)

        return Poisoned(population, self.attackers, poison, attack.poisoned_share, self.seed)

    def splits(self, evaluation: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return what the attack's success is measured on, for each split of test examples."""
        found = {}
        for name, split in AIMED_AT.items() if self.attack.poisons else ():
            if (test := evaluation.get(split)) is not None:
                x, y = self.attack.aimed(test["x"], test["y"], self.classes)
                found[name] = {"x": x, "y": y}
        return found


def check_early(config: Config, algorithm: Algorithm) -> None:
    """Refuse an attack that the algorithm, or what is asked for besides, leaves no room for. Raises ConfigError."""
    attack, name = config.attack, config.algorithm.name
    if not isinstance(attack, Attack):
        return
    kind = f"attack.kind={config.attack.kind!r}"
    if attack.colludes and not can_collude(algorithm):
        raise ConfigError(
            f"{kind}: attackers replace models, or what they moved by, that are averaged or kept in a cohort, and clients of "
            f"{name} send none: choose fedavg or another that averages, or sign_flip"
        )
    if attack.colludes and config.privacy is not None:
        raise ConfigError(f"{kind}: what attackers have computed together is not clipped here: leave it or privacy out")
    if attack.colludes and config.cohort.late == "keep":
        raise ConfigError(f"{kind}: attackers know what is sent in this round, and cohort.late='keep': leave it out")
    if attack.colludes and config.evaluation.cosines:
        raise ConfigError(
            f"evaluation.cosines=true: with {kind} they would be of what attackers have computed, not of what they send: leave "
            f"it out"
        )
    if attack.poisons and config.evaluation.duality_gap:
        raise ConfigError(f"evaluation.duality_gap=true: with {kind} no model is the best for all: leave it out")


def placed(config: Config, task: Task, clients: int, test: Mapping[str, Tensor], classes: int) -> Attacking | None:
    """Return the attack of a configuration on so many clients; None where nobody attacks. Raises ConfigError."""
    attack: Any = config.attack
    if not isinstance(attack, Attack):
        return None
    if attack.poisons:
        _check_poison(config, attack, task, test, classes)
    attackers = _attackers(attack, clients, config.seed)
    return Attacking(attackers, attack, classes, config.seed) if len(attackers) else None


def _attackers(attack: Attack, clients: int, seed: int) -> Attackers:
    if attack.clients is not None:
        if max(attack.clients) >= clients:
            raise ConfigError(
                f"attack.clients={show(list(attack.clients))}: clients are 0 to {clients - 1}: leave out what is above"
            )
        return Attackers(torch.tensor(sorted(attack.clients)))
    share = attack.share or 0.0
    if clients > DRAWN_UP_TO:
        raise ConfigError(
            f"attack.share={share:g}: drawn of {clients:,} clients, and up to {DRAWN_UP_TO:,} may be: give attack.clients"
        )
    found = drawn(seed, clients, share)
    if share and not len(found):
        raise ConfigError(f"attack.share={share:g}: of {clients} clients that is nobody: raise it")
    return found


def _check_poison(config: Config, attack: Attack, task: Task, test: Mapping[str, Tensor], classes: int) -> None:
    """Refuse examples that cannot be poisoned, or whose effect could not be told. Raises ConfigError."""
    kind = f"attack.kind={config.attack.kind!r}"
    if config.domains.asked:
        raise ConfigError(f"{kind}: clients of domains.target have no labels to poison: leave it out")
    try:
        attack.check(test["x"], classes)
    except ValueError as e:
        raise ConfigError(f"attack.{e}") from None
    if not _tells_accuracy(task, config, test):
        raise ConfigError(
            f"{kind}: task.name={config.task.name!r} measures no accuracy, which tells an attack's success: choose "
            f"classification, or sign_flip"
        )
    if not len(attack.aimed(test["x"], test["y"], classes)[1]):
        raise ConfigError(f"{kind}: no test example has a label that the attack is aimed at: choose another label")


def _tells_accuracy(task: Task, config: Config, test: Mapping[str, Tensor]) -> bool:
    if getattr(task, "measured", None) is not None:
        return "accuracy" in getattr(task, "measured", ())
    few: dict[str, Any] = gather(test, torch.arange(min(FEW, len(test["y"]))))
    with torch.no_grad():
        try:
            outputs = task.functions["predict"](task.init(config.seed), Batch(few, torch.ones(len(few["y"]))))
            return "accuracy" in measure(task, outputs, few)
        except Exception:  # the run itself will say what is wrong
            return False
