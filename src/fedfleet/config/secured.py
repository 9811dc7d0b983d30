"""What secure aggregation takes of a run: where it is refused, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedfleet.algorithms.options import CohortOptions
from fedfleet.config.federation import steps
from fedfleet.config.guarantee import Guarantee
from fedfleet.config.promises import Promise
from fedfleet.config.reading import show
from fedfleet.config.schema import Config
from fedfleet.config.secure_aggregation import SecureAggregation
from fedfleet.config.selection import asked
from fedfleet.config.timing import SAMPLE
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import ByDomainMean, Mean, Store, Total
from fedfleet.simulator.driver.masks import check_installed
from fedfleet.simulator.driver.secured import secured, sum_lost
from fedfleet.simulator.driver.transformed import Seen
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.fleet.devices import Load
from fedfleet.simulator.fleet.hardware import Machines
from fedfleet.simulator.fleet.secagg import KEY_BYTES, PART_BYTES, needed
from fedfleet.simulator.registry import ByPath
from fedfleet.simulator.secure import LARGEST_BITS, Secure
from fedfleet.simulator.work import Phase

SECTION = "secure_aggregation"
"""Selections that ask for each client's loss."""
EXECUTED_UP_TO = 64
"""Clients invited up to which the protocol runs in earnest: parts of secrets take a large cohort minutes a round."""


def summed(
    config: Config,
    algorithm: Algorithm,
    most_examples: int,
    tried: Callable[[Algorithm], Seen],
    promises: Sequence[Promise],
) -> Algorithm:
    """Return the algorithm with its messages added up unseen, where that is configured. Raises ConfigError where they cannot be."""
    given = config.secure_aggregation
    if given is None:
        return algorithm
    name = config.algorithm.name
    _check_config(config, given)
    _check_private(config, given, promises)
    for phase in algorithm.phases:
        _check_phase(phase, name)
    if algorithm.asynchronous:
        raise ConfigError(
            f"{SECTION}: {name} is asynchronous, and its clients are no cohort that could agree on masks: leave it out, or choose "
            f"fedavg"
        )
    seen = tried(algorithm)
    if seen.repeated:
        raise ConfigError(
            f"{SECTION}: {name} may ask a client twice in phase {min(seen.repeated)!r}, which would agree on masks with itself: "
            f"leave it out, or choose fedavg"
        )
    _check_sent(given, name, seen.sent, {slot for p in algorithm.phases for slot in (p.model, p.difference)})
    if unseen := [p.name for p in algorithm.phases if p.name not in seen.sent]:
        raise ConfigError(
            f"{SECTION}: what clients of {name} send in phase {unseen[0]!r} was not seen in a trial of two rounds: leave it out"
        )
    how = {p.name: _secure(config, given, p, most_examples, seen.sent[p.name]) for p in algorithm.phases}
    for one in how.values():
        if (wide := max(one.modulus_bits, one.weight_bits)) > LARGEST_BITS:
            raise ConfigError(
                f"{SECTION}.bits={given.bits}: sums of {one.most:,} integers, or weights up to {one.weight_bound:,}, take {wide} "
                f"bits, and {LARGEST_BITS} are added exactly: lower it, max_weight or most_clients"
            )
    found = secured(algorithm, how, seen.sent)
    try:
        tried(found)
    except ConfigError:
        raise
    except FedfleetError as e:
        raise ConfigError(f"{SECTION}: {name}: {e}: leave it out, or choose fedavg") from None
    return found


def _secure(
    config: Config, given: SecureAggregation, phase: Phase, most_examples: int, sent: Mapping[str, Any]
) -> Secure:
    """Return how a phase is added up."""
    slots = list(phase.reduce)
    weighted = tuple(
        slot
        for slot, r in phase.reduce.items()
        if phase.weight == "num_examples" and isinstance(r, Mean) and r.weighted
    )
    return Secure(
        threshold=given.threshold,
        neighbours=given.neighbours,
        bits=given.bits,
        rounding=given.rounding,
        clip={s: given.clip[s] if isinstance(given.clip, dict) else given.clip for s in slots},
        weighted=weighted,
        weight_bound=(given.max_weight or most_examples) if weighted else 1,
        most=given.most_clients or most_clients(config.cohort, config.selection.kind),
        numbers=T.count({s: sent[s] for s in slots}) + bool(weighted),
        dropout=given.dropout.model_dump(),
        mask_flop=given.mask_flop,
        execute=given.execute,
    )


def most_clients(cohort: CohortOptions, selection: str) -> int:
    """Return how many clients a sum is taken to have at most."""
    invited = asked(cohort)
    # Of a Poisson cohort of mean m more than 2 m + 32 come in hardly ever: P <= exp(-(m + 32)^2 / (3 m + 32)) < 1e-13, any m.
    return 2 * invited + 32 if selection == "poisson" else max(2, invited)


