"""Attacks on a run: their needs and breaks, the attackers, and the run that is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.middleware.attacks.attacked import attacked
from fedfleet.middleware.attacks.attackers import Attackers, drawn
from fedfleet.middleware.attacks.kinds.base import Attack, NoAttack
from fedfleet.middleware.attacks.poisoned import Poisoned
from fedfleet.middleware.facts import Break, Fact, Need
from fedfleet.simulator.algorithm import Algorithm, Task
from fedfleet.simulator.driver.evaluation import AIMED_AT, measure
from fedfleet.simulator.errors import ConfigError, show
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
        result = {}
        for name, split in AIMED_AT.items() if self.attack.poisons else ():
            if (test := evaluation.get(split)) is not None:
                x, y = self.attack.aimed(test["x"], test["y"], self.classes)
                result[name] = {"x": x, "y": y}
        return result


def needs(options: NoAttack) -> Iterator[Need]:
    """Yield what an attack needs."""
    if options.colludes:
        yield Need(_called(options), (Fact.AVERAGED, Fact.EACH_SEEN, Fact.OWN_ROUND), "attack")
    if options.poisons:
        yield Need(_called(options), (Fact.LABELLED,), "attack")


def breaks(options: NoAttack) -> Iterator[Break]:
    """Yield what an attack takes away."""
    if options.colludes:
        yield Break(Fact.COMPUTED, "attackers send what they have made together", _called(options), "choose sign_flip")
    if options.poisons:
        yield Break(Fact.CLEAN, "attackers learn from other examples", _called(options), "choose sign_flip")


def _called(given: Any) -> str:
    return f"attack.kind={given.kind!r}"


def placed(
    attack: NoAttack, task: Task, clients: int, seed: int, test: Mapping[str, Tensor], classes: int
) -> Attacking | None:
    """Return an attack on so many clients of a task, with test examples; None where nobody attacks. Raises ConfigError."""
    if not isinstance(attack, Attack):
        return None
    if attack.poisons:
        _check_poison(attack, task, seed, test, classes)
    attackers = _attackers(attack, clients, seed)
    return Attacking(attackers, attack, classes, seed) if len(attackers) else None


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
    result = drawn(seed, clients, share)
    if share and not len(result):
        raise ConfigError(f"attack.share={share:g}: of {clients} clients that is nobody: raise it")
    return result


def _check_poison(attack: Attack, task: Task, seed: int, test: Mapping[str, Tensor], classes: int) -> None:
    """Refuse examples that cannot be poisoned, or whose effect could not be told. Raises ConfigError."""
    kind = _called(attack)
    try:
        attack.check(test["x"], classes)
    except ValueError as e:
        raise ConfigError(f"attack.{e}") from None
    if not _tells_accuracy(task, seed, test):
        raise ConfigError(
            f"{kind}: the task measures no accuracy, which tells an attack's success: choose "
            f"classification, or sign_flip"
        )
    if not len(attack.aimed(test["x"], test["y"], classes)[1]):
        raise ConfigError(f"{kind}: no test example has a label that the attack is aimed at: choose another label")


def _tells_accuracy(task: Task, seed: int, test: Mapping[str, Tensor]) -> bool:
    if getattr(task, "measured", None) is not None:
        return "accuracy" in getattr(task, "measured", ())
    few: dict[str, Any] = gather(test, torch.arange(min(FEW, len(test["y"]))))
    with torch.no_grad():
        try:
            outputs = task.functions["predict"](task.init(seed), Batch(few, torch.ones(len(few["y"]))))
            return "accuracy" in measure(task, outputs, few)
        except Exception:  # the run itself will say what is wrong
            return False
