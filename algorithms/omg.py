"""FedOMG: on-server matching of gradients, in the place of the mean of any algorithm that averages models or differences.

Nguyen, Nguyen, Park, Pham & Hwang, "Federated domain generalization with data-free on-server matching gradient", ICLR 2025,
Algorithm 1; ``matching.py`` has its formulas.

    paper                here
    Delta_u              theta_u - theta_g, what client u's model moved by
    w_u                  the phase's weights: clients' numbers of examples, or alike, as ``of`` says
    kappa, eta_g         kappa, server_lr

    server    theta_g <- theta_g + eta_g g_IGD (divided by 1 + kappa^2 in the released code, rescale)

In the paper the sign of the step is the other, of updates of the same sign, which would be ascent (its Eq. 17); the released code
adds. What layers count is averaged, and enters no inner product.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fedfleet.algorithms.matching import coefficients, exact_mixture, mixture
from fedfleet.algorithms.options import CohortOptions, refuse_others
from fedfleet.algorithms.wrapping import Exchange, WrapperOptions, instead, wrapped
from fedfleet.simulator.author import BUFFERS, Algorithm, ConfigError, Task, Tree

NAME = "omg"


class OmgOptions(WrapperOptions):
    """Options of FedOMG."""

    kappa: float = Field(default=0.5, ge=0, lt=1)
    """Radius, as a share of the mean update's norm, of where the step is sought; 0 is the algorithm itself."""
    server_lr: float = Field(default=1.0, gt=0)
    """What the step is multiplied by, eta_g: 0.05 in the paper's Table 4 for domains, 1 in the released code for clients."""
    rescale: Literal["none", "one_plus_kappa", "one_plus_kappa2"] = "none"
    """Divide the step by nothing, by 1 + kappa, which leaves equal updates as they are, or by 1 + kappa^2, as released."""
    solver: Literal["paper", "exact"] = "paper"
    """The search for the mixture: the paper's gradient descent, which with many clients ends far from it; or exact, to rounding."""
    updates: int = Field(default=20, ge=1)
    """Steps of the paper's search; one more evaluation is made."""
    buffers: Literal["mean", "frozen"] = "mean"
    """Average what layers keep count of, or leave it as it was in the beginning, as in the released code."""

    @model_validator(mode="after")
    def _applies(self) -> OmgOptions:
        if self.solver == "exact":
            refuse_others(self, "solver=exact", set(), {"updates"})
        return self

    @property
    def shrink(self) -> float:
        """What the step is divided by."""
        return {"none": 1.0, "one_plus_kappa": 1 + self.kappa, "one_plus_kappa2": 1 + self.kappa**2}[self.rescale]


def omg(options: OmgOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build an algorithm with matching in the place of its mean."""
    inner = wrapped(options, task, cohort, "matching")
    if options.buffers == "frozen" and BUFFERS not in task.parts:
        raise ConfigError("algorithm.buffers='frozen': the net's layers keep count of nothing: leave it out")
    if options.kappa == 0 and options.server_lr == 1 and options.buffers == "mean":
        return inner

    return instead(inner, NAME, lambda given: matched(options, given))


def matched(options: OmgOptions, given: Exchange) -> Tree:
    """Return the model, or the difference, that the uploads come to."""
    gram, weights = given.gram(), given.shares
    if options.solver == "exact":
        gamma = exact_mixture(gram, weights, options.kappa)
    else:
        gamma = mixture(gram, weights, options.kappa, options.updates)
    step = coefficients(gram, weights, gamma, options.kappa)
    scale = options.server_lr / options.shrink
    return given.moved(step * scale, None if options.buffers == "frozen" else weights)
