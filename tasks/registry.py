"""Every task by the name used in configurations: a line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedfleet.simulator.author import Task
from fedfleet.simulator.registry import Entry, Registry
from fedfleet.tasks.adaptation import AdaptationOptions, DomainAdaptation
from fedfleet.tasks.attentive import Attentive, AttentiveOptions
from fedfleet.tasks.auc import AucMaximisation, AucOptions
from fedfleet.tasks.classification import Classification, ClassificationOptions
from fedfleet.tasks.gan import Gan, GanOptions
from fedfleet.tasks.language import LanguageModel, LanguageOptions
from fedfleet.tasks.module import ModuleOptions, of_options
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.robust import RobustOptions, RobustTraining
from fedfleet.tasks.stochastic import Stochastic, StochasticOptions
from fedfleet.tasks.two_heads import TwoHeads, TwoHeadsOptions

ROWS: dict[str, Entry[Callable[[Any, DataShape], Task]]] = {
    "classification": Entry(ClassificationOptions, Classification, "cross-entropy, accuracy; minimisation"),
    "module": Entry(
        ModuleOptions, of_options, "a net of your own, any loss: regression, several labels, tokens; minimisation"
    ),
    "stochastic": Entry(StochasticOptions, Stochastic, "classification by drawn features, FedSR's net; minimisation"),
    "attentive": Entry(
        AttentiveOptions, Attentive, "classification with an attention highlighter, StableFDG's net; minimisation"
    ),
    "language_model": Entry(
        LanguageOptions, LanguageModel, "the next word, by an LSTM or a net of your own; minimisation"
    ),
    "robust": Entry(RobustOptions, RobustTraining, "a net against a perturbation all images share; minimax"),
    "gan": Entry(GanOptions, Gan, "a generator against a discriminator; Inception Score, FID; minimax"),
    "domain_adaptation": Entry(
        AdaptationOptions, DomainAdaptation, "labelled sources, a target without labels; DANN, CDAN, MDD; minimax"
    ),
    "auc": Entry(AucOptions, AucMaximisation, "l2-relaxed AUC maximisation of one class against the rest; minimax"),
    "two_heads": Entry(TwoHeadsOptions, TwoHeads, "a generator and a head, discrepancy of two heads; minimisation"),
}
TASKS = Registry("task", ROWS, key="name", default="classification", group="fedfleet.tasks", given=("task",))
