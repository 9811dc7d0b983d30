"""The notebooks run from their first cell to their last, smaller than they are shown, and are kept as they were run."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("docs/tutorials/*.ipynb"))
FEW = {
    "first_run": (
        "ROUNDS, MORE = 2, 1",
        "assert len(outcomes) == 20 and len(whole.rounds) == len(longer.rounds) == 3 and page.exists()",
    ),
    "your_net_and_data": (
        "ROUNDS, CAMERAS, IMAGES = 4, 8, 12",
        "assert data.population.size == 6 and type(net[1]) is Block and all(len(r.rounds) == 4 for r in runs.values())",
    ),
    "your_algorithm": (
        "ROUNDS, CHECKED = 5, 2",
        "assert 0 < away < 1e-4 and runs['FedDyn'].summary['own'] and checked.rounds['completed'].eq(clients).all()",
    ),
    "dropout_study": (
        "ROUNDS, RATES, SEEDS = 2, [0.5, 1.0], [0]",
        "assert table['completed'].max() == 1 and table.groupby('availability').size().eq(2).all()",
    ),
}
"""What is put in the place of a notebook's cell of parameters, and what has to hold at its end."""
PICTURE = 60_000  # bytes, at most


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """One for all of them: to start it, and to import torch in it, takes longer than they do."""
    folder = tmp_path_factory.mktemp("kernel")
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder), env={**os.environ, "IPYTHONDIR": str(folder / ".ipython")})
    yield manager
    manager.shutdown_kernel(now=True)


def test_there_are_those_that_the_site_shows():
    pages = re.findall(r"tutorials/(\w+)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    written = [path.stem for path in ROOT.glob("docs/tutorials/*.md")]
    assert sorted(pages) == sorted([*written, *FEW])
    assert [path.stem for path in NOTEBOOKS] == sorted(FEW)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs_and_finds_what_it_says(kernel: KernelManager, path: Path):
    notebook = nbformat.read(path, as_version=4)
    few, holds = FEW[path.stem]
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert few.partition(" = ")[0] == parameters.source.partition(" = ")[0]
    parameters.source = few
    first, last = (nbformat.v4.new_code_cell(text) for text in ("%reset -f", holds))
    notebook.cells = [first, *notebook.cells, last]
    client = NotebookClient(notebook, km=kernel, timeout=300)
    client.execute()  # which raises what a cell raises
    client.kc.stop_channels()
    kept = nbformat.read(path, as_version=4)
    shown = [cell.outputs for cell in kept.cells if cell.cell_type == "code"]
    found = [cell.outputs for cell in notebook.cells[1:-1] if cell.cell_type == "code"]
    assert [_kinds(outputs) for outputs in found] == [_kinds(outputs) for outputs in shown]


def _kinds(outputs: list[Any]) -> list[list[str]]:
    return [sorted(output.get("data", {"text/plain": ""})) for output in outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_kept_as_it_was_run_in_one_go(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    pictures = [base64.b64decode(o.data["image/png"]) for o in outputs if "image/png" in o.get("data", {})]
    assert all(len(picture) < PICTURE for picture in pictures)
    assert pictures or path.stem == "first_run"
