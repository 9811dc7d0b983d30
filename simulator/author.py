"""All that the author of an algorithm or a task imports: ``from fedfleet.simulator.author import Algorithm, Phase, rng, …``."""

from fedfleet.simulator.algorithm import (
    Algorithm,
    Buffer,
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
from fedfleet.simulator.arithmetic.clusters import k_means
from fedfleet.simulator.arithmetic.noise import normals
from fedfleet.simulator.arithmetic.optim import Optimizer, adagrad, adam, adaptive, sgd
from fedfleet.simulator.arithmetic.random_waves import in_waves, waves
from fedfleet.simulator.arithmetic.reduction import ByDomainMean, CollectUploads, Mean, Reduction, Rows, Total
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Scalar, Tree
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix, krum_shares
from fedfleet.simulator.domains import Domains
from fedfleet.simulator.errors import ClientError, ConfigError, FedfleetError
from fedfleet.simulator.registry import Entry, Options, Registry
from fedfleet.simulator.signals import imported
from fedfleet.simulator.work import (
    BUFFERS,
    Batch,
    BatchPlan,
    Encoding,
    Lasting,
    LocalLoop,
    LocalWork,
    Message,
    Objective,
    Ops,
    Phase,
    Slots,
    StepInfo,
    Transform,
    trainable,
)

__all__ = [
    "BUFFERS",
    "Algorithm",
    "Batch",
    "BatchPlan",
    "Buffer",
    "ByDomainMean",
    "ClientError",
    "Cohort",
    "CollectUploads",
    "ConfigError",
    "Domains",
    "Done",
    "Encoding",
    "Entry",
    "Exchanging",
    "FedfleetError",
    "Key",
    "Lasting",
    "LocalLoop",
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
    "StepInfo",
    "T",
    "Task",
    "Total",
    "Transform",
    "Tree",
    "UploadMatrix",
    "View",
    "adagrad",
    "adam",
    "adaptive",
    "beneath",
    "imported",
    "in_waves",
    "k_means",
    "krum_shares",
    "normals",
    "positions",
    "rng",
    "sgd",
    "trainable",
    "waves",
]
