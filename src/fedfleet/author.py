"""All that the author of an algorithm or a task imports: ``from fedfleet.author import Algorithm, LocalOptions, rng, …``.

These are the names of `fedfleet.simulator.author`, and the ready local work with its options.
"""

from fedfleet.algorithms.fedavg import (
    AveragingOptions,
    FedAvgOptions,
    averaging,
)
from fedfleet.algorithms.local import (
    ClientFinal,
    Direction,
    Local,
    carried,
    full_local,
    gradient,
    gradient_at_z,
    held,
    local_training,
    proximal,
    send_change,
    send_model,
)
from fedfleet.algorithms.options import (
    ClientOptimizer,
    CohortOptions,
    LocalOptimizer,
    LocalOptions,
    Schedule,
    ServerOptimizer,
)
from fedfleet.algorithms.participation import (
    Correction,
    correcting,
    share_completed,
)
from fedfleet.simulator import author
from fedfleet.simulator.author import *  # noqa: F403  # the same names, whatever they are

__all__ = [
    "AveragingOptions",
    "ClientFinal",
    "ClientOptimizer",
    "CohortOptions",
    "Correction",
    "Direction",
    "FedAvgOptions",
    "Local",
    "LocalOptimizer",
    "LocalOptions",
    "Schedule",
    "ServerOptimizer",
    "averaging",
    "carried",
    "correcting",
    "full_local",
    "gradient",
    "gradient_at_z",
    "held",
    "local_training",
    "proximal",
    "send_change",
    "send_model",
    "share_completed",
]
__all__ += author.__all__
