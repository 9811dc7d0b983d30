"""The ascent player of agnostic learning: mixture weights lambda over domains, and how they move.

Mohri, Sivek & Suresh, "Agnostic federated learning", ICML 2019: Eq. (6), section 4 and Figure 3. The entropy mirror map and
the best response are reconstructions of what its appendix announces.

    paper                 here
    Lambda                lambda_set
    m_bar                 sizes / sizes.sum()
    gamma_lambda          lr
    mu                    chi2, with chi2_sign
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms import lambda_sets
from fedfleet.algorithms.lambda_sets import LEAST, Bonus, Capped, Hull, LambdaSet, Simplex
from fedfleet.algorithms.options import Options
from fedfleet.simulator.author import ConfigError


class SetOptions(Options):
    """The mixtures that are allowed, Lambda."""

    kind: Literal["simplex", "capped", "hull", "sizes"] = "simplex"
    """simplex: all, or all of some domains; capped: each domain between ``low`` and ``high`` times its share of the examples;
    hull: the mixtures of ``vertices``, of one, that one; sizes: the shares of the examples alone, plain empirical risk."""
    domains: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """simplex only: those that may have weight; all if not given."""
    low: float = Field(default=0.0, ge=0, le=1)
    high: float = Field(default=2.0, ge=1)
    """capped only; ``high`` is a bound of the skewness too."""
    vertices: Annotated[list[list[Annotated[float, Field(ge=0, le=1)]]], Field(min_length=1)] | None = None
    """hull only: rows of a weight a domain."""

    @model_validator(mode="after")
    def _whole(self) -> SetOptions:
        if self.kind == "hull" and self.vertices is None:
            raise ValueError("kind: hull needs vertices, rows of a weight a domain")
        own = {"simplex": {"domains"}, "capped": {"low", "high"}, "hull": {"vertices"}, "sizes": set()}[self.kind]
        given = (k for k, v in SetOptions.model_fields.items() if k != "kind" and getattr(self, k) != v.default)
        if others := [k for k in given if k not in own]:
            raise ValueError(f"{others[0]} does not belong to kind: {self.kind}: set another kind, or leave it out")
        return self


class DualOptions(Options):
    """How lambda moves."""

    kind: Literal["euclidean", "entropy"] = "euclidean"
    """Projected ascent; or exponentiated gradient ascent."""
    lr: float = Field(default=0.01, ge=0)
    """Step, gamma_lambda."""
    start: Literal["sizes", "uniform"] = "sizes"
    """lambda_0: in proportion to the domains' examples, or all alike; the nearest to it in the set."""
    lambda_set: SetOptions = SetOptions()
    chi2: float = Field(default=0.0, ge=0)
    """Weight mu of chi2(lambda || sizes)."""
    chi2_sign: Literal["minus", "plus"] = "minus"
    """minus: keeps lambda near the sizes, strongly concave; plus: as Eq. (6) is printed, which favours small domains."""


class Dual(NamedTuple):
    """The mixtures that are allowed, and the rule by which lambda moves among them."""

    options: DualOptions
    set: LambdaSet
    sizes: Tensor
    bonus: Bonus | None

    @staticmethod
    def of(options: DualOptions, examples: Tensor) -> Dual:
        """Return the rule for domains with so many ``examples`` (p,). Raises ConfigError."""
        sizes = examples.double()
        if not sizes.all():
            raise ConfigError(
                f"domain {int(sizes.argmin())} has no client: use population.partition=by_domain, or more population.clients"
            )
        bonus = None
        try:
            result = _set(options, sizes)
            if options.chi2 and options.chi2_sign == "plus":
                bonus = lambda_sets.bonus(result, sizes, options.chi2)
        except ValueError as e:
            raise ConfigError(f"algorithm.dual: {e}") from None
        if options.kind == "entropy" and not isinstance(result, Simplex | Capped):
            raise ConfigError("algorithm.dual.kind='entropy': needs a simplex or a capped one: set it to euclidean")
        return Dual(options, result, sizes, bonus)

    def start(self) -> Tensor:
        """Return lambda_0 (p,)."""
        return lambda_sets.initial(
            self.set, self.sizes if self.options.start == "sizes" else torch.ones_like(self.sizes)
        )

    def gradient(self, losses: Tensor, mixture: Tensor) -> Tensor:
        """Return the gradient of the regularised objective by lambda (p,), constants left out."""
        if self.options.chi2 and self.options.chi2_sign == "minus":
            return losses - 2 * self.options.chi2 * mixture * self.sizes.sum() / self.sizes
        return losses if self.bonus is None else losses + self.bonus.gradient(mixture)

    def step(self, mixture: Tensor, gradient: Tensor, lr: float | None = None) -> Tensor:
        """Return the mixture after one step of ascent."""
        lr = self.options.lr if lr is None else lr
        if self.options.kind == "euclidean":
            return self.set.project(mixture + lr * gradient)
        assert isinstance(self.set, Simplex | Capped)
        logs = mixture.clamp(min=LEAST).log()  # a weight of 0 could not come back
        return self.set.project_entropy(logs + lr * gradient)

    def best(self, losses: Tensor) -> Tensor:
        """Return the mixture under which the regularised objective is largest. Raises ConfigError where that is not known."""
        if not (self.options.chi2 and self.options.chi2_sign == "minus"):
            return (self.bonus or self.set).best(losses)
        if not (isinstance(self.set, Simplex) and self.set.members.all()):
            raise ConfigError(
                "algorithm.dual.chi2_sign='minus': the best response to it is known on the whole simplex only"
            )
        return lambda_sets.soft_best(losses, self.sizes, self.options.chi2)

    def value(self, losses: Tensor) -> float:
        """Return the agnostic loss of a model with these losses (p,), the regulariser included."""
        return float(self.at(self.best(losses), losses))

    def at(self, mixture: Tensor, losses: Tensor) -> Tensor:
        """Return the loss under a mixture, the regulariser included."""
        minus = self.options.chi2 if self.options.chi2_sign == "minus" else 0.0
        plus = 0.0 if self.bonus is None else self.bonus.value(mixture)
        return mixture @ losses + plus - minus * lambda_sets.chi2(mixture, self.sizes)


def _set(options: DualOptions, sizes: Tensor) -> LambdaSet:
    count, shares, wanted = len(sizes), sizes / sizes.sum(), options.lambda_set
    if wanted.kind == "capped":
        return Capped(wanted.low * shares, (wanted.high * shares).clamp(max=1.0))
    if wanted.kind == "simplex":
        if wrong := [k for k in wanted.domains or () if k >= count]:
            raise ValueError(f"lambda_set.domains: there is no domain {wrong[0]}, they are 0 to {count - 1}")
        return lambda_sets.simplex(count) if wanted.domains is None else lambda_sets.face(wanted.domains, count)
    if wanted.vertices is None or wanted.kind == "sizes":
        return Hull(shares[None])
    if wrong := [i for i, row in enumerate(wanted.vertices) if len(row) != count]:
        row = wanted.vertices[wrong[0]]
        raise ValueError(f"lambda_set.vertices: row {wrong[0]} has {len(row)} weights for {count} domains")
    return Hull(torch.tensor(wanted.vertices, dtype=torch.float64))
