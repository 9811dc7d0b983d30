"""Meanings of tasks' losses, a line each: in minimax problems a falling loss is not the aim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedfleet.report.tables import Run

OF_TASK: dict[str, dict[str, str]] = {
    "auc": {
        "train_loss": "The relaxed AUC objective, which the model descends while α ascends: of a good ranking it is below 0, "
        "and it need not fall from round to round.",
        "loss": "The relaxed AUC objective, which the model descends while α ascends: the better the ranking, the further "
        "below 0.",
        "auc": "How likely an example of the positive class is to score higher than one of the others: 0.5 is a coin, 1 "
        "perfect.",
        "score": "Mean score of a client's examples, which tells nothing of how well they are ranked.",
    },
    "robust": {
        "train_loss": "Cross-entropy under the perturbation at hand, less its penalty: the model descends while the "
        "perturbation ascends, so that it may rise while the model gets better.",
        "robust_loss": "Cross-entropy under the worst perturbation that an ascent finds, less its penalty, which the model is "
        "to make small.",
        "robust_accuracy": "Accuracy under the worst perturbation that an ascent finds.",
        "classes": "Of test examples under the worst perturbation that an ascent finds, by the model after the last round.",
    },
    "gan": {
        "train_loss": "The generator's loss against the discriminator of the time: neither player's loss says how good the "
        "images are.",
        "generator_loss": "What the generator descends: about 0.69 (log 2) where the discriminator can only guess, and more the "
        "better that gets.",
        "discriminator_loss": "What the discriminator descends: about 1.39 (2 log 2) where it can only guess.",
        "fid": "Distance of generated from real images in the features of a classifier: 0 is best.",
        "inception_score": "How sure a classifier is of each image, and how varied all are: 1 is worst, the number of classes "
        "best.",
    },
    "domain_adaptation": {
        "train_loss": "Of labelled examples, and of an adversary that tells domains apart, against which features are learnt: "
        "it may rise while the target gets better.",
        "domain_accuracy": "Of the adversary: about the share of the larger side where features do not tell domains apart.",
    },
}
"""Task -> metric -> a sentence."""
TEST = "test examples"
PREFIXES = ("train_", "validation_", "all_", "source_", "target_", "clients_", "own_", "held_out_")


def meaning(groups: Mapping[str, Sequence[Run]], metric: str) -> str:
    """The sentence of a metric and a space, where all runs have a task of which there is one; else nothing."""
    tasks = {run.get("task", "name") for runs in groups.values() for run in runs}
    told = OF_TASK.get(tasks.pop(), {}) if len(tasks) == 1 else {}
    for prefix in ("", *PREFIXES):
        if metric.startswith(prefix) and (result := told.get(metric.removeprefix(prefix))):
            return f"{result} "
    return ""


def measured_on(metric: str, held_out: float) -> str:
    """Say of which examples a metric is."""
    name = metric.removeprefix("eval/")
    if name.startswith("validation"):
        return "validation examples, which no client has"
    if name.startswith("train"):
        return "training examples"
    if name.startswith("all_"):
        return f"all {TEST}"
    if name.startswith(("clients_", "own_")):
        return "examples held out of each client's" if held_out else "the clients' training examples"
    return TEST
