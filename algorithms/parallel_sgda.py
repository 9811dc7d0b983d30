"""Parallel SGDA: the server takes one descent-ascent step along the mean of the clients' full local gradients.

The baseline of CDMA's experiments (AAAI 2023), where it is CDMA-ONE with K = 1.

    z_{t+1} = (x_t - eta * mean_i grad_x f_i(z_t),  y_t + gamma * mean_i grad_y f_i(z_t))
"""

from __future__ import annotations

from pydantic import Field

from fedfleet.algorithms.local import full_local, gradient_at_z
from fedfleet.algorithms.options import AlgorithmOptions, CohortOptions, Schedule
from fedfleet.algorithms.participation import Correction, correcting
from fedfleet.simulator.author import Algorithm, Key, Mean, Message, Phase, Problem, Round, Task, Tree, View


class ParallelOptions(AlgorithmOptions):
    """Options of parallel SGDA."""

    lr: float = Field(default=0.1, gt=0)
    """Primal step, eta."""
    dual_lr: float | None = Field(default=None, gt=0)
    """Dual step, gamma; the same as ``lr`` if not given."""
    lr_schedule: Schedule = Schedule()
    gradient_chunk: int = Field(default=500, ge=1)
    """Examples a client takes at once while it averages its full local gradient. It bounds memory and changes no result, unless
    the task draws noise for a batch, or normalises by it (``gan``), or averages labelled examples by themselves
    (``domain_adaptation``, by up to one in a chunk): then each chunk counts by its share."""
    correction: Correction = Correction()
    """Correction for clients that are heard less often than others."""

    def given_dual_lr(self) -> float | None:
        """Return ``dual_lr``."""
        return self.dual_lr

    def rates(self, t: int) -> dict[str, float]:
        """Return the steps of round t."""
        now = self.lr_schedule.at(t)
        return {"x": self.lr * now, "y": (self.lr if self.dual_lr is None else self.dual_lr) * now}


def parallel_sgda(options: ParallelOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build parallel SGDA; its state is z."""

    work = full_local(gradient_at_z, "g", options.gradient_chunk)
    gradients = Phase(name="gradient", work=work, reduce={"g": Mean()})

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        g = rnd.map_reduce(gradients, shared=Message(send={"z": z}), cohort=rnd.invite(cohort.size))["g"]
        return task.objectives["train"].step(z, options.rates(rnd.index), g), {}

    made = Algorithm(init, round, (gradients,), {"global": View(lambda z: z)}, requires=("x", "y"))
    return correcting(options.correction, made, "gradient", "g")
