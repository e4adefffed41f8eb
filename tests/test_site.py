"""The docs as a site (`make docs`): every page is listed, links lead to pages of it, nothing comes from elsewhere."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from test_docs import BLOCK, headings_of

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import site_pages  # noqa: E402

SETTINGS = (ROOT / "mkdocs.yml").read_text()
#: Place on the site -> file in the repository.
PAGES = {path.name: path for path in (ROOT / "docs").glob("*.md")} | {
    outside: ROOT / inside for inside, outside in site_pages.OUTSIDE.items()
}


def test_the_menu_lists_every_page_once() -> None:
    listed = re.findall(r": (\S+\.md)$", SETTINGS, re.M)
    assert sorted(listed) == sorted(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_of_the_site(page: str) -> None:
    text = site_pages.site_links(PAGES[page].read_text(), page)
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
        path, _, heading = target.partition("#")
        place = (Path("/") / page).parent / path if path else Path("/") / page
        wanted = str(place.resolve().relative_to("/"))
        linked = PAGES.get(wanted, ROOT / "docs" / wanted)
        assert linked.is_file(), f"{page}: {target}"
        assert not heading or heading in headings_of(linked), f"{page}: {target}"


def test_links_are_rewritten() -> None:
    text = "[a](docs/codes.md#x) ![b](docs/images/b.png) [c](examples) [d](https://e.org/f) `[g](docs/h.md)`"
    found = site_pages.site_links(text, "index.md")
    assert found == "[a](codes.md#x) ![b](images/b.png) c [d](https://e.org/f) `[g](docs/h.md)`"
    assert site_pages.site_links("[a](../README.md)", "codes.md") == "[a](index.md)"
    assert site_pages.site_links("[a](../docs/codes.md)", "benchmarks/audit.md") == "[a](../codes.md)"


def test_the_reference_has_every_public_name_and_no_other() -> None:
    found = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert len(found) == len(set(found))
    names = set()
    for path in found:
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name).__doc__, f"{path} has no docstring"
        names.add(name)
    public = json.loads((ROOT / "tests" / "api.json").read_text())
    assert set(public) - names == {"__version__"}


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Fonts and scripts of the theme come with it, if it is told so."""
    assert "font: false" in SETTINGS
    assert "http" not in SETTINGS + (ROOT / "docs" / "site.css").read_text()
