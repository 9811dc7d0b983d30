"""The benchmarks run, and their contestants do the same work. Nothing is timed here."""

import importlib.util
import json
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedfleet
from benchmarks import (
    adaptation,
    assembly,
    blocks,
    cases,
    corrections,
    disk,
    domain_gap,
    dropout,
    engine,
    examples,
    invitations,
    limit,
    loops,
    memory,
    privacy,
    results,
    rules,
    scaling,
    server_step,
    start,
    unlike,
    world,
)
from benchmarks.gpu import __main__ as gpu
from benchmarks.peers import __main__ as peers
from benchmarks.peers import environments, workload
from benchmarks.peers.workload import Case
from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.spill import Spilled, SpillFile
from fedfleet.simulator.executors.local import LocalExecutor

TINY = Case("tiny", "logistic", (6,), clients=4, cohort=4, samples=10, epochs=3)
SMALL = {"clients": 3, "cohort": 3, "samples": 10, "epochs": 3}
TINY_CDMA = Case("tiny", "lenet_relu", (1, 28, 28), **SMALL, lr=1.0, algorithm="cdma_ada", task="auc")


@pytest.fixture
def told(capsys):
    """What a command answers with ``--json``, and what it shows otherwise."""

    def run(main, words, *, json_too=True):
        main([*words.split(), *["--json"] * json_too])
        out = capsys.readouterr().out
        return json.loads(out) if json_too else out

    return run


RUN = {"executor": "local", "actors": 1, "threads": 1, "inner": "auto", "block_size": None, "rounds": 1, "warmup": 1}


def test_the_data_of_a_client_are_a_function_of_the_seed_and_the_client():
    few, many, other = (workload.data(c) for c in (TINY, replace(TINY, clients=9), replace(TINY, seed=1)))
    for a, b, c in zip(few, many, other, strict=True):
        assert torch.equal(a, b[:4])
        assert not torch.equal(a, c)
        assert not torch.equal(a[0], a[1])
    assert few[0].dtype == torch.float32
    assert few[0].shape == (4, 10, 6)
    assert set(many[1].unique().tolist()) <= set(range(10))


def test_a_cohort_has_no_client_twice_and_is_a_function_of_the_round():
    case = replace(TINY, clients=50, cohort=20)
    first, again, second = (workload.cohort(case, t) for t in (0, 0, 1))
    assert first == again != second
    assert len(set(first)) == 20


def test_the_nets_of_the_contestants_have_the_same_shape(subtests):
    for name, case in cases.CASES.items():
        with subtests.test(name):
            ours = T.leaves(world.task(case).init(0)["x"])
            assert [p.shape for p in workload.net(case).parameters()] == [p.shape for p in ours if p.dim()]


TINY_FEDMM = replace(cases.ADAPTATION, name="tiny", shape=(3, 8, 8), clients=4, cohort=4, samples=6)
TINY_ROBUST = replace(TINY_CDMA, model="mlp", shape=(784,), task="robust", lr=0.1)


@pytest.mark.parametrize(
    ("case", "batched"),
    [(TINY, False), (TINY, True), (TINY_CDMA, False), (TINY_ROBUST, False), (TINY_FEDMM, False)],
    ids=lambda v: f"{v.algorithm}-{v.task}" if isinstance(v, workload.Case) else "batched" * v,
)
def test_the_bare_loop_and_the_engine_find_the_same_model(case, batched):
    """Every batch is a client's whole set and every client takes part, so nothing is left to chance."""
    ready = world.build(case)
    records = list(world.play(ready, LocalExecutor(1), world.rule(ready), 3))
    theirs = T.leaves(ready.algorithm.views["global"].params(records[-1].state)["x"])
    model = workload.net(case)
    start = [p for p in T.leaves(ready.task.init(case.seed)["x"]) if p.dim()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), start, strict=True):
            p.copy_(value)
    run, found = loops.prepare(case, model, batched=batched)
    for t in range(3):
        run(t)
    for a, b, c in zip(found, (p for p in theirs if p.dim()), start, strict=True):
        moved = float((b - c).abs().max())
        assert moved > 1e-4
        torch.testing.assert_close(a.detach(), b, rtol=0, atol=1e-3 * moved)


