"""The commands: what they print, write and end with."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from rich.console import Console

from fedfleet import __main__ as program
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.commands import cli, completing
from fedfleet.config.schema import load
from fedfleet.datasets.registry import DATASETS
from fedfleet.experiments import campaign
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.progress import Progress
from fedfleet.middleware.attacks.kinds.registry import ATTACKS
from fedfleet.middleware.compression.codecs.registry import TRANSFORMS
from fedfleet.simulator.executors import nodes
from fedfleet.tasks.registry import TASKS
from fedfleet.tracking.callback import Begun
from tests.front.commands.lines import line

Command = Callable[..., tuple[int, str, str]]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def test_list(command: Command) -> None:
    names = {
        "algorithms": ALGORITHMS,
        "attacks": ATTACKS,
        "datasets": DATASETS,
        "tasks": TASKS,
        "transforms": TRANSFORMS,
    }
    for what, of in names.items():
        status, out, _ = command("list", what)
        said = [each.split(maxsplit=1) for each in out.splitlines()]
        assert (status, [name for name, _ in said]) == (0, list(of))
        assert len({about for _, about in said}) == len(said)  # none is like another


def test_run_and_report_and_what_is_said_at_the_end(command: Command, tiny: Path, tmp_path: Path) -> None:
    status, out, error = command("run", tiny, "--out", tmp_path / "a" / "run")
    assert status == 0
    who, end, final, report = out.splitlines()
    assert "initial model: accuracy" in error
    assert "| completed 4 of 4 | " in next(
        line for line in error.splitlines() if line.startswith("round 3/3 | accuracy")
    )
    assert who.startswith("fedavg learnt to classify examples of digits, held by 20 clients")
    assert end.startswith("It ran to its last round.")
    assert final.startswith("fedavg  final accuracy 0.")
    run = tmp_path / "a" / "run"
    assert report == f"report: {run / 'report.html'}"
    assert (run / "report.html").is_file()
    status, out, _ = command("run", tiny, "--out", tmp_path / "again", "--no-report")
    assert (status, out.splitlines()) == (0, [who, end, final])
    status, out, _ = command("report", run, "--out", tmp_path / "b")
    assert (status, out) == (0, f"{tmp_path / 'b' / 'report.html'}\n")
    (run / "rounds.parquet").write_text("junk", encoding="utf-8")
    line(command("report", run))


HEAVY = {"torch", "torchvision", "ray", "pandas", "pyarrow", "matplotlib", "sklearn", "scipy", "numpy"}
COMMAND = """
import sys
from fedfleet.commands import cli
sys.argv[0] = "fedfleet"
try:
    cli.main()
except SystemExit as end:
    print(end.code, *sorted(name for name in sys.modules if "." not in name), sep=" ", file=sys.stderr)
