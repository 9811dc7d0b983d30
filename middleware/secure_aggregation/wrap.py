"""An algorithm whose messages are added up unseen, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedfleet.middleware.context import Context
from fedfleet.middleware.facts import Need, check, of_trial
from fedfleet.middleware.secure_aggregation.masks import check_installed
from fedfleet.middleware.secure_aggregation.options import SECTION, TRIED, SecureAggregation
from fedfleet.middleware.secure_aggregation.secured import secured, sum_lost
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import Mean
from fedfleet.simulator.errors import ConfigError, FedfleetError, show
from fedfleet.simulator.fleet.devices import Load
from fedfleet.simulator.fleet.hardware import Hardware
from fedfleet.simulator.fleet.secagg import KEY_BYTES, PART_BYTES, needed
from fedfleet.simulator.secure import LARGEST_BITS, Secure
from fedfleet.simulator.work import Phase

EXECUTED_UP_TO = 64
"""Clients invited up to which the protocol runs in earnest: parts of secrets take a large cohort minutes a round."""


def summed(options: SecureAggregation | None, algorithm: Algorithm, about: Context) -> Algorithm:
    """Return the algorithm with its messages added up unseen, where that is configured. Raises ConfigError where they cannot be."""
    if options is None:
        return algorithm
    name = about.name
    _check_size(options, about.cohort.size)
    seen = about.tried(algorithm)
    check([Need(SECTION, TRIED)], of_trial(algorithm, seen, name))
    _check_sent(options, name, seen.sent, {slot for p in algorithm.phases for slot in (p.model, p.difference)})
    how = {p.name: _secure(options, about, p, seen.sent[p.name]) for p in algorithm.phases}
    for one in how.values():
        if (wide := max(one.modulus_bits, one.weight_bits)) > LARGEST_BITS:
            raise ConfigError(
                f"{SECTION}.bits={options.bits}: sums of {one.most:,} integers, or weights up to {one.weight_bound:,}, take {wide} "
                f"bits, and {LARGEST_BITS} are added exactly: lower it, max_weight or most_clients"
            )
    result = secured(algorithm, how, seen.sent)
    try:
        about.tried(result)
    except ConfigError:
        raise
    except FedfleetError as e:
        raise ConfigError(f"{SECTION}: {name}: {e}: leave it out, or choose fedavg") from None
    return result


def _secure(options: SecureAggregation, about: Context, phase: Phase, sent: Mapping[str, Any]) -> Secure:
    """Return how a phase is added up."""
    slots = list(phase.reduce)
    weighted = tuple(
        slot
        for slot, r in phase.reduce.items()
        if phase.weight == "num_examples" and isinstance(r, Mean) and r.weighted
    )
    return Secure(
        threshold=options.threshold,
        neighbours=options.neighbours,
        bits=options.bits,
        rounding=options.rounding,
        clip={s: options.clip[s] if isinstance(options.clip, dict) else options.clip for s in slots},
        weighted=weighted,
        weight_bound=(options.max_weight or about.max_examples) if weighted else 1,
        most=options.most_clients or most_clients(about.invited, about.selection),
        numbers=T.count({s: sent[s] for s in slots}) + bool(weighted),
        dropout=options.dropout.model_dump(),
        mask_flop=options.mask_flop,
        execute=options.execute,
    )


def most_clients(invited: int, selection: str) -> int:
    """Return how many clients a sum is taken to have at most."""
    # Of a Poisson cohort of mean m more than 2 m + 32 come in hardly ever: P <= exp(-(m + 32)^2 / (3 m + 32)) < 1e-13, any m.
    return 2 * invited + 32 if selection == "poisson" else max(2, invited)


def _check_size(options: SecureAggregation, invite: int) -> None:
    """Refuse sums of too few, and to do in earnest what takes too long. Raises ConfigError."""
    if (most := options.most_clients) is not None and most < invite:
        raise ConfigError(
            f"{SECTION}.most_clients={most}: sums may be of the {invite} clients of cohort.size: raise it, or leave it out"
        )
    if options.execute:
        if invite > EXECUTED_UP_TO:
            raise ConfigError(
                f"{SECTION}.execute=true: with cohort.size={invite} parts of secrets take minutes a round, and up "
                f"to {EXECUTED_UP_TO} clients may do it: set it to false, which gives the same sums"
            )
        check_installed()


def _check_sent(
    options: SecureAggregation, name: str, sent: Mapping[str, Mapping[str, Any]], moves: set[str | None]
) -> None:
    """Refuse what cannot be made integers of, or has no range. Raises ConfigError."""
    slots = {slot: tree for of in sent.values() for slot, tree in of.items()}
    for slot, tree in slots.items():
        for path, leaf in T.named_leaves(tree):
            if not leaf.is_floating_point():
                raise ConfigError(
                    f"{SECTION}: clients of {name} send whole numbers ({slot}.{path}), which have no range to be cut to: choose a "
                    f"net without statistics, such as one of GroupNorm, or leave it out"
                )
    others = sorted(set(slots) - moves)
    if others and not isinstance(options.clip, dict):
        every = ", ".join(f"{slot}: {options.clip:g}" for slot in sorted(slots))
        raise ConfigError(
            f"{SECTION}.clip={options.clip:g}: clients of {name} send {', '.join(others)} too, which is no model that has moved, "
            f"and may be far out of that range: give one for each slot, such as {{{every}}}, and look at algorithm/secure_clipped"
        )
    if isinstance(options.clip, dict) and set(options.clip) != set(slots):
        raise ConfigError(
            f"{SECTION}.clip={show(options.clip)}: clients of {name} send {', '.join(sorted(slots))}: give each a range, or one "
            f"number for all"
        )


def plan_text(options: SecureAggregation | None, algorithm: Algorithm, invited: int) -> str | None:
    """Return what a plan says, of a cohort of which nobody goes; None where there is no secure aggregation."""
    if options is None:
        return None
    cost = _costs(algorithm, invited)
    first = next(p.secure for p in algorithm.phases if p.secure is not None)
    size = min(invited, (options.neighbours or invited) + 1)
    up, besides, down = (sum(c[key] for c in cost) for key in ("masked", "besides_up", "besides_down"))
    return (
        f"{options.protocol}, {needed(options.threshold, size)} of {size} parts rebuild a secret; {options.bits} bits a number, "
        f"{first.modulus_bits} masked; a client sends {up:,} bytes masked and {besides:,} besides, gets {down:,} more, a round if "
        f"nobody goes; a simulation, which protects nobody"
    )


def sent_each(algorithm: Algorithm, invited: int) -> int:
    """Return the bytes that a client sends in a round if nobody goes."""
    return sum(c["masked"] + c["besides_up"] for c in _costs(algorithm, invited))


def _costs(algorithm: Algorithm, invited: int) -> list[dict[str, int]]:
    return [costs(p.secure, invited) for p in algorithm.phases if p.secure is not None]


def waits_s(algorithm: Algorithm, device: Hardware, clients: int, invited: int) -> float:
    """Return what the exchanges besides the work take a round on a device, masks too; 0 where there are none."""
    one, result = torch.zeros(1, dtype=torch.int64), 0.0
    for phase in algorithm.phases:
        if (secure := phase.secure) is None:
            continue
        c, others = costs(secure, invited), min(invited, (secure.neighbours or clients) + 1) - 1
        load = Load(
            one + 1, one + 1, c["besides_down"], c["besides_up"], secure.mask_flop * secure.numbers * (others + 1)
        )
        result += float(
            3 * 2 * device.latency_s + device.download_s(load) + device.upload_s(load) + device.compute_s(load)
        )
    return result


def costs(secure: Secure, clients: int) -> dict[str, int]:
    """Return the bytes that one of so many clients sends, masked and besides, and gets besides, if nobody goes."""
    others = min(clients, (secure.neighbours or clients) + 1) - 1
    return {
        "masked": secure.message_bytes,
        "besides_up": 2 * KEY_BYTES + 2 * PART_BYTES * others + PART_BYTES * (others + 1),
        "besides_down": 2 * KEY_BYTES * others + 2 * PART_BYTES * others,
    }


def summary(
    options: SecureAggregation | None, algorithm: Algorithm, lost: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return what ``summary.json`` says, with the event of the first sum that lost much; None without secure aggregation."""
    if options is None:
        return None
    phases = {p.name: p.secure for p in algorithm.phases if p.secure is not None}
    return {
        "protocol": options.protocol,
        "threshold": options.threshold,
        "neighbours": options.neighbours,
        "executed": options.execute,
        "lost": None if lost is None else sum_lost(lost),
        "simulated": "what it does to numbers, bytes and time; it protects nobody",
        "phases": {
            name: {
                "bits": s.bits,
                "modulus_bits": s.modulus_bits,
                "weight_bits": s.weight_bits,
                "numbers": s.numbers,
                "steps": {slot: s.step(slot) for slot in s.clip},
                "weight_bound": s.weight_bound if s.weighted else None,
                "message_bytes": s.message_bytes,
            }
            for name, s in phases.items()
        },
    }