@pytest.mark.extras("jax")
@pytest.mark.parametrize("model", ["logistic", "mlp", "lenet", "cnn"])
@pytest.mark.parametrize("way", ["vmap", "map"])
def test_jax_and_the_bare_loop_find_the_same_model(model, way, monkeypatch):
    monkeypatch.syspath_prepend(Path(peers.__file__).parent)
    jax_loop = importlib.import_module("jax_loop")
    like = cases.CASES[model]
    case = replace(TINY, model=model, shape=like.shape, cohort=2, samples=4, batch=2, epochs=2)
    net = workload.net(case)
    before = [p.detach().clone() for p in net.parameters()]
    run = loops.fedavg(case, net)
    for t, (found, seconds) in enumerate(jax_loop.rounds(case, way, 2)):
        run(t)
        assert seconds > 0
        for a, b, c in zip([v for layer in found for v in layer], net.parameters(), before, strict=True):
            torch.testing.assert_close(torch.tensor(a.tolist()), b.detach(), rtol=1e-4, atol=1e-5)
            assert not torch.equal(b, c)


def test_the_engine_answers_with_one_json_object(told):
    options = "--case logistic --cohort 6 --executor local --rounds 2 --warmup 1 --overhead"
    found = told(engine.main, options)
    assert found["case"] == "logistic"
    assert found["executor"].startswith("this process, ")
    assert (found["rounds"], found["cohort"], found["steps"]) == (2, 6, 2)
    assert found["client_steps_per_s"] == pytest.approx(2 * found["client_updates_per_s"])
    assert found["client_updates_per_s"] == pytest.approx(6 / found["seconds_per_round"])
    assert {"cpu", "cores", "torch", "ray", "python"} <= set(found["machine"])
    assert 0 < found["draws_ms"] < found["phase_ms"]
    assert found["driver_ms"] > 0


def test_the_ways_to_run_a_block_are_measured_side_by_side(monkeypatch, told):
    monkeypatch.setitem(cases.CASES, "mlp", replace(TINY, name="mlp"))
    (found,) = told(blocks.main, "--case mlp --turns 2")["blocks"]
    assert (found["case"], found["phase"], found["clients"]) == ("mlp", "train", 4)
    assert found["operations"] > 50
    assert found["capture_blocks"] > 1
    assert {"mm", "addmm"} <= {row["operation"] for row in found["by_operation"]}
    assert list(found["ms"]) == ["serial", "batched", "factored", "replayed"]
    assert min(found["ms"].values()) > 0
    assert blocks.row(found)[-2].startswith(f"{found['replay_gains']['median']:.2f}")


@pytest.fixture
def beside(monkeypatch, told):
    """What a module measures of ways in turns, once it is seen that its table has a line of it."""

    def run(module, turns, line):
        monkeypatch.setitem(cases.CASES, "mlp", TINY)
        found = told(module.main, f"--turns {turns}")
        monkeypatch.setattr(module, "measure", lambda *_: found)
        assert line(found) in told(module.main, "", json_too=False)
        return found

    return run


def test_hiding_clients_is_measured_beside_not_hiding_them(beside):
    found = beside(privacy, 2, lambda found: f"{found['over']['norm follows']['median']:.2f} times")
    ways = ["clipped, noise", "norm follows", "noise of 8 bands"]
    assert list(found["ms"]) == ["nothing hidden", *ways]
    assert list(found["over"]) == ways