def _check_config(config: Config, given: SecureAggregation) -> None:
    """Refuse what asks for more than sums. Raises ConfigError."""
    if config.cohort.late == "keep":
        raise ConfigError(
            "cohort.late='keep': a late message's masks are taken off with those of its own round: leave it or "
            f"{SECTION} out"
        )
    for key in ("on_client_error", "non_finite"):
        if (value := getattr(config.faults, key)) != "fail":
            raise ConfigError(
                f"faults.{key}={value!r}: the server sees a sum, and not whose message is at fault: choose fail, or leave "
                f"{SECTION} out"
            )
    chosen = config.selection
    if isinstance(chosen, ByPath) or chosen.looks:
        verb = "may look" if isinstance(chosen, ByPath) else "looks"
        raise ConfigError(
            f"selection.kind={config.selection.kind!r}: it {verb} at each client's loss, and the server is to see sums alone: "
            f"choose uniform, or leave {SECTION} out"
        )
    if config.evaluation.cosines:
        raise ConfigError(
            f"evaluation.cosines=true: they are of what each client sends, which nobody sees: leave it or {SECTION} out"
        )
    if config.attack.colludes:
        raise ConfigError(
            f"attack.kind={config.attack.kind!r}: what attackers agree on takes the place of uploads that the server has "
            f"decoded, and it decodes a sum alone: choose sign_flip, or leave {SECTION} out"
        )
    if config.transforms.down:
        raise ConfigError(
            f"transforms.down={show([t.name for t in config.transforms.down])}: what clients add up is taken to be how they "
            f"moved from the server's own model: leave it or {SECTION} out"
        )
    for step in steps(config, "up"):
        if not getattr(step.does, "linear", False):
            raise ConfigError(
                f"{step.key}.name={step.name!r}: masked messages are integers in one range that add up, and what it makes "
                f"of them would not be smaller or add up: leave it out, or set {SECTION}.bits; clip may stay"
            )
    if (most := given.most_clients) is not None and most < (few := config.cohort.invite):
        raise ConfigError(
            f"{SECTION}.most_clients={most}: sums may be of the {few} clients of cohort.invite: raise it, or leave it out"
        )
    if given.execute:
        if config.cohort.invite > EXECUTED_UP_TO:
            raise ConfigError(
                f"{SECTION}.execute=true: with cohort.invite={config.cohort.invite} parts of secrets take minutes a round, and up "
                f"to {EXECUTED_UP_TO} clients may do it: set it to false, which gives the same sums"
            )
        check_installed()


def _check_private(config: Config, given: SecureAggregation, promises: Sequence[Promise]) -> None:
    """Refuse what would break a promise of privacy. Raises ConfigError."""
    promised = next((p for p in promises if isinstance(p, Guarantee)), None)
    if config.privacy is None or promised is None:
        return
    if config.privacy.noise == "clients":
        raise ConfigError(
            f"privacy.noise='clients': noise that is cut to a range and rounded is not the Gaussian noise that is reckoned with, "
            f"and discrete noise is not there: set privacy.noise=server, or leave {SECTION} out"
        )
    if config.privacy.adaptive is not None:
        raise ConfigError(
            f"privacy.adaptive: each client tells whether it was within the norm, and the server is to see sums alone: leave it or "
            f"{SECTION} out"
        )
    if given.rounding != "toward_zero":
        raise ConfigError(
            f"{SECTION}.rounding={given.rounding!r}: rounded numbers may be longer than privacy.clip_norm, and nobody can clip "
            f"them again: set {SECTION}.rounding=toward_zero"
        )
    if promised.accounting == "poisson":
        raise ConfigError(
            f"privacy.accounting='poisson': whether a round is void depends on how many others are there, which is not reckoned "
            f"with: set privacy.accounting=participation, or leave {SECTION} out"
        )


