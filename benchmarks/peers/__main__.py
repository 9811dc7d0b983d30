"""Compare the engine with bare loops, JAX, pfl-research and Flower on this machine: ``python -m benchmarks.peers``.

The contestants take turns (a, b, c, a, b, c, ...), so that a machine that grows slower or faster does so for all, and ratios
are taken within a turn.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import command, limit
from benchmarks.cases import BY_COHORT, CASES
from benchmarks.command import say
from benchmarks.peers.environments import Failure, default_folder, execute, ready
from benchmarks.peers.workload import Case
from benchmarks.results import result

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent
WORKERS = 2
FLOWER_ROUNDS, FLOWER_WARMUP = 3, 2
Run = dict[str, Any]


class Contestant(NamedTuple):
    """What is compared: its column, the algorithms it knows, and how a case is run on it."""

    title: str
    algorithms: tuple[str, ...]
    run: Callable[[Case, argparse.Namespace], Run]


def module(name: str, *options: str) -> Callable[[Case, argparse.Namespace], Run]:
    """Return how a case is run by one of our own commands."""

    def run(case: Case, args: argparse.Namespace) -> Run:
        rounds = ["--rounds", str(case.rounds), "--warmup", str(case.warmup), "--json"]
        out = execute([sys.executable, "-m", name, "--case", case.name, *options, *rounds], args.limit, cwd=ROOT)
        return answer(out)

    return run


def pfl(case: Case, args: argparse.Namespace, processes: int = WORKERS) -> Run:
    """Run a case on pfl-research with so many processes: of those that share their results by NCCL, a GPU holds one."""
    programs = ready(args.envs, "pfl")
    launch = [str(programs / "torchrun"), "--standalone", f"--nproc_per_node={processes}"]
    job = ask(case, case.rounds, case.warmup)
    return peer(case, execute([*launch, str(SCRIPTS / "pfl_loop.py"), job], args.limit))


def flower(case: Case, args: argparse.Namespace) -> Run:
    """Run a case on Flower with two Ray actors."""
    programs = ready(args.envs, "flower")
    job = ask(case, min(case.rounds, FLOWER_ROUNDS), FLOWER_WARMUP)
    return peer(case, execute([str(programs / "python"), str(SCRIPTS / "flower_loop.py"), job], args.limit))


def jax(case: Case, args: argparse.Namespace) -> Run:
    """Run a case on JAX in one process."""
    programs = ready(args.envs, "jax")
    job = ask(case, case.rounds, case.warmup)
    return peer(case, execute([str(programs / "python"), str(SCRIPTS / "jax_loop.py"), job], args.limit))


def ask(case: Case, rounds: int, warmup: int) -> str:
    """Return a job as peers take it."""
    return json.dumps({"case": asdict(case), "rounds": rounds, "warmup": warmup, "workers": WORKERS})


def peer(case: Case, out: str) -> Run:
    """Return a peer's answer as a result."""
    found = answer(out)
    return result(case, found["seconds"], found["version"]) | {"version": found["version"], "torch": found["torch"]}


def answer(out: str) -> Run:
    """Return the last JSON object printed. Raises Failure."""
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if not lines:
        raise Failure("it printed no result")
    return json.loads(lines[-1])


OURS = ("fedavg", "cdma_ada", "fedmm")
CONTESTANTS = {
    "fedfleet": Contestant(
        "fedfleet, 2 actors", OURS, module("benchmarks.engine", "--executor", "ray", "--actors", str(WORKERS))
    ),
    "alone": Contestant("fedfleet, one process", ("fedavg",), module("benchmarks.engine", "--executor", "local")),
    "loops": Contestant("two bare loops", OURS, module("benchmarks.loops", "--processes", str(WORKERS))),
    "loop": Contestant("one bare loop", OURS, module("benchmarks.loops")),
    "batched": Contestant("one batched loop", ("fedavg",), module("benchmarks.loops", "--batched")),
    "jax": Contestant("JAX, one process", ("fedavg",), jax),
    "pfl": Contestant("pfl-research, 2 processes", ("fedavg",), pfl),
    "flower": Contestant("Flower, 2 actors", ("fedavg",), flower),
}


def compare(case: Case, names: Sequence[str], args: argparse.Namespace) -> dict[str, list[Run]]:
    """Let all contestants that know the case's algorithm take their turns; a failed run holds an "error"."""
    runs: dict[str, list[Run]] = {name: [] for name in names if case.algorithm in CONTESTANTS[name].algorithms}
    for turn in range(args.repeats):
        for name in runs:
            try:
                found = CONTESTANTS[name].run(case, args)
                said = f"{found['client_updates_per_s']:,.1f} client updates/s"
            except Failure as e:
                found, said = {"error": str(e)}, f"failed: {e}"
            runs[name].append(found)
            say(f"{case.name}, turn {turn + 1} of {args.repeats}, {CONTESTANTS[name].title}: {said}")
    return runs