def test_rounds_in_which_clients_drop_out_are_measured_beside_others(monkeypatch, beside):
    for name, value in (("CLIENTS", 12), ("INVITED", 8), ("WARMUP", 1)):
        monkeypatch.setattr(dropout, name, value)
    found = beside(dropout, 3, lambda found: f"{found['over']['70% answer']['median']:.2f} times")
    assert list(found["ms"]) == ["all answer", "70% answer"]
    assert list(found["over"]) == ["70% answer"]
    sizes = dropout.population(TINY).offsets.diff()
    assert len(sizes) == 12
    assert 10 <= int(sizes.min()) < 100 < int(sizes.max()) <= 1000


def test_corrections_for_dropout_are_measured_beside_none(beside):
    found = beside(corrections, 2, lambda found: f"{found['over']['mifa']['median']:.2f} times")
    assert tuple(found["ms"]) == corrections.CORRECTIONS
    assert tuple(found["over"]) == corrections.CORRECTIONS[1:]


def test_hiding_examples_is_measured_beside_not_hiding_them_and_beside_opacus_where_it_is(beside):
    found = beside(examples, 2, lambda found: f"{found['over']['hidden, drawn']['median']:.2f} times hidden")
    ways = ["nothing hidden", "hidden, one at a time", "hidden", "hidden, drawn"]
    there = importlib.util.find_spec("opacus") is not None
    assert list(found["ms"]) == list(found["over"]) == ways + ["Opacus, a loop"] * there
    assert min(found["ms"].values()) > 0


def test_a_client_of_fedmm_is_measured_beside_two_of_fedavgs_and_a_loop(monkeypatch, beside):
    monkeypatch.setitem(cases.CASES, "fedmm", TINY_FEDMM)
    source = replace(TINY_FEDMM, algorithm="fedavg", task="source_only")
    monkeypatch.setitem(cases.CASES, "fedmm_source", source)
    found = beside(adaptation, 1, lambda found: "FedMM over two of FedAvg")
    ways = ["serial", "batched", "factored"]
    assert list(found["ms"]) == [*(f"fedmm {way}" for way in ways), *(f"fedavg {way}" for way in ways), "loop"]
    for way in ways:
        ours, theirs = found["ms"][f"fedmm {way}"], found["ms"][f"fedavg {way}"]
        assert found["over_two_fedavg"][way]["median"] == pytest.approx(ours / (2 * theirs))
        assert found["times_as_fast_as_loop"][way]["median"] == pytest.approx(found["ms"]["loop"] / ours)


def test_scaling_takes_medians_over_turns(monkeypatch):
    took = iter([1.0, 3.0, 2.0, 2.0, 4.0, 20.0])
    monkeypatch.setattr(scaling, "alone", lambda case, args: {"clients": case.clients, "seconds_per_round": next(took)})
    found = scaling.population(Namespace(sizes=[10, 20], repeats=3, together=False))
    assert found == [
        {"clients": 10, "seconds_per_round": 2.0, "ratio": 1.0},
        {"clients": 20, "seconds_per_round": 3.0, "ratio": 3.0},
    ]


def test_populations_take_turns_in_one_process():
    found = scaling.population(Namespace(**RUN | {"sizes": [10, 10**9], "together": True}))
    assert [r["clients"] for r in found] == [10, 10**9]
    assert [r["cohort"] for r in found] == [10, 100]
    assert found[0]["ratio"] == 1.0
    assert found[1]["ratio"] > 0


def test_scaling_measures_generated_clients():
    found = scaling.run(replace(scaling.SMALL, clients=10**9, cohort=5), Namespace(**RUN))
    assert found["clients"] == 10**9
    assert found["seconds_per_round"] > 0


def test_the_rules_are_checked_against_measurement(monkeypatch, told):
    monkeypatch.setitem(cases.CASES, "mlp", replace(TINY, name="mlp"))
    words = "--case mlp --executor local --rounds 1"
    assert "best / rule" in told(rules.main, words, json_too=False)
    (found,) = told(rules.main, words)["cases"]
    assert (found["case"], found["rule"]["block_size"], found["rule"]["relative"]) == ("mlp", 4, 1)
    assert found["best"]["relative"] <= 1


