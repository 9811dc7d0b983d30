"""``python -m tests.mutation [FILE ...]``: do the tests see a wrong sign, constant, comparison or condition?

Cosmic Ray makes the mutants. Each is tried in a fork of a process that has imported what takes long, on the tests of its file,
until the first one fails. It takes hours for all of them: ``--sample 10`` takes as many of each file, always the same ones.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple, NoReturn

from tests.mutation.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
SLOWEST, SPARE_S = 4.0, 20.0  # how much longer than without a mutant its tests may take until they count as failed
OPERATORS = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "Pow_Mul")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("FloorDiv_Mul", "Mod_Add", "BitAnd_BitOr", "BitOr_BitAnd")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "Gt_LtE")),
    *("ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Invert_UAdd"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd", "AddNot"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "NumberReplacer", "ZeroIterationForLoop"),
)


class Mutant(NamedTuple):
    """A file with one thing wrong in it."""

    file: str
    operator: str
    occurrence: int
    source: str

    def difference(self) -> str:
        """Return the line that is other, before and after."""
        before = (ROOT / self.file).read_text(encoding="utf-8")
        lines = difflib.unified_diff(before.splitlines(), self.source.splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def mutants(file: str) -> Iterator[Mutant]:
    """Yield the mutants of a file that compile to another program."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / file).read_text(encoding="utf-8")
    seen = {_program(source)}
    for operator in OPERATORS:
        occurrence = 0
        while (mutated := mutate_code(source, get_operator(f"core/{operator}")(), occurrence)) is not None:
            with suppress(SyntaxError):  # as of a star that is no product
                if (program := _program(mutated)) not in seen:
                    seen.add(program)
                    yield Mutant(file, operator, occurrence, mutated)
            occurrence += 1


def _program(source: str) -> str:
    """Return what of a source counts: not the annotations of functions, nor sentences."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
    return ast.dump(tree)


def outcomes(
    tests: Sequence[str], found: Sequence[Mutant | None], limit_s: float, jobs: int
) -> Iterator[tuple[Mutant | None, str]]:
    """Yield each mutant, None for the program as it is, with what came of it: "killed", "timeout" or "survived"."""
    waiting, under_way = list(reversed(found)), dict[int, tuple[Mutant | None, float]]()
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            mutant = waiting.pop()
            pid = os.fork()
            if pid == 0:
                os.setsid()
                _become(mutant, tests)
            under_way[pid] = (mutant, time.monotonic() + limit_s)
        time.sleep(0.05)
        for pid, (mutant, until) in list(under_way.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() < until:
                continue
            if not ended:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del under_way[pid]
            yield mutant, "timeout" if not ended else "survived" if status == 0 else "killed"


def _become(mutant: Mutant | None, tests: Sequence[str]) -> NoReturn:
    """Run tests in this process, with the mutant in the place of its file, and end it."""
    import pytest

    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    read = SourceFileLoader.get_code
    if mutant is not None:

        def get_code(self: SourceFileLoader, name: str) -> object:
            if Path(self.path).resolve() == ROOT / mutant.file:
                return compile(mutant.source, self.path, "exec")
            return read(self, name)

        SourceFileLoader.get_code = get_code  # pyright: ignore[reportAttributeAccessIssue]
    options = ["-x", "-q", "-n0", "-m", "not ray", "-p", "no:cacheprovider", "-p", "no:randomly"]
    os._exit(int(pytest.main([*options, *(str(ROOT / t) for t in tests)])))


def main() -> int:
    """Try mutants; print what survives, and a table. The exit status is 1 where tests fail without a mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("files", nargs="*", choices=[*TARGETS, []], metavar="FILE", help="all of them by default")
    parser.add_argument("--sample", type=int, help="so many of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="a line of JSON for each mutant")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for slow in ("torch", "torchvision", "pandas", "sklearn.metrics", "hypothesis", "pydantic"):
        __import__(slow)
    assert not [m for m in sys.modules if m.startswith("fedfleet.simulator")], "a fork could not replace them"
    counts: dict[str, Counter[str]] = {}
    takes_s: dict[tuple[str, ...], float] = {}
    for file in args.files or TARGETS:
        tests, started = TARGETS[file], time.monotonic()
        if tuple(tests) not in takes_s:  # several files are held by the same tests
            ((_, as_it_is),) = outcomes(tests, [None], 3600.0, 1)
            if as_it_is != "survived":
                print(f"{file}: its tests fail without any mutant: {' '.join(tests)}")
                return 1
            takes_s[tuple(tests)] = time.monotonic() - started
        limit_s = SLOWEST * takes_s[tuple(tests)] + SPARE_S
        found = list(mutants(file))
        if args.sample is not None:
            found = random.Random(f"{args.seed} {file}").sample(found, min(args.sample, len(found)))
        counts[file] = Counter()
        for mutant, outcome in outcomes(tests, found, limit_s, args.jobs):
            assert mutant is not None
            counts[file][outcome] += 1
            line = {"file": file, "operator": mutant.operator, "occurrence": mutant.occurrence, "outcome": outcome}
            line["difference"] = mutant.difference()
            if outcome == "survived":
                print(f"{file}: survived\n{line['difference']}", flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(line) + "\n")
        print(f"{file}: {dict(counts[file])}", flush=True)
    print(f"\n{'file':44} mutants  killed  survived")
    for file, count in counts.items():
        print(f"{file:44} {count.total():7} {count['killed'] + count['timeout']:7} {count['survived']:9}")
    total = sum(counts.values(), Counter[str]())
    print(f"{'all':44} {total.total():7} {total['killed'] + total['timeout']:7} {total['survived']:9}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