def _check_phase(phase: Phase, name: str) -> None:
    """Refuse what is no sum. Raises ConfigError."""
    mend = f"leave {SECTION} out, or choose fedavg"
    for slot, reduction in phase.reduce.items():
        if isinstance(reduction, Store):
            raise ConfigError(
                f"{SECTION}: {name} keeps what each client sends of slot {slot!r} (phase {phase.name!r}), and the server sees the "
                f"sum alone: {mend}"
            )
        if isinstance(reduction, ByDomainMean):
            raise ConfigError(
                f"{SECTION}: {name} adds up slot {slot!r} (phase {phase.name!r}) by domain, and one sum of all is told: {mend}"
            )
        if type(reduction) not in (Mean, Total):
            raise ConfigError(
                f"{SECTION}: {name} reduces slot {slot!r} (phase {phase.name!r}) by {type(reduction).__name__}, which is no plain "
                f"mean or sum: {mend}"
            )
    if phase.weight not in ("uniform", "num_examples"):
        raise ConfigError(
            f"{SECTION}: clients of {name} tell a weight of their own ({phase.weight}), which the server is not to see: {mend}"
        )
    if phase.reweighted:
        raise ConfigError(
            f"{SECTION}: {name} multiplies what each client sends by a weight of its own, and the server is to see a plain sum: "
            f"choose an algorithm without such weights, or leave {SECTION} out"
        )
    if any(not getattr(t, "linear", False) for t in phase.uplink):
        raise ConfigError(
            f"{SECTION}: {name} changes on its way what clients send, which would not add up as integers in one range: {mend}"
        )


def _check_sent(
    given: SecureAggregation, name: str, sent: Mapping[str, Mapping[str, Any]], moves: set[str | None]
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
    if others and not isinstance(given.clip, dict):
        every = ", ".join(f"{slot}: {given.clip:g}" for slot in sorted(slots))
        raise ConfigError(
            f"{SECTION}.clip={given.clip:g}: clients of {name} send {', '.join(others)} too, which is no model that has moved, and "
            f"may be far out of that range: give one for each slot, such as {{{every}}}, and look at algorithm/secure_clipped"
        )
    if isinstance(given.clip, dict) and set(given.clip) != set(slots):
        raise ConfigError(
            f"{SECTION}.clip={show(given.clip)}: clients of {name} send {', '.join(sorted(slots))}: give each a range, or one "
            f"number for all"
        )


def told(config: Config, algorithm: Algorithm) -> str | None:
    """Return what a plan says, of a cohort of which nobody goes; None where there is no secure aggregation."""
    given = config.secure_aggregation
    if given is None:
        return None
    cost, invited = _costs(config, algorithm), asked(config.cohort)
    first = next(p.secure for p in algorithm.phases if p.secure is not None)
    size = min(invited, (given.neighbours or invited) + 1)
    up, besides, down = (sum(c[key] for c in cost) for key in ("masked", "besides_up", "besides_down"))
    return (
        f"{given.protocol}, {needed(given.threshold, size)} of {size} parts rebuild a secret; {given.bits} bits a number, "
        f"{first.modulus_bits} masked; a client sends {up:,} bytes masked and {besides:,} besides, gets {down:,} more, a round if "
        f"nobody goes; a simulation, which protects nobody"
    )


def sent_each(config: Config, algorithm: Algorithm) -> int:
    """Return the bytes that a client sends in a round if nobody goes."""
    return sum(c["masked"] + c["besides_up"] for c in _costs(config, algorithm))


def _costs(config: Config, algorithm: Algorithm) -> list[dict[str, int]]:
    return [costs(p.secure, asked(config.cohort)) for p in algorithm.phases if p.secure is not None]


def waits_s(config: Config, algorithm: Algorithm, devices: Machines, clients: int) -> float:
    """Return what the exchanges besides the work take a round on a device in the middle, masks too; 0 where there are none."""
    device = devices.fleet.of(torch.arange(min(clients, SAMPLE))).median()
    one, found = torch.zeros(1, dtype=torch.int64), 0.0
    for phase in algorithm.phases:
        if (secure := phase.secure) is None:
            continue
        c, others = (
            costs(secure, asked(config.cohort)),
            min(asked(config.cohort), (secure.neighbours or clients) + 1) - 1,
        )
        load = Load(
            one + 1, one + 1, c["besides_down"], c["besides_up"], secure.mask_flop * secure.numbers * (others + 1)
        )
        found += float(
            3 * 2 * device.latency_s + device.download_s(load) + device.upload_s(load) + device.compute_s(load)
        )
    return found


def costs(secure: Secure, clients: int) -> dict[str, int]:
    """Return the bytes that one of so many clients sends, masked and besides, and gets besides, if nobody goes."""
    others = min(clients, (secure.neighbours or clients) + 1) - 1
    return {
        "masked": secure.message_bytes,
        "besides_up": 2 * KEY_BYTES + 2 * PART_BYTES * others + PART_BYTES * (others + 1),
        "besides_down": 2 * KEY_BYTES * others + 2 * PART_BYTES * others,
    }


def said(config: Config, algorithm: Algorithm, lost: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return what ``summary.json`` says, with the event of the first sum that lost much; None without secure aggregation."""
    given = config.secure_aggregation
    if given is None:
        return None
    phases = {p.name: p.secure for p in algorithm.phases if p.secure is not None}
    return {
        "protocol": given.protocol,
        "threshold": given.threshold,
        "neighbours": given.neighbours,
        "executed": given.execute,
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
