"""Tables as LaTeX: what is escaped, what is bold, and what stands in a file for a spreadsheet."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fedfleet.report import latex


def runs(**labels: list[float]) -> pd.DataFrame:
    rows = [
        {"label": k, "rate": 0.5, "seed": i, "accuracy": v, "loss": -v}
        for k, vs in labels.items()
        for i, v in enumerate(vs)
    ]
    return pd.DataFrame(rows)


def test_letters_that_mean_something_to_latex_are_text() -> None:
    text = r"50 % of $5 & a_b #1 {x} ~ ^ \ ± ≥"
    wanted = r"50 \% of \$5 \& a\_b \#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} $\pm$ $\geq$"
    assert latex.escape(text) == wanted
    assert latex.escape(wanted) != wanted


def test_a_table_has_the_rules_of_booktabs() -> None:
    made = latex.table(["label", "a_b"], [["x & y", "0.1 ± 0.2"], ["z", "–"]], caption="50 %", bold=frozenset({(1, 0)}))
    assert [line for line in made.splitlines() if line.endswith(r"\\") or line.endswith("rule")] == [
        r"\toprule", r"label & a\_b \\", r"\midrule", r"x \& y & 0.1 $\pm$ 0.2 \\", r"\textbf{z} & -- \\", r"\bottomrule",
    ]  # fmt: skip
    assert r"\begin{tabular}{lr}" in made
    assert r"\caption{50 \%}" in made


def test_a_number_below_0_has_a_minus_and_a_hyphen_stays() -> None:
    made = latex.table(["label", "x"], [["cross-device", "-0.5 ± 0.1, g -1.1"], ["1e-06", "(-2)"]])
    assert r"cross-device & $-$0.5 $\pm$ 0.1, g $-$1.1 \\" in made
    assert r"1e-06 & ($-$2) \\" in made


def test_bold_is_the_best_and_what_cannot_be_told_from_it() -> None:
    found = latex.finals(
        runs(A=[0.1, 0.2, 0.3], B=[0.9, 1.0, 1.11], C=[0.9, 1.01, 1.1]), ["rate", "label"], ["accuracy", "loss"]
    )
    rows = {line.split(" & ")[1]: line.count("textbf") for line in found.splitlines() if line.startswith("0.5")}
    assert rows == {
        "A": 0,
        "B": 2,
        "C": 2,
    }  # of accuracy, and of loss, of which the least is the best
    assert "cannot be told from it" in found


def test_what_is_worse_than_one_told_apart_is_not_bold_whatever_its_spread() -> None:
    found = latex.finals(
        runs(A=[0.1, 0.9, 0.3], B=[0.8, 0.82, 0.79], C=[1.0, 1.01, 0.99]), ["rate", "label"], ["accuracy"]
    )
    rows = {line.split(" & ")[1]: line.count("textbf") for line in found.splitlines() if line.startswith("0.5")}
    assert rows == {"A": 0, "B": 0, "C": 1}


@pytest.mark.parametrize(
    "labels", [{"A": [0.1, 0.3, 0.2], "B": [0.2, 0.1, 0.3]}, {"A": [0.1], "B": [0.9]}, {"A": [0.1, 0.2]}]
)
def test_nothing_is_bold_where_nothing_can_be_told_apart(labels: dict[str, list[float]]) -> None:
    found = latex.finals(runs(**labels), ["rate", "label"], ["accuracy"])
    assert "textbf" not in found
    assert "Bold" not in found


def test_means_are_numbers() -> None:
    table = runs(A=[0.1, 0.3], B=[0.5, np.nan])
    found = latex.means(table, ["rate", "label"], ["accuracy"])
    assert found["seeds"].tolist() == [2, 1]
    assert found["accuracy mean"].tolist() == pytest.approx([0.2, 0.5])
    assert found["accuracy sd"].tolist() == pytest.approx([np.std([0.1, 0.3], ddof=1), np.nan], nan_ok=True)
