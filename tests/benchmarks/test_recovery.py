"""The benchmark of methods for dropout plans, reads and shows what it says."""

import numpy as np
import pandas as pd
import pytest

import fedfleet
from benchmarks import recovery
from benchmarks.recovery import PROTOCOLS, TASKS, Run
from fedfleet.config import shipped
from fedfleet.experiments.sweep import planned
from fedfleet.report.canvas import PALETTE
from fedfleet.report.study_tables import Target


@pytest.mark.parametrize("name", TASKS)
def test_every_method_meets_every_availability(name):
    config = fedfleet.load(shipped.FOLDER / "dropout" / f"{name}.yaml")
    online = (config.vary or {})["availability"]
    runs = [Run(method, i, 0.5) for method in config.compare or {} for i in range(len(online))]
    found = planned(recovery.planned(config, runs, [7], "algorithm.lr"))
    assert [t.config.algorithm.lr for t in found] == [0.5] * len(runs)
    assert [t.config.seed for t in found] == [7] * len(runs)
    assert [t.config.availability.kind for t in found] == [online[run.online]["kind"] for run in runs]
    titles = {recovery.title(each) for each in online}
    assert len(titles) == len(online)
    assert titles - {"always", "blocks"} <= set(TASKS[name].names)
    assert len(config.compare or {}) <= min(len(recovery.MARKERS), len(PALETTE) + len(recovery.BESIDES))


def test_a_run_is_measured_beside_the_solution(tmp_path):
    config = fedfleet.load(shipped.FOLDER / "dropout" / "game.yaml")
    given = {"compare": None, "vary": None, "seeds": None, "availability": (config.vary or {})["availability"][2]}
    run = fedfleet.run(config, {**given, "rounds": 400, "evaluation.every": 20}, out=tmp_path / "run")
    task = recovery.problem(config)
    found = recovery.measured(run.folder, task, ["distance"], Target("eval/distance", True, 1.2))
    told = run.rounds["eval/distance"].dropna()
    assert found["distance"] == pytest.approx(told.iloc[-3:].mean())
    assert found["final_distance"] == pytest.approx(told.iloc[-1])
    assert found["never_completed"] == 0.0
    assert 0 < found["heard_least"] < found["heard_mean"] < 400
    first = np.flatnonzero(told >= 1.2)[0]
    assert found["target_rounds"] == told.index[first] + 1
    assert 0 < found["target_bytes"] < found["bytes"]
    assert found["target_s"] > 0
    assert 0.0 < found["gini"] < 0.5
    assert 0.5 < found["bias"] < 1.5  # CDMA-ONE ends near the saddle of those who are heard


def test_tables_say_who_gets_it_back(capsys, tmp_path):
    levels = {"FedAvg": 0.6, "FedVARP": 0.9, "MIFA": 0.75}
    rows = [
        {
            "method": method,
            "availability": where,
            "protocol": protocol,
            "seed": seed,
            "bias": 0.5,
            "final_distance": 0.1,
        }
        | {"gini": 0.25, "target_rounds": np.nan if method == "FedAvg" and seed else 40.0 + seed}
        | {
            "accuracy": (0.9 if where == "always" else level * (1 + 1e-4 * seed)) + 0.001 * seed,
            "worst_class_score": 0.5,
        }
        for method, level in levels.items()
        for where in ("always", "sine", "blocks")
        for protocol in PROTOCOLS
        for seed in range(3)
    ]
    recovery.show(pd.DataFrame(rows), TASKS["digits"])
    shown = capsys.readouterr().out
    assert "R 1.00*" in shown
    assert "R 0.50*" in shown
    assert "FedVARP 1.0, MIFA 2.0, FedAvg 3.0" in shown
    assert "0.250 (0.000)" in shown
    assert "40 (1 of 3)" in shown
    recovery.show_beside(pd.DataFrame(rows), TASKS["digits"], "MIFA")
    (ahead,) = [line for line in capsys.readouterr().out.splitlines() if "FedVARP" in line and "+0.150" in line][:1]
    assert ahead.count("+0.000 ± 0.000") == 1
    recovery.draw(pd.DataFrame(rows), TASKS["digits"], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert np.isnan(recovery.recovery(*[np.ones(3)] * 3)).all()