def test_cohorts_are_resolved_with_every_kind_of_device(told):
    found = told(invitations.main, "--clients 300 --cohort 100 --rounds 1")["results"]
    assert len(found) == len(invitations.AVAILABILITY) * len(invitations.DEVICES)
    assert all(r["ms"] > 0 and 0 < r["completed_share"] < 1 for r in found)


def test_clients_on_disk_are_converted_and_read(told, capsys, tmp_path):
    found = told(disk.main, f"--clients 40 --cohort 9 --rounds 2 --folder {tmp_path}")["results"]
    assert [(r["rows"], r["clients"], r["cohort"]) for r in found] == [("together", 40, 9), ("shuffled", 40, 9)]
    assert all(r[k] > 0 for r in found for k in ("clients_per_s", "read_blocks_ms", "read_whole_ms"))
    assert list(tmp_path.iterdir()) == []
    disk.show(found)
    assert "40 clients of 10 x 32 floats" in capsys.readouterr().out


def test_the_server_step_is_measured_with_uploads_in_a_file_and_in_memory(told, capsys, monkeypatch):
    wrote = []
    keep = SpillFile.keep
    monkeypatch.setattr(SpillFile, "keep", lambda self, tree: wrote.append(keep(self, tree)) or wrote[-1])
    options = "--clients 5 --floats 200000 --steps 2 --block-size 3 --rounds 2 --executor local"
    found = told(server_step.main, options)
    assert (found["clients"], found["steps"], list(found["ways"])) == (5, 2, ["in a file", "in memory"])
    spilled = [all(isinstance(leaf, Spilled) for leaf in T.leaves(tree)) for tree in wrote]
    assert spilled[-16:] == [True] * 8 + [False] * 8  # two rounds of two blocks, at which worker and driver look
    for way in found["ways"].values():
        assert way["floats"] == pytest.approx(200_000, rel=0.02)
        assert 0 < way["gram_s"] + way["search_s"] + way["combine_s"] <= 1.01 * way["step_s"] < way["round_s"]
        assert 0 < way["share"] < 1
    server_step.main([*options.split(), "--way", "in a file"])
    assert "in memory" not in (shown := capsys.readouterr().out)
    assert "server step, s" in shown


