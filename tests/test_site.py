"""The documentation as a site: built without a warning, with every option and every public name, and nothing of other hosts."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedfleet
from fedfleet import author, data
from fedfleet.commands import show_named

pytestmark = [pytest.mark.slow, pytest.mark.extras("mkdocs", "mkdocstrings")]
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import mkdocs.__main__ as mkdocs

    out = tmp_path_factory.mktemp("site")
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    words = ["build", "--strict", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(out)]
    mkdocs.cli.main(
        words, standalone_mode=False
    )  # raises at a warning, such as of a lost link; with --quiet it sees none
    return out


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_every_public_name_is_in_the_reference(site: Path):
    for page, module in (("fedfleet", fedfleet), ("data", data), ("author", author)):
        text = (site / "reference" / "api" / f"{page}.html").read_text(encoding="utf-8")
        missing = [name for name in module.__all__ if f'id="{module.__name__}.{name}"' not in text]
        assert not missing, page


def test_every_name_and_option_is_in_the_reference(site: Path):
    for kind, of in ((kind, of) for kind, of in show_named.kinds().items() if of.registry):
        text = (site / "reference" / "options" / f"{kind}.html").read_text(encoding="utf-8")
        parts = dict(re.findall(r'<h2 id="(\w+)">(.*?)(?=<h2|</article)', text, re.S))
        assert set(parts) == set(of.registry)
        for name, entry in of.registry.items():
            for option in show_named.fields(entry.options):
                assert f"<td><code>{option[0]}</code></td>" in parts[name], (kind, name)


def test_pages_fetch_nothing_from_other_hosts(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"([^\"]+)|<link\b[^>]*\bhref=\"([^\"]+)", text)
        assert not [a or b for a, b in fetched if re.match(r"(https?:)?//", a or b)], page


@pytest.mark.parametrize(
    ("page", "link", "leads"),
    [
        ("index.md", "docs/guides/your_net.md#metrics", "guides/your_net.md#metrics"),
        ("algorithms/afl.md", "../guides/your_net.md", "../guides/your_net.md"),
        ("algorithms/afl.md", "../../configs/afl/adult.yaml", "../files/configs/afl/adult.yaml"),
        ("algorithms/afl.md", "../../README.md", "../index.md"),
        ("explanation/performance.md", "../../benchmarks/README.md", "benchmarks.md"),
        ("explanation/benchmarks.md", "../docs/explanation/performance.md", "performance.md"),
        ("explanation/benchmarks.md", "limit.py", "../files/benchmarks/limit.py"),
        ("guides/own_parts.md", "../tutorials/your_algorithm.ipynb", "../tutorials/your_algorithm.md"),
        ("explanation/determinism.md", "https://example.org/x.md", "https://example.org/x.md"),
        ("explanation/determinism.md", "#roles", "#roles"),
    ],
)
def test_links_of_the_repository_are_those_of_the_site(hooks: ModuleType, page: str, link: str, leads: str):
    text = "[it]({0}) and [again]({0}), but `[not]({0})` and\n```\n[not]({0})\n```\n"
    assert hooks.relinked(text.format(link), page) == (
        f"[it]({leads}) and [again]({leads}), but `[not]({link})` and\n```\n[not]({link})\n```\n"
    )


def test_every_public_name_says_what_it_takes_and_raises(hooks: ModuleType):
    """Functions and methods of five arguments and more list them, or say where they are listed; what is raised is told."""
    silent = []
    for name, f, told in _functions(hooks.API):
        takes = [p for p in inspect.signature(f).parameters.values() if p.name not in ("self", "cls")]
        code = ast.parse(textwrap.dedent(inspect.getsource(f)))
        raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(code))
        lists = len(takes) < 5 or re.search(r"\bArgs:|as of|as the round does", told)
        if not told or not lists or (raises and "aise" not in told):
            silent.append(name)
    assert not silent


def _functions(pages: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Any, str]]:
    """Yield every public function and method that is fedfleet's own, and what its docstring says."""
    for given in itertools.chain.from_iterable(pages.values()):
        home, _, name = given.rpartition(".")
        module = importlib.import_module(home)
        for each in module.__all__ if name == "*" else [name]:
            x = getattr(module, each)
            if not str(getattr(x, "__module__", "")).startswith("fedfleet"):
                continue
            members = {k: getattr(v, "__func__", v) for k, v in vars(x).items()} if isinstance(x, type) else {each: x}
            for at, f in members.items():
                if inspect.isfunction(f) and not at.startswith("_"):
                    yield f"{home}.{each}.{at}", f, inspect.getdoc(f) or ""
