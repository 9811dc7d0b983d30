"""All that the author of an algorithm or a task imports: ``from fedfleet.simulator.author import Algorithm, Phase, rng, …``."""

from fedfleet.simulator.algorithm import (
    Algorithm,
    Cohort,
    Done,
    Exchanging,
    Personal,
    Problem,
    Reduced,
    Round,
    Saddle,
    Task,
    View,
    beneath,
    positions,
)
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.noise import normals
from fedfleet.simulator.arithmetic.optim import Optimizer, adagrad, adam, adaptive, sgd
from fedfleet.simulator.arithmetic.reduction import ByDomainMean, Mean, Reduction, Rows, Store, Total
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.stored import Stored, krum_shares
from fedfleet.simulator.arithmetic.tree import Scalar, Tree
from fedfleet.simulator.domains import Domains
from fedfleet.simulator.errors import ClientError, ConfigError, FedfleetError
from fedfleet.simulator.registry import Entry, Options, Registry
from fedfleet.simulator.signals import imported
from fedfleet.simulator.work import (
    BUFFERS,
    At,
    Batch,
    BatchPlan,
    Code,
    LocalWork,
    Message,
    Objective,
    Ops,
    Phase,
    Slots,
    Stage,
    Transform,
    learnt,
)

__all__ = [
    "BUFFERS",
    "Algorithm",
    "At",
    "Batch",
    "BatchPlan",
    "ByDomainMean",
    "ClientError",
    "Code",
    "Cohort",
    "ConfigError",
    "Domains",
    "Done",
    "Entry",
    "Exchanging",
    "FedfleetError",
    "Key",
    "LocalWork",
    "Mean",
    "Message",
    "Objective",
    "Ops",
    "Optimizer",
    "Options",
    "Personal",
    "Phase",
    "Problem",
    "Reduced",
    "Reduction",
    "Registry",
    "Round",
    "Rows",
    "Saddle",
    "Scalar",
    "Slots",
    "Stage",
    "Store",
    "Stored",
    "T",
    "Task",
    "Total",
    "Transform",
    "Tree",
    "View",
    "adagrad",
    "adam",
    "adaptive",
    "beneath",
    "imported",
    "krum_shares",
    "learnt",
    "normals",
    "positions",
    "rng",
    "sgd",
]