def test_what_one_waits_for_is_noted_by_a_callback_and_shown(tmp_path, monkeypatch, told):
    monkeypatch.setenv(start.MARKS, str(tmp_path / "marks.json"))
    monkeypatch.setenv(start.KIND, "local")
    before = time.time()
    overrides = {"rounds": 2, "executor.kind": "local", "callbacks": ["benchmarks.start:Marks"]}
    fedfleet.run("configs/cdma/digits.yaml", overrides, out=tmp_path / "run")
    marks = json.loads((tmp_path / "marks.json").read_text())
    assert before < marks["start"] < marks["round"] < time.time()
    turns = iter([9.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(start, "helped", lambda: {"whole_s": next(turns), "cpu_s": 0.5})
    monkeypatch.setattr(start, "ran", lambda kind: {"whole_s": 4.0, "first_round_s": len(kind)})
    rows = told(start.main, "--repeats 3")
    assert [row["what"] for row in rows] == ["--help", "run, local", "run, ray"]
    assert rows[0] == {"what": "--help", "whole_s": 2.0, "cpu_s": 0.5}  # the first turn warms up
    turns = iter([9.0, 1.0])
    assert "three rounds" in told(start.main, "--repeats 1", json_too=False)


def test_the_best_round_gives_each_block_to_who_ends_it_first():
    assert unlike.best((1.0, 1.0), 4, 0.5) == 1.0
    assert unlike.best((1.0, 0.5), 3, 1.0) == 2.0  # two on the fast one, one on the slow one
    assert unlike.best((1.0, 0.1), 3, 1.0) == 3.0  # none on one that is so slow


def test_workers_of_unlike_speed_last_as_long_as_they_take(monkeypatch, told):
    monkeypatch.setattr(unlike, "made", lambda kind, actors: LocalExecutor())
    monkeypatch.setattr(unlike, "FLEETS", {"one": (0.5,)})
    (row,) = told(unlike.main, "--blocks 3 --block-s 0.02 --rounds 2 --warmup 1")
    assert (row["workers"], row["blocks"]) == ("one", 3)
    assert row["over_best"] >= 1
    assert 0 <= row["idle"] < 0.5
    words = "--blocks 2 3 --block-s 0.01 --rounds 1 --warmup 1"
    assert "3 blocks" in told(unlike.main, words, json_too=False)


def test_local_steps_for_a_share_of_a_round():
    found = {"round_s": 10.0, "step_s": 2.0}
    # 8 s for 20 steps; 95 steps take the 38 s that 2 s are a twentieth of, with them
    assert server_step.steps_for(found, 20, 0.05) == pytest.approx(95)
    assert server_step.steps_for(found, 20, 0.2) == pytest.approx(20)


MISTAKES = [
    (server_step.main, ["--way", "nowhere"]),
    (invitations.main, ["--cohort", "10", "--clients", "9"]),
    (engine.main, ["--case", "nonesuch"]),
    (engine.main, ["--case", "cdma", "--cohort", "501"]),
    (loops.main, ["--processes", "none"]),
    (scaling.main, ["depth"]),
    (scaling.main, ["cohort", "--case", "mlp"]),
    (scaling.main, ["cohort", "--together"]),
    (memory.main, ["--rounds", "3"]),
    (rules.main, ["--seconds", "0"]),
    (gpu.main, ["--budget", "-1"]),
    (gpu.main, ["--part", "all"]),
    (gpu.main, ["--json", "no/such/folder/file.json"]),
    (peers.main, ["--repeats", "0"]),
]


def test_a_mistake_on_a_command_line_is_told_in_one_line(capsys, subtests):
    for main, argv in MISTAKES:
        with subtests.test(f"{main.__module__} {' '.join(argv)}"):
            with pytest.raises(SystemExit) as e:
                main(argv)
            shown = capsys.readouterr()
            assert (e.value.code, shown.out, shown.err.count("\n")) == (2, "", 1)


def test_further_clients_share_data():
    population = world.enlarged(world.population(TINY), 7)
    assert population.size == 7
    rows = population.local_data(torch.arange(7)).rows
    assert torch.equal(rows[4:], rows[:3])
    assert rows[:4].flatten().tolist() == list(range(40))


def test_fits():
    assert results.slope([1, 2, 3], [5.0, 7.0, 9.0]) == pytest.approx(2)
    assert results.slope([4], [1.0]) == 0
    assert results.exponent([1, 10, 100], [3.0, 3e2, 3e4]) == pytest.approx(2)


def test_memory_trends_tell_a_start_from_growth_for_good():
    samples = [(done, {"driver": 100 * min(done, 30) + 3 * done, "actor 7": 50}) for done in range(10, 91, 10)]
    found = memory.trends(samples, 90)
    assert [(t["process"], t["from_round"], t["to_round"]) for t in found] == [
        (who, *rounds) for who in ("driver", "actor 7") for rounds in ((10, 30), (40, 60), (70, 90))
    ]
    assert [t["bytes_per_round"] for t in found] == pytest.approx([103, 3, 3, 0, 0, 0])
    assert (found[2]["first_bytes"], found[2]["last_bytes"]) == (3210, 3270)


def test_a_failing_peer_leaves_the_others_alone(monkeypatch, capsys):
    def fail(case, args):
        raise environments.Failure("ImportError: no module")

    rate = iter([30.0, 50.0])
    alive = peers.Contestant("ours", ("fedavg",), lambda case, args: {"client_updates_per_s": next(rate)})
    other = peers.Contestant("other", ("fedavg",), lambda case, args: {"client_updates_per_s": 10.0})
    minimax = peers.Contestant("minimax only", ("cdma_ada",), fail)
    broken = peers.Contestant("broken", ("fedavg",), fail)
    contestants = {"fedfleet": alive, "broken": broken, "other": other, "m": minimax}
    monkeypatch.setattr(peers, "CONTESTANTS", contestants)
    runs = peers.compare(TINY, list(contestants), Namespace(repeats=2))
    assert peers.ratios(peers.rates(runs["fedfleet"]), peers.rates(runs["other"])) == [3.0, 5.0]
    assert peers.ratios(peers.rates(runs["fedfleet"]), peers.rates(runs["broken"])) == [None, None]
    peers.report({"tiny": runs}, list(contestants), 1e6, {"tiny": TINY})
    shown = capsys.readouterr().out
    assert "4 (3 to 5)" in shown
    assert limit.of_update(TINY) == 2 * 2 * 6 * 10 * 10 * 3  # a product forward, one for the weight, of 3 times 10 rows
    assert "0.288 (0.216 to 0.36)" in shown
    assert "failed: tiny, broken: ImportError: no module" in shown


def test_the_reason_is_the_line_that_names_an_error():
    error = "Traceback\n[rank0]: ValueError: a is not b\n=====\n  exitcode: 1\n"
    assert environments.reason(error) == "[rank0]: ValueError: a is not b"
    assert environments.reason("something\nelse\n") == "else"
    assert environments.reason("") == ""


def test_a_program_that_fails_or_takes_too_long_is_a_failure():
    with pytest.raises(environments.Failure, match="KeyError"):
        environments.execute(["python3", "-c", "{}['x']"], 60)
    with pytest.raises(environments.Failure, match="not done after"):
        environments.execute(["sleep", "60"], 0.2)
    with pytest.raises(environments.Failure, match="No such file"):
        environments.execute(["/no/such/program"], 60)


def test_domain_gap_learns_its_own_domain_and_not_its_contrary():
    """Two domains of left and right, in which labels are swapped; what the last row learns from is the other one."""
    x = torch.zeros(400, 1, 8, 8, dtype=torch.uint8)
    side = torch.arange(400) % 2
    x[side == 0, :, :, :4] = x[side == 1, :, :, 4:] = 255
    domain = torch.arange(400) // 200
    part = Examples(x, (side + domain) % 2, 2, domain)
    found = domain_gap.measure(Dataset("made", part, part, ("a", "b")), steps=30, seeds=2)
    assert found == {"a": [1, 0], "b": [0, 1], "all others": [0, 0]}


def test_domain_gap_prints_a_table(monkeypatch, told):
    rows = {"a": [0.91, 0.2], "b": [0.3, 0.804], "all others": [0.3, 0.2]}
    part = Examples(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), 2, torch.arange(2))
    monkeypatch.setattr(domain_gap, "measure", lambda data, steps, seeds: rows)
    monkeypatch.setattr(domain_gap.registry, "load", lambda name, folder: Dataset(name, part, part, ("a", "b")))
    printed = told(domain_gap.main, "", json_too=False)
    assert "91.0" in printed
    assert "80.4" in printed
    assert told(domain_gap.main, "")["accuracy"] == rows


def test_files_and_validations_on_the_way_to_a_run_are_counted(capsys):
    load, made = (assembly.entered(work)[1] for work in (lambda: fedfleet.load({"rounds": 2}), lambda: None))
    assert any(file.endswith("/config/schema.py") for file in load.files)
    assert made.calls == {}
    assert load.beside(made) == load
    assembly.main(["configs/cdma/digits.yaml", "--inner", "batched"])
    row = next(line for line in capsys.readouterr().out.splitlines() if "both" in line)
    assert (
        row.strip(" │").rpartition("│")[2].strip() == "5"
    )  # data, partition, task, algorithm, availability: each once
