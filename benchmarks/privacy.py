"""Cost of clipping and noise: rounds with and without, in turns: ``python -m benchmarks.privacy``.

Both run in this process with one thread, by the engine's own rule for the case. Ratios are taken within a turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from benchmarks import turns, world
from benchmarks.peers.workload import Case
from fedfleet.middleware.privacy.hidden import NORM, WITHIN, Hidden
from fedfleet.middleware.privacy.noise import Adaptive, Mechanism, private
from fedfleet.simulator.executors.local import LocalExecutor

FOLLOWS = Adaptive(quantile=0.5, lr=0.2, count_noise=5.0, sent=NORM, told=WITHIN)


def mechanism(**given: Any) -> Mechanism:
    """Return clipping to 1 and a little noise of the server's."""
    clip = Hidden(norm=1.0, tells="follows" in given)
    return Mechanism(clip=clip, norm=1.0, multiplier=0.001, divide_by=None, **given)


WAYS = {
    "clipped, noise": {},
    "norm follows": {"follows": FOLLOWS},
    "noise of 8 bands": {"mixing": (1.0,) + (-0.1,) * 7},
}


def measure(case: Case, number: int) -> dict[str, Any]:
    """Return milliseconds a round, medians, and each way's over that without."""
    plain = world.build(case)
    how, rounds = world.rule(plain), case.warmup + number
    made = {"nothing hidden": plain.algorithm} | {
        name: private(plain.algorithm, mechanism(**given), rounds) for name, given in WAYS.items()
    }
    with ExitStack() as stack:
        executors = {name: stack.enter_context(closing(LocalExecutor(1))) for name in made}
        under_way = {
            name: (r.seconds for r in world.play(replace(plain, algorithm=a), executors[name], how, rounds))
            for name, a in made.items()
        }
        found = turns.taken(under_way, case, number, "nothing hidden", WAYS)
    return {"inner": how.inner, **found}


def shown(case: str, found: dict[str, Any]) -> Iterator[str]:
    """Yield what is read of it."""
    yield f"{case}, {found['inner']}, one process, one thread"
    for name, ms in found["ms"].items():
        over = found["over"].get(name)
        yield f"{name:18} {ms:8.1f} ms a round" + (f", {over['median']:.2f} times" if over else "")


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    turns.main("benchmarks.privacy", __doc__, 30, argv, lambda case, number: measure(case, number), shown)


if __name__ == "__main__":
    main()
