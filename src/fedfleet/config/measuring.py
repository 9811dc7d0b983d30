"""Options of evaluation, checkpoints and patience: what is measured and kept of a run, and when that ends it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedfleet.simulator.registry import Options

Count = Annotated[int, Field(ge=1)]


class Evaluation(Options):
    """What is measured on the server's side, and when."""

    every: Count = 10
    """Rounds between evaluations; the initial and the final model are always evaluated."""
    test_examples: int = Field(default=0, ge=0)
    """Evaluate on this many test examples (a fixed draw), and at the end on all of them too, as ``eval/all_<metric>`` in
    ``summary.json``; 0: on all of them each time."""
    train_examples: int = Field(default=0, ge=0)
    """Evaluate on this many training examples too (a fixed draw), as ``eval/train_<metric>``."""
    validation: float = Field(default=0.0, ge=0, le=0.5)
    """Share of the training examples, of every domain, that no client gets, to select models by: ``eval/validation_<metric>``.
    With ``domains.target`` also ``validation_source_<metric>`` and ``validation_target_<metric>``, and for targets what needs no
    labels: ``entropy``, ``information`` and ``density``."""
    per_client: bool = False
    """Write ``clients.parquet``: every client's own metrics at each evaluation, on its own data, or what is held out of them.
    Their mean over all examples is ``eval/clients_<metric>``, with the standard deviation over clients (``_std``) and the mean
    of the worst tenth (``_worst_tenth``); by domain, if there are domains, they are in ``domains.parquet``. Of clients' own
    models ``eval/own_<metric>``."""
    cosines: bool = False
    """Measure in every round how far what clients' models moved by points where the model goes: ``algorithm/cosine_worst``,
    ``_mean`` and ``_variance`` over clients, or over domains where there are several, and by domain in ``domains.parquet``. It
    keeps all that clients send in a round, large ones in a file; for algorithms that average models, or what they moved by."""
    outcomes: Literal["listed", "counted"] = "listed"
    """Rows of ``outcomes.parquet``: listed, one an invitation; counted, one a client that was invited: how often each outcome
    befell it, and in how many rounds it was invited and heard. That grows with clients alone, for long runs of large cohorts."""
    duality_gap: bool = False
    """Measure how far an agnostic model can be from the best, on all training examples; needs an algorithm over domains and a
    loss that is convex: task.model logistic."""


class Checkpoint(Options):
    """What a run goes on from with ``fedfleet resume``: one is always written when the run ends, however it ends."""

    every_s: float | None = Field(default=60.0, ge=0)
    """Seconds between checkpoints; 0: after every round; null: only at the end."""
    keep: Count = 2
    """Checkpoints kept, the newest."""
    best: str | None = "auto"
    """Keep the model with the best value of this metric as ``best.safetensors``; auto: the first that is measured; null: none."""


class Patience(Options):
    """Stop once a metric no longer improves; the initial model's evaluation is the first."""

    metric: str
    """Such as ``eval/accuracy``; of losses and the like less is better."""
    evaluations: Count = 10
    """Evaluations in a row without an improvement after which the run stops."""
    min_delta: float = Field(default=0.0, ge=0)
    """What is not more than this is no improvement."""
