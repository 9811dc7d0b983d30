"""Tables as LaTeX with booktabs, and the means over seeds that they hold, also for CSV."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedfleet.report.significance import LEVEL, in_order
from fedfleet.report.words import joined, mean_sd, plain_value, share
from fedfleet.simulator.driver.evaluation import less_is_better

Frame = Any
"""A pd.DataFrame; what its methods return is beyond the type checker."""
ESCAPED = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"$<$", ">": r"$>$"},
    **{"±": r"$\pm$", "≥": r"$\geq$", "≤": r"$\leq$", "−": "$-$", "–": "--", "×": r"$\times$", "…": r"\dots{}"},
    **{"ε": r"$\varepsilon$", "δ": r"$\delta$", "α": r"$\alpha$", "λ": r"$\lambda$", "σ": r"$\sigma$"},
}
MINUS = re.compile(r"(?<![^\s(])-(?=\d)")
"""A hyphen before a number below 0."""
LETTER = re.compile("|".join(map(re.escape, ESCAPED)))
BOLD = (
    f"Bold: the best label of each point and those that follow it and cannot be told from it (tests paired by seed at "
    f"{share(LEVEL)}, Holm's correction for all pairs of its labels), where some can."
)


def escape(text: str) -> str:
    """Return text that LaTeX prints as it is."""
    return LETTER.sub(lambda found: ESCAPED[found[0]], text)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    label: str = "tab:results",
    texts: int = 1,
    bold: frozenset[tuple[int, int]] = frozenset(),
) -> str:
    """Return a floating table.

    Args:
        head: of the columns.
        rows: cells as plain text.
        caption: plain text.
        label: for ``\\ref``.
        texts: so many columns from the left hold words, and are flush left.
        bold: (row, column) of the cells in bold.

    """
    cell = lambda at, text: rf"\textbf{{{escape(text)}}}" if at in bold else escape(text)  # noqa: E731
    body = [
        " & ".join(cell((i, j), MINUS.sub("−", text)) for j, text in enumerate(row)) + r" \\"
        for i, row in enumerate(rows)
    ]
    lines = [
        "% needs \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        *([rf"\caption{{{escape(caption)}}}"] if caption else []),
        rf"\label{{{label}}}",
        rf"\begin{{tabular}}{{{'l' * texts}{'r' * (len(head) - texts)}}}",
        r"\toprule",
        " & ".join(map(escape, head)) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def figure(file: str, caption: str) -> str:
    """Return a floating figure of a file, whose stem is its label."""
    lines = [
        "% needs \\usepackage{graphicx}",
        r"\begin{figure}",
        r"\centering",
        rf"\includegraphics{{{file}}}",
        rf"\caption{{{escape(caption)}}}",
        rf"\label{{fig:{file.rpartition('.')[0]}}}",
        r"\end{figure}",
    ]
    return "\n".join(lines) + "\n"


def means(runs: Frame, keys: Sequence[str], metrics: Sequence[str]) -> Frame:
    """Return a row a combination of keys, in their order: ``seeds``, and of each metric its mean and sample standard deviation.

    ``runs`` has a row a run, with the keys, ``seed`` and the metrics as columns.
    """
    rows = []
    for _, of in _blocks(runs, keys):
        row: dict[str, Any] = {key: of[key].iloc[0] for key in keys}
        row["seeds"] = int(of[list(metrics)].notna().any(axis=1).sum())
        for metric in metrics:
            known = of[metric].dropna().to_numpy(dtype=float)
            row[f"{metric} mean"] = float(known.mean()) if len(known) else np.nan
            row[f"{metric} sd"] = float(known.std(ddof=1)) if len(known) > 1 else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def finals(
    runs: Frame, keys: Sequence[str], metrics: Sequence[str], *, caption: str | None = None, label: str = "tab:results"
) -> str:
    """Return final metrics as a table, mean and sample standard deviation over seeds; ``runs`` and ``keys`` as of ``means``.

    Bold is the best label at each point of the other keys, with those that cannot be told from it, where some can.
    """
    blocks = _blocks(runs, keys)
    rows = [
        [*(plain_value(of[key].iloc[0]) for key in keys), *(mean_sd(_known(of[metric])) for metric in metrics)]
        for _, of in blocks
    ]
    bold = frozenset(
        (row, len(keys) + column)
        for column, metric in enumerate(metrics)
        for row in _best([of for _, of in blocks], keys, metric)
    )
    several = runs["seed"].nunique() > 1 if "seed" in runs else False
    words = [metric.replace("_", " ") for metric in metrics]
    made = f"Final {joined(words)}" + (": mean ± sample standard deviation over seeds." if several else ".")
    made = made if caption is None else caption
    if bold:
        made = f"{made} {BOLD}"
    return table(
        [*keys, *words],
        rows,
        caption=made,
        label=label,
        texts=max(1, len(keys)),
        bold=bold,
    )


def _blocks(runs: Frame, keys: Sequence[str]) -> list[tuple[Any, Frame]]:
    """Return the rows of each combination of keys, in the order in which these come first, all labels of a point together."""
    if not keys:
        return [((), runs)]
    told = [tuple(row) for row in runs[list(keys)].map(str).to_numpy()]
    others = [at for at, key in enumerate(keys) if key != "label"]
    point = lambda name: tuple(name[at] for at in others)  # noqa: E731
    points = list(dict.fromkeys(map(point, told)))
    names = sorted(dict.fromkeys(told), key=lambda name: points.index(point(name)))
    return [(name, runs[[one == name for one in told]]) for name in names]


def _known(column: Frame) -> list[float]:
    return [float(value) for value in column.dropna()]


def _best(blocks: Sequence[Frame], keys: Sequence[str], metric: str) -> list[int]:
    """Return the rows that are the best of their point, and those that follow it up to the first that can be told from it.

    Of points where none can there are none. A row that is worse than one told apart is none either, whatever its spread.
    """
    if "label" not in keys or not blocks or "seed" not in blocks[0]:
        return []
    others = [key for key in keys if key != "label"]
    by_point: dict[tuple[str, ...], list[int]] = {}
    for row, of in enumerate(blocks):
        by_point.setdefault(tuple(str(of[key].iloc[0]) for key in others), []).append(row)
    result = []
    for rows in by_point.values():
        if len(rows) < 2:
            continue
        by_seed = pd.concat([blocks[row].set_index("seed")[metric].astype(float) for row in rows], axis=1)
        order = in_order(by_seed.to_numpy(), least_is_best=less_is_better(metric))
        worse = {pair.worse for pair in order.apart if pair.better == order.order[0]}
        if worse:
            result += [
                rows[place] for place in itertools.takewhile(lambda at, worse=worse: at not in worse, order.order)
            ]
    return result