"""


def ended(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-c", code, *arguments], {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)


@pytest.mark.parametrize(("arguments", "status"), [
    (["--help"], 0), (["study", "--help"], 0), (["run", "--nonsense"], 2), (["run", "nowhere.yaml"], 2),
    (["plan", __file__, "rounds"], 2), (["resume", "nowhere"], 2), (["paper", "nowhere.yaml"], 2),
    (["convert", "nowhere.parquet", "out"], 2),
])  # fmt: skip
def test_what_needs_no_arithmetic_imports_none(arguments: list[str], status: int) -> None:
    found, *modules = ended(COMMAND, *arguments).stderr.splitlines()[-1].split()
    assert int(found) == status
    assert "typer" in modules
    assert HEAVY.isdisjoint(modules)


@pytest.mark.parametrize(("typed", "offered"), [
    ("fedfleet re", ["resume", "report"]), ("fedfleet watch --o", ["--once"]),
    ("fedfleet show algorithm scaf", ["scaffold"]),
])  # fmt: skip
def test_a_shell_completes_commands_options_and_names_without_arithmetic(
    typed: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    completing.built_in()  # which keeps the names; without them it looks in the registries, once
    asked = {"_FEDFLEET_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = ended(COMMAND, **asked)
    assert done.stdout.split() == offered
    assert HEAVY.isdisjoint(done.stderr.split())


@pytest.mark.slow
def test_a_worker_imports_what_blocks_need_alone() -> None:
    needed = "fedfleet.simulator.executors.actor, fedfleet.tasks.registry, fedfleet.datasets.registry"
    code = f"import sys, {needed}; print(*(name for name in sys.modules if '.' not in name))"
    found = ended(code).stdout.split()
    assert {"torchvision", "pandas", "matplotlib", "sklearn", "scipy", "typer"}.isdisjoint(found)


def test_plan_says_how_clients_learn_whatever_was_given(command: Command, tiny: Path) -> None:
    dealt = ("population.clients=7", "population.partition={kind: dirichlet, alpha: 0.3}", "algorithm.batch_size=50")
    config = load(tiny, {"population.clients": 7, "population.partition": {"kind": "dirichlet", "alpha": 0.3}})
    clients = Experiment(config).population
    counts = clients.num_examples(torch.arange(clients.size)).sort().values
    for given, passes in ((("algorithm.steps=null",), 1), (("algorithm.steps=null", "algorithm.epochs=2"), 2)):
        least, middle, most = (passes * -(-int(counts[i]) // 50) for i in (0, 3, 6))
        assert least < middle < most
        status, out, _ = command("plan", tiny, *dealt, *given)
        assert status == 0
        said = " ".join(out.replace("│", " ").split())
        assert f"epochs {passes}, batch_size 50, lr 0.1" in said
        assert f"train: {least} to {most}, {middle} in the middle, on up to 50 examples" in said
    _, out, _ = command("plan", tiny, "algorithm={name: robust, of: {name: fedavg, steps: 3, lr: 0.3}}")
    said = " ".join(out.replace("│", " ").split())
    assert "of fedavg (steps 3, batch_size 10, lr 0.3," in said
    assert "train: 3, on up to 10 examples" in said
    theory = "{pl: 1, smoothness: 1, sigma_1: 1, sigma_2: 1, gap: 1, responses: 4, rounds: 3}"
    _, out, _ = command("plan", tiny, "task=auc", f"algorithm={{name: cdma_one, theory: {theory}}}")
    said = " ".join(out.replace("│", " ").split())
    assert "epochs 1, batch_size 10, theory 1" in said
    assert " lr " not in said


SHARES = ("1 actors, about 1.33 blocks, 3.33", "2 actors, about 2.67 blocks, 6.67")


@pytest.mark.parametrize(("actors", "first", "of_one", "of_two"), [
    ("auto", "room for 3 actors, 3 come up at once", *SHARES),
    ("1", "room for 3 actors, 1 come up at once", "1 actors, about 4 blocks, 10", "0 actors, about 0 blocks, 0"),
    ("5", "room for 3 actors, 3 come up at once, 2 wait for nodes to join", *SHARES),
])  # fmt: skip
def test_plan_says_what_would_go_to_which_node(command, tiny, monkeypatch, actors, first, of_one, of_two):
    asked = []

    def visit(address: str, need: nodes.Need) -> nodes.Nodes:
        asked.append((address, need))
        room = {"c": 4, "a": 1, "b": 2}
        return nodes.Nodes(room, {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}, frozenset("c"))

    monkeypatch.setattr(nodes, "visit", visit)
    on = ("executor.kind=ray", "executor.address=10.0.0.1:6379", f"executor.actors={actors}", "executor.block_size=3")
    need = ("executor.cpus_per_actor=2", "executor.memory_per_actor_gb=1.5")
    status, out, _ = command("plan", tiny, "cohort.size=10", *on, *need)
    assert status == 0
    assert asked == [("10.0.0.1:6379", nodes.Need(2.0, 0.0, 1_500_000_000))]
    said = " ".join(line.split("│")[2].strip() for line in out.splitlines() if line.count("│") == 3)
    of_nodes = f"10.0.0.1: room for 1, {of_one} clients a phase 10.0.0.2: room for 2, {of_two} clients a phase"
    assert f" {first} {of_nodes} 10.0.0.3: room for 4, which leaves " in said


def test_plan_says_that_no_node_has_room(command: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "visit", lambda *of: nodes.Nodes({"a": 0}, {"a": "10.0.0.1"}, frozenset()))
    status, out, _ = command("plan", tiny, "executor.kind=ray", "executor.address=10.0.0.1:6379")
    said = " ".join(line.split("│")[2].strip() for line in out.splitlines() if line.count("│") == 3)
    assert (status, "0 come up at once: a run waits twenty minutes" in said) == (0, True)


@pytest.mark.parametrize(("given", "reason"), [
    (("executor.block_size=2",), ", as it is no small job"),
    (("executor.cpus_per_actor=1",), ", as options of Ray are given"),
])  # fmt: skip
def test_plan_says_why_a_run_is_on_ray(command: Command, tiny: Path, given: tuple[str, ...], reason: str) -> None:
    status, out, _ = command("plan", tiny, "executor.kind=auto", "rounds=1_000_000", *given)
    said = " ".join(line.split("│")[2].strip() for line in out.splitlines() if line.count("│") == 3)
    assert (status, reason in said) == (0, True)


def test_plan_shows_each_label_once_and_writes_nothing(command: Command, tiny: Path) -> None:
    status, out, _ = command("plan", tiny, "seeds=[1, 2]", "compare={one: {}, two: {algorithm: fedprox}}")
    assert status == 0
    assert [out.count(text) for text in ("one: fedavg", "two: fedprox")] == [1, 1]
    assert "left out" not in out
    assert out.count("1, 2: the first is shown") == 2
    near = "compare={one: {algorithm.mu: 1}, two: {algorithm.name: fedavg}}"
    status, out, _ = command("plan", tiny, "algorithm={name: fedprox, mu: 0.5}", near)
    assert (status, out.count("left out")) == (0, 1)
    assert out.index("two: fedavg") < out.index("algorithm.mu: fedavg has no such option")
    status, out, error = command("plan", tiny, "executor.kind=ray", "executor.actors=1", "cohort.size=10")
    assert (status, error) == (0, "")
    said = ("20 with 72 examples", "650 parameters", "up to 1 of 10 clients", "1 Ray actors", "98% of the floats")
    assert [text for text in said if text not in out] == []
    assert list(tiny.parent.iterdir()) == [tiny]


def test_options_stand_above_overrides_and_a_folder_has_the_name_of_the_file_and_a_number(
    command, tiny, tmp_path, monkeypatch
):
    monkeypatch.chdir(tiny.parent)
    for _ in range(2):
        assert command("run", tiny, "rounds=0", "--no-report")[0] == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["tiny", "tiny-2"]
    (tmp_path / "a: b").mkdir()  # a name that is not plain YAML
    assert command("run", tiny, "rounds=1", "--no-report", "--out", tmp_path / "a: b" / "first")[0] == 0
    model = tmp_path / "a: b" / "first" / "model.safetensors"
    options = [
        "--warm-start", model, "--until", "eval/accuracy=0.001", "--max-seconds", "100", "--out", tmp_path / "run",
    ]  # fmt: skip
    assert command("run", tiny, "until=eval/accuracy=0.9", "--no-report", *options)[0] == 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert (config["warm_start"], config["until"], config["max_seconds"]) == (str(model), "eval/accuracy=0.001", 100.0)
    assert (summary(tmp_path / "run")["status"], summary(tmp_path / "run")["rounds"]) == ("stopped", 0)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_what_was_done(command, tiny, monkeypatch, number, status):
    shown: list[int] = []

    def round(self: Progress, row: Any, phases: Any) -> None:
        shown.append(row["round"])
        if len(shown) == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Progress, "round", round)
    run = tiny.parent / "run"
    found, _, error = command("run", tiny, "rounds=1000", "--out", run)
    done = f"interrupted after {len(shown)} of 1,000 rounds"
    assert (found, error.splitlines()[-1]) == (status, f"{done}: go on with `fedfleet resume {run}`")
    assert summary(run)["status"] == "interrupted"
    assert summary(run)["rounds"] == len(pd.read_parquet(run / "rounds.parquet")) == len(shown)
    assert (run / "model.safetensors").is_file()


def test_an_interruption_of_several_runs_says_how_many_are_done(command, tiny, monkeypatch):
    def round(self: Progress, row: Any, phases: Any) -> None:
        done.append(row["round"])
        if len(done) == 4:
            raise KeyboardInterrupt

    done: list[int] = []
    monkeypatch.setattr(Progress, "round", round)
    status, _, error = command("run", tiny, "seeds=[0, 1]", "--out", tiny.parent / "run")
    told = "interrupted after 1 of 2 runs, in the next after 1 of 3 rounds: go on with"
    assert (status, error.splitlines()[-1].startswith(told)) == (130, True)


def test_what_ran_out_of_time_says_so_when_it_is_resumed(command, tiny):
    for seeds, said in (
        ("null", "stopped after 1 rounds by max_seconds=1e-06: give another to go on"),
        ("[0, 1]", "2 of 2 runs are at their end, 2 of them by max_seconds: give another, or null, to go on"),
    ):
        out = tiny.parent / f"run{len(seeds)}"
        assert command("run", tiny, f"seeds={seeds}", "--max-seconds", "1e-6", "--no-report", "--out", out)[0] == 0
        status, _, error = command("resume", out, "--no-report")
        assert (status, error.count(said)) == (0, 1)


def test_an_interruption_before_there_is_a_folder_says_so(command, tiny, monkeypatch):
    def interrupted(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    run = tiny.parent / "run"
    monkeypatch.setattr(campaign, "run", interrupted)
    told = "interrupted: nothing was written; the same command begins again\n"
    assert command("run", tiny, "--out", run) == (130, "", told)
    run.mkdir()
    assert command("run", tiny, "--out", run) == (130, "", told)
    monkeypatch.setattr(cli, "loaded", interrupted)
    assert command("run", tiny, "--out", run) == (130, "", "interrupted\n")
    assert command("plan", tiny) == (130, "", "interrupted\n")


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt(), 130), (SystemExit(2), 2), (SystemExit(None), 0)])
def test_the_process_ends_with_its_status_whenever_ctrl_c_comes(monkeypatch, capsys, end, status):
    def ends() -> None:
        raise end

    ended: list[int] = []
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(cli, "main", ends)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(program.atexit, "register", at_exit.append)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as found:
            program.main()
        signal.raise_signal(signal.SIGINT)
        assert (found.value.code or 0, ended) == (status, [status])
        (last,) = at_exit
        last()
        assert ended == ([130, 130] if status == 130 else [status])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n" * (status == 130)


def test_diverged_training_is_a_failed_run(command: Command, tiny: Path) -> None:
    run = tiny.parent / "run"
    status, _, error = command("run", tiny, "algorithm.lr=1e39", "--out", run)
    *_, last = error.splitlines()
    assert (status, last.startswith("failed: round 0: client ")) == (1, True)
    assert summary(run)["status"] == "failed"
    assert summary(run)["error"] in error


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.slow
def test_one_failed_run_does_not_stop_the_others(command: Command, tiny: Path, jobs: int) -> None:
    out = tiny.parent / "all"
    status, _, error = command("run", tiny, "vary.algorithm.lr=[0.1, 1e39]", "--jobs", jobs, "--out", out)
    assert status == 1
    assert error.splitlines()[-1].startswith("failed: 1 of 2 runs: lr-1e+39: round 0: client ")
    assert [summary(out / name)["status"] for name in ("lr-0.1", "lr-1e+39")] == ["finished", "failed"]
    assert (out / "report.html").is_file()


def test_of_several_seeds_the_mean_and_the_deviation_are_said(command: Command, tiny: Path) -> None:
    out = tiny.parent / "all"
    given = ("run", tiny, "compare={a: {}, long: {algorithm.lr: 0.2}}", "rounds=1", "--no-report", "--out", out)
    status, said, _ = command(*given, "--seeds", 2, "seed=3")
    assert status == 0
    found = [summary(out / "long" / f"seed-{seed}")["final"]["eval/accuracy"] for seed in (3, 4)]
    mean, deviation = sum(found) / 2, abs(found[0] - found[1]) / 2**0.5
    first, second = said.splitlines()[-2:]
    assert first.startswith("a     final accuracy ")
    told = [float(x) for x in second.removeprefix("long  final accuracy ").split(",")[0].split(" ± ")]
    assert told == pytest.approx([mean, deviation], abs=1e-3)
    assert second.endswith(" (2 runs)")


def test_a_terminal_gets_one_live_line(tmp_path: Path) -> None:
    with (tmp_path / "screen").open("w+", encoding="utf-8") as screen:
        progress = Progress(Console(file=screen, force_terminal=True, width=200))
        begun = Begun(folder=Path(), name="", config={}, rounds=3, initial={"eval/auc": 0.25})
        progress.start(begun)
        row = {"client_steps": 1, "virtual_s": 1}
        phases = [
            {"invited": 10, "completed": 9, "stale": 0, "late": 1, "failed": 0, "unavailable": 0},
            {"invited": 12, "completed": 8, "stale": 0, "late": 0, "failed": 1, "unavailable": 3},
        ]
        for index in range(3):
            progress.round({"round": index, **row, "eval/auc": 0.5 if index == 1 else None}, phases)
            assert progress._live is not None
            progress._live.refresh()  # as it does eight times a second
        progress.end({})
        progress.start(begun)  # the next run counts from zero
        progress.round({"round": 0, "client_steps": 7, "virtual_s": 7}, phases)
        progress.end({})
        screen.seek(0)
        shown = screen.read()
    assert "initial model: auc 0.2500" in shown
    assert "round 2/3 | auc 0.5000 | completed 9+8 of 10+12 | " in shown
    assert "round 3/3 | auc 0.5000 after 2 | completed 9+8 of 10+12 | " in shown
    stays = [line for line in shown.split("\n") if "round 2/3" in line and "\x1b[2K" not in line.split("round 2/3")[1]]
    assert stays, "an evaluation stays above the line that moves"
    first, _ = re.split("initial model", shown)[1:]
    drawn = re.findall(r"round (\d)/3", first)
    assert drawn == sorted(drawn), "no round is drawn again below a later one"


@pytest.mark.slow
def test_letters_that_a_terminal_has_not_are_replaced(tmp_path, monkeypatch):
    given = {"label": "é 日本", "rounds": 1, "population": {"clients": 4}, "cohort": {"size": 2}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(given, allow_unicode=True), encoding="utf-8")
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace"))
    monkeypatch.setattr(sys, "argv", ["fedfleet", "run", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown.flush()
    assert end.value.code in (0, None)
    assert b"? ??" in shown.buffer.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
