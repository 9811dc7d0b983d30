"""Every algorithm by the name used in configurations: a line each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fedfleet.algorithms.afl import AflOptions, afl
from fedfleet.algorithms.amplified import AmplifiedFedAvgOptions, PeriodOptions, amplified_fedavg, amplified_scaffold
from fedfleet.algorithms.catalyst import CatalystOptions, catalyst_scaffold_s
from fedfleet.algorithms.cdma import AdaOptions, CdmaOptions, cdma_ada, cdma_nc, cdma_one
from fedfleet.algorithms.cluster_fedvarp import ClusterFedVarpOptions, cluster_fedvarp
from fedfleet.algorithms.clustered_sampling import SamplingOptions, clustered_sampling
from fedfleet.algorithms.coda import CodaOptions, CodascaOptions, coda_plus, codasca
from fedfleet.algorithms.coral import coral
from fedfleet.algorithms.ditto import DittoOptions, ditto
from fedfleet.algorithms.drfa import DrfaOptions, drfa
from fedfleet.algorithms.epochs import by_epoch
from fedfleet.algorithms.extra_step import extra_step
from fedfleet.algorithms.f3ast import F3astOptions, FedLaAvgOptions, f3ast, fedlaavg
from fedfleet.algorithms.fact import FactOptions, fact
from fedfleet.algorithms.fada import FadaOptions, fada
from fedfleet.algorithms.fedas import FedAsOptions, fedas
from fedfleet.algorithms.fedasync import FedAsyncOptions, fedasync
from fedfleet.algorithms.fedavg import AveragingOptions, FedAvgOptions, FedOptOptions, fedavg
from fedfleet.algorithms.fedawe import FedAweOptions, fedawe
from fedfleet.algorithms.fedbabu import FedBabuOptions, fedbabu
from fedfleet.algorithms.fedbuff import FedBuffOptions, fedbuff
from fedfleet.algorithms.feddyn import FedDynOptions, feddyn
from fedfleet.algorithms.fedfix import FedFixOptions, fedfix
from fedfleet.algorithms.fedga import FedGaOptions, fedga
from fedfleet.algorithms.fediir import FedIirOptions, fediir
from fedfleet.algorithms.fedka import FedKaOptions, fedka
from fedfleet.algorithms.fedmm import FedMmOptions, fedmm
from fedfleet.algorithms.fednova import FedNovaOptions, fednova
from fedfleet.algorithms.fedpac import FedPacOptions, fedpac
from fedfleet.algorithms.fedper import fedbn, fedper, lg_fedavg
from fedfleet.algorithms.fedprox import FedProxOptions, fedprox
from fedfleet.algorithms.fedprox_sgda import OneStepOptions, ProximalOptions, fedprox_sgda, fedsgda
from fedfleet.algorithms.fedrep import FedRepOptions, fedrep
from fedfleet.algorithms.fedrobust import FedRobustOptions, fedrobust
from fedfleet.algorithms.fedrod import fedrod
from fedfleet.algorithms.fedsam import FedSamOptions, MoFedSamOptions, fedsam, mofedsam
from fedfleet.algorithms.fedsr import FedSrOptions, fedsr
from fedfleet.algorithms.fish import FishOptions, fish
from fedfleet.algorithms.fishr import FishrOptions, fishr
from fedfleet.algorithms.gt_gda import gt_gda
from fedfleet.algorithms.gt_hsgd import GtHsgdOptions, gt_hsgd
from fedfleet.algorithms.irm import irm
from fedfleet.algorithms.kd3a import Kd3aOptions, kd3a
from fedfleet.algorithms.lasting import lasting
from fedfleet.algorithms.local_sgda import SgdaOptions, local_sgda
from fedfleet.algorithms.local_sgda_plus import SgdaPlusOptions, local_sgda_plus
from fedfleet.algorithms.m3sda import M3sdaOptions, m3sda
from fedfleet.algorithms.mcd import McdOptions, mcd
from fedfleet.algorithms.mime import MimeLiteOptions, MimeOptions, mime, mimelite
from fedfleet.algorithms.mmd import MmdOptions, mmd
from fedfleet.algorithms.omg import OmgOptions, omg
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.algorithms.parallel_sgda import ParallelOptions, parallel_sgda
from fedfleet.algorithms.participation import Correction
from fedfleet.algorithms.penalised import PenaltyOptions
from fedfleet.algorithms.peravg import PerAvgOptions, peravg
from fedfleet.algorithms.qffl import QfflOptions, qffl
from fedfleet.algorithms.refl import ReflOptions, refl
from fedfleet.algorithms.robust import RobustOptions, robust
from fedfleet.algorithms.scaffold import ScaffoldOptions, scaffold
from fedfleet.algorithms.stablefdg import StableFdgOptions, stablefdg
from fedfleet.algorithms.vrex import vrex
from fedfleet.algorithms.wrapping import INNER, WrapperOptions
from fedfleet.simulator.author import Algorithm, Entry, Registry, Task

Build = Callable[[Any, Task, CohortOptions], Algorithm]
ROWS: dict[str, Entry[Build]] = {
    "fedavg": Entry(FedAvgOptions, fedavg, "federated averaging (McMahan et al. 2017)"),
    "fedopt": Entry(FedOptOptions, fedavg, "FedAvg with a server optimiser: FedAdam by default (Reddi et al. 2021)"),
    "fedbuff": Entry(FedBuffOptions, fedbuff, "asynchronous FedAvg with a buffer (Nguyen et al. 2022)"),
    "fedprox": Entry(FedProxOptions, fedprox, "FedAvg with a proximal term (Li et al. 2020)"),
    "scaffold": Entry(ScaffoldOptions, scaffold, "control variates against client drift (Karimireddy et al. 2020)"),
    "fednova": Entry(FedNovaOptions, fednova, "FedAvg of steps that are normalised by their number (Wang et al. 2020)"),
    "feddyn": Entry(FedDynOptions, feddyn, "a linear term of each client against client drift (Acar et al. 2021)"),
    "fedawe": Entry(FedAweOptions, fedawe, "clients make up for the rounds that they missed (Xiang et al. 2024)"),
    "clustered_sampling": Entry(
        SamplingOptions, clustered_sampling, "FedAvg of a client from each of as many clusters (Fraboni et al. 2021)"
    ),
    "f3ast": Entry(F3astOptions, f3ast, "those of the clients online that are selected least (Ribero et al. 2022)"),
    "fedlaavg": Entry(
        FedLaAvgOptions, fedlaavg, "those online that were not heard for longest, with memory (Yan et al. 2020)"
    ),
    "cluster_fedvarp": Entry(
        ClusterFedVarpOptions,
        cluster_fedvarp,
        "FedVARP with a memory of clusters at the server (Jhunjhunwala et al. 2022)",
    ),
    "refl": Entry(
        ReflOptions, refl, "those online that are online least, and late answers by age (Abdelmoniem et al. 2023)"
    ),
    "amplified_fedavg": Entry(
        AmplifiedFedAvgOptions, amplified_fedavg, "one long step for each period of participation (Wang & Ji 2022)"
    ),
    "amplified_scaffold": Entry(
        PeriodOptions,
        amplified_scaffold,
        "the same with control variates that change by the period (Crawshaw & Liu 2024)",
    ),
    "mime": Entry(MimeOptions, mime, "steps with the server's momentum: two phases (Karimireddy et al. 2021)"),
    "mimelite": Entry(MimeLiteOptions, mimelite, "the same with plain local gradients: one phase (ibid.)"),
    "fedasync": Entry(FedAsyncOptions, fedasync, "each model is mixed in as it comes (Xie et al. 2019)"),
    "fedfix": Entry(FedFixOptions, fedfix, "a server that steps at fixed times (Fraboni et al. 2023)"),
    "afl": Entry(AflOptions, afl, "agnostic: the worst mixture of domains (Mohri et al. 2019)"),
    "drfa": Entry(DrfaOptions, drfa, "AFL with local steps: two phases (Deng et al. 2020)"),
    "qffl": Entry(QfflOptions, qffl, "q-FFL: weight by a power of the loss (Li et al. 2020)"),
    "fedper": Entry(
        AveragingOptions, fedper, "FedAvg of all but the head, which is each client's own (Arivazhagan et al. 2019)"
    ),
    "lg_fedavg": Entry(AveragingOptions, lg_fedavg, "FedAvg of the head; bodies are clients' own (Liang et al. 2020)"),
    "fedbn": Entry(AveragingOptions, fedbn, "FedAvg of all but what normalises (Li et al. 2021)"),
    "fedrep": Entry(FedRepOptions, fedrep, "a common body, fitted after each client's own head (Collins et al. 2021)"),
    "fedbabu": Entry(FedBabuOptions, fedbabu, "a body trained under a head that stays as drawn (Oh et al. 2022)"),
    "fedrod": Entry(AveragingOptions, fedrod, "a balanced head for all, one more for each client (Chen & Chao 2022)"),
    "fedpac": Entry(
        FedPacOptions, fedpac, "aligned features, and heads mixed of those like one's own: two phases (Xu et al. 2023)"
    ),
    "fedas": Entry(
        FedAsOptions, fedas, "bodies turned towards clients' old ones, weighed by Fisher (Yang et al. 2024)"
    ),
    "ditto": Entry(DittoOptions, ditto, "own models held near the global one (Li et al. 2021)"),
    "peravg": Entry(PerAvgOptions, peravg, "Per-FedAvg: a step away from good own models (Fallah et al. 2020)"),
    "omg": Entry(
        OmgOptions, omg, "FedOMG: matched updates in the place of another algorithm's mean (Nguyen et al. 2025)"
    ),
    "robust": Entry(
        RobustOptions, robust, "median, Krum, geometric median and others in the place of another algorithm's mean"
    ),
    "fedsam": Entry(FedSamOptions, fedsam, "FedAvg with sharpness-aware local steps (Qu et al. 2022)"),
    "mofedsam": Entry(MoFedSamOptions, mofedsam, "FedSAM with the last round's movement in each step (ibid.)"),
    "fediir": Entry(FedIirOptions, fediir, "classifiers that would be moved alike: two phases (Guo et al. 2023)"),
    "fedga": Entry(FedGaOptions, fedga, "shares that follow generalisation gaps: two phases (Zhang et al. 2023)"),
    "fedsr": Entry(FedSrOptions, fedsr, "short drawn features, near each client's own by class (Nguyen et al. 2022)"),
    "stablefdg": Entry(
        StableFdgOptions, stablefdg, "shared and explored styles, attention: two phases (Park et al. 2023)"
    ),
    "irm": Entry(PenaltyOptions, irm, "FedAvg with IRM's penalty in each loss (Arjovsky et al. 2019)"),
    "vrex": Entry(PenaltyOptions, vrex, "V-REx: the variance of domains' losses: two phases (Krueger et al. 2021)"),
    "coral": Entry(PenaltyOptions, coral, "alike means and covariances of features: two phases (Sun & Saenko 2016)"),
    "mmd": Entry(MmdOptions, mmd, "alike distributions of features: two phases (Li et al. 2018)"),
    "fishr": Entry(FishrOptions, fishr, "alike variances of the head's gradients: two phases (Rame et al. 2022)"),
    "fish": Entry(FishOptions, fish, "from domain to domain, a step in each, one after the other (Shi et al. 2022)"),
    "fact": Entry(
        FactOptions, fact, "two heads made to agree on a target without labels: three phases (Schrod et al. 2023)"
    ),
    "kd3a": Entry(
        Kd3aOptions, kd3a, "sources vote on the examples of a target without labels: two phases (Feng et al. 2021)"
    ),
    "fedka": Entry(
        FedKaOptions,
        fedka,
        "features matched with the target's, and votes on its classes: two phases (Sun et al. 2022)",
    ),
    "fada": Entry(
        FadaOptions,
        fada,
        "an adversary for each source and the target, and attention, reconstructed: three phases (Peng et al. 2020)",
    ),
    "mcd": Entry(McdOptions, mcd, "two heads driven apart on a target, centralised (Saito et al. 2018)"),
    "m3sda": Entry(M3sdaOptions, m3sda, "MCD with domains' moments matched, centralised (Peng et al. 2019)"),
    "parallel_sgda": Entry(ParallelOptions, parallel_sgda, "one server step along full local gradients; minimax"),
    "local_sgda": Entry(SgdaOptions, local_sgda, "local descent-ascent, averaged (Deng & Mahdavi 2021); minimax"),
    "local_sgda_plus": Entry(SgdaPlusOptions, local_sgda_plus, "local SGDA with a snapshot of x (ibid.); minimax"),
    "extra_step": Entry(LocalOptions, extra_step, "local steps that look ahead (Beznosikov et al. 2020); minimax"),
    "catalyst_scaffold_s": Entry(
        CatalystOptions, catalyst_scaffold_s, "corrected steps around an anchor: two phases (Hou et al. 2021); minimax"
    ),
    "coda_plus": Entry(CodaOptions, coda_plus, "local SGDA in stages (Yuan et al. 2021); minimax"),
    "codasca": Entry(CodascaOptions, codasca, "CODA+ with control variates (ibid.); minimax"),
    "cdma_nc": Entry(CdmaOptions, cdma_nc, "CDMA without correction: one phase; minimax"),
    "cdma_one": Entry(CdmaOptions, cdma_one, "CDMA with gradients collected first: two phases; minimax"),
    "cdma_ada": Entry(AdaOptions, cdma_ada, "CDMA with a recursive gradient estimate: two phases; minimax"),
    "fedmm": Entry(
        FedMmOptions, fedmm, "local descent-ascent with duals that bridge clients (Shen et al. 2023); minimax"
    ),
    "fedsgda": Entry(OneStepOptions, fedsgda, "one local step of descent-ascent, averaged; minimax"),
    "fedavg_sgda": Entry(SgdaOptions, local_sgda, "what FedMM calls local_sgda; minimax"),
    "fedprox_sgda": Entry(ProximalOptions, fedprox_sgda, "local_sgda with a proximal term of each player; minimax"),
    "fedrobust": Entry(FedRobustOptions, fedrobust, "against affine shifts of inputs (Reisizadeh et al. 2020)"),
    "gt_gda": Entry(LocalOptions, gt_gda, "gradient tracking, reconstructed (Tsaknakis et al. 2020); minimax"),
    "gt_hsgd": Entry(GtHsgdOptions, gt_hsgd, "one step along recursive estimates (Xin et al. 2021); minimax"),
}


def around(options: Any, algorithm: Algorithm) -> Algorithm:
    """Return an algorithm with what its options say of rates within rounds, and of optimisers between them. Raises ConfigError."""
    return lasting(options, by_epoch(options, algorithm))


def _around(entry: Entry[Build]) -> Entry[Build]:
    """Return a row whose algorithm is built so, where its options have a word on it."""
    if not {"client_optimizer", "lr_schedule"} & entry.options.model_fields.keys():
        return entry

    @functools.wraps(entry.build)
    def build(options: Any, task: Task, cohort: CohortOptions) -> Algorithm:
        return around(options, entry.build(options, task, cohort))

    return entry._replace(build=build)


ROWS = {name: _around(entry) for name, entry in ROWS.items()}
INNER.rows.update({name: entry for name, entry in ROWS.items() if not issubclass(entry.options, WrapperOptions)})
ALGORITHMS = Registry(
    "algorithm",
    ROWS,
    key="name",
    default="fedavg",
    group="fedfleet.algorithms",
    usual=FedAvgOptions,
    given=("algorithm",),
    elsewhere={
        **{f"fed{rule}": f"fedopt with algorithm.server_optimizer={rule}" for rule in ("adam", "yogi", "adagrad")},
        **{kind: f"fedavg with algorithm.correction={kind}" for kind in Correction.used if kind != "none"},
        "fedavgm": "fedopt with algorithm.server_optimizer={name: sgd, momentum: 0.9}",
        **{
            rule: f"robust with algorithm.rule={rule}"
            for rule in ("krum", "multi_krum", "trimmed_mean", "median", "fltrust")
        },
    },
)