def rates(runs: Sequence[Run]) -> list[float | None]:
    """Return client updates a second of every turn, None where it failed."""
    return [r.get("client_updates_per_s") for r in runs]


def ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float | None]:
    """Return ours / theirs, turn by turn."""
    return [a / b if a and b else None for a, b in zip(ours, theirs, strict=True)]


def cell(values: Sequence[float | None] | None) -> str:
    """Return the median of what there is, with the least and the most."""
    if values is None:
        return "-"
    there = [v for v in values if v is not None]
    if not there:
        return "failed"
    text = command.number(median(there))
    return text if len(there) == 1 else f"{text} ({command.number(min(there))} to {command.number(max(there))})"


def report(
    found: dict[str, dict[str, list[Run]]], names: Sequence[str], flop_per_s: float, of: Mapping[str, Case]
) -> None:
    """Print the tables: speeds, shares of what large products reach, ratios, failures."""
    others = [n for n in names if n != "fedfleet"]
    speeds = {case: {n: rates(r) for n, r in runs.items()} for case, runs in found.items()}
    title = "Client updates a second: median (least to most) over the turns"
    rows = [[case, *(cell(s.get(n)) for n in names)] for case, s in speeds.items()]
    command.show(title, ["case", *(CONTESTANTS[n].title for n in names)], rows)
    title = f"Their arithmetic over that of large products, {flop_per_s / 1e9:,.0f} GFLOP/s on {WORKERS} cores at once"
    shares = {
        c: {n: [r and r * limit.of_update(of[c]) / flop_per_s for r in v] for n, v in s.items()}
        for c, s in speeds.items()
        if of[c].algorithm == "fedavg"
    }
    rows = [[case, *(cell(s.get(n)) for n in names)] for case, s in shares.items()]
    command.show(title, ["case", *(CONTESTANTS[n].title for n in names)], rows)
    title = "fedfleet with 2 actors, times as fast as: median (least to most) of the ratios within a turn"
    versus = {case: {n: ratios(s["fedfleet"], s[n]) for n in others if n in s} for case, s in speeds.items()}
    rows = [[case, *(cell(v.get(n)) for n in others)] for case, v in versus.items()]
    command.show(title, ["case", *(CONTESTANTS[n].title for n in others)], rows)
    errors = {
        f"{c}, {CONTESTANTS[n].title}: {r['error']}" for c, v in found.items() for n in v for r in v[n] if "error" in r
    }
    for line in sorted(errors):
        print(f"failed: {line}")


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    to = command.parser("benchmarks.peers", __doc__)
    command.add_case(to)
    to.add_argument(
        "--by-cohort", action="store_true", help="instead of --case: small clients, 10 to 1,000,000 a round"
    )
    to.add_argument("--repeats", type=command.count, default=3, help="turns of each contestant (default 3)")
    to.add_argument(
        "--rounds", type=command.count, help=f"timed rounds (Flower {FLOWER_ROUNDS}); some seconds if not given"
    )
    to.add_argument("--warmup", type=command.count, help="rounds before them; about a third as many if not given")
    to.add_argument(
        "--envs", type=Path, default=default_folder(), help="folder of the peers' environments (default %(default)s)"
    )
    to.add_argument("--skip-jax", action="store_true")
    to.add_argument("--skip-pfl", action="store_true")
    to.add_argument("--skip-flower", action="store_true")
    to.add_argument("--limit", type=command.seconds, default=1800, help="seconds that one run may take (default 1800)")
    to.add_argument("--json", type=command.writable, metavar="FILE", help="write everything measured")
    args = to.parse_args(argv)
    if args.by_cohort and args.case:
        to.error("argument --by-cohort: not allowed with argument --case")
    skipped = {n for n in ("jax", "pfl", "flower") if getattr(args, f"skip_{n}")}
    # Of a million clients the loops and Flower would take hours.
    skipped |= {"loops", "loop", "flower"} if args.by_cohort else {"alone"}
    names = [n for n in CONTESTANTS if n not in skipped]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    flop_per_s, found, of = limit.together(WORKERS), {}, {}
    for case in command.cases(BY_COHORT if args.by_cohort else args.case, rounds=args.rounds, warmup=args.warmup):
        of[case.name] = case
        found[case.name] = compare(case, names, args)
        if args.json:
            about = {"machine": command.machine(), "repeats": args.repeats, "cases": [asdict(CASES[c]) for c in found]}
            command.write(args.json, about | {"flop_per_s": flop_per_s, "runs": found})
    report(found, names, flop_per_s, of)


if __name__ == "__main__":
    main()
