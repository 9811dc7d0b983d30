"""Conditions that are fixed for a run, beside its algorithm and its clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fedfleet.simulator.arithmetic.spill import SPILLED_BYTES
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.fleet.selection import Selection, Uniform


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is fixed for a run.

    Attributes:
        seed: the run's seed.
        federation: how clients behave and whom the server waits for.
        selection: whom it invites.
        shared_response_count: both phases of a round wait for the same share p_t of answers.
        min_responses, attempts, retry_s: a phase with fewer answers is aborted, and the round starts again with new cohorts after
            so many virtual seconds, so often in all.
        skip_aborted: a round with an aborted phase is over instead. It counts, ``retry_s`` pass, and the algorithm is
            told.
        over_select: invite this many times as many clients as the algorithm asks for.
        stale_discount: use late answers of phases without client state in the phase of that name in a later round, with this
            weight a round of delay; None ignores them.
        train_all: let late clients work too, and throw away what they send: a model that must not change for it.
        block_size: clients a block, at most.
        faults: what is done about clients at fault.
        bytes_up: phase -> bytes that a client sends, as devices are told before any has sent them.
        flop: phase -> floating-point operations an example.
        spilled_bytes: uploads of a block that are kept lie in a file from so many bytes on; changes no bit.
        device: where the server computes with them, None for the CPU.

    """

    seed: int
    federation: Federation = field(default_factory=Federation)
    selection: Selection = field(default_factory=Uniform)
    shared_response_count: bool = False
    min_responses: int = 1
    attempts: int = 10
    retry_s: float = 1.0
    skip_aborted: bool = False
    over_select: float = 1.0
    stale_discount: float | None = None
    train_all: bool = False
    block_size: int = 32
    faults: Faults = field(default_factory=Faults)
    bytes_up: Mapping[str, float] = field(default_factory=dict)
    flop: Mapping[str, float] = field(default_factory=dict)
    spilled_bytes: int = SPILLED_BYTES
    device: torch.device | None = None
