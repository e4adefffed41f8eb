"""Every Python and shell block of README and docs runs, page by page, in a folder of its own.

Blocks of a page share names and files, in their order. Their CIFAR-10 is 60 random pictures in the official format,
so that they run anywhere and training takes seconds; audits take a few steps. A comment in the Markdown, directly above
a block, may say:

    <!-- test: shrink fit.epochs=1 audit.limit=4 -->   calls of fit and commands `ecnn audit` get these options
    <!-- test: save as defence.py -->                  the block is a file that later blocks need
    <!-- test: skip, needs two GPUs -->                and why
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_data import write_cifar, write_pictures
from typer.testing import CliRunner

from ecnn.auditing.bench import FAMILIES, SUBJECTS
from ecnn.auditing.diagnostics import CHECKS
from ecnn.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "sh", "text", "toml"}
BLOCK = re.compile(r"(?:<!-- test: (?P<note>.*?) -->\n)?^```(?P<language>.*)\n(?P<text>(?s:.*?))^```$", re.M)
Options = dict[str, dict[str, str]]
RUNNABLE = [page for page in PAGES if re.search(r"^```(python|sh)$", page.read_text(), re.M)]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and what the comment above it asks for."""

    language: str
    text: str
    note: str
    line: int

    @property
    def shrunk(self) -> Options:
        """What calls and commands of each name get: {"fit": {"epochs": "1"}}."""
        options: Options = defaultdict(dict)
        for entry in (
            shlex.split(self.note.removeprefix("shrink ")) if self.note.startswith("shrink ") else ()
        ):
            name, _, setting = entry.partition(".")
            key, _, value = setting.partition("=")
            options[name][key] = value
        return options


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found["language"], found["text"], found["note"] or "", text[: found.start("text")].count("\n"))
        for found in BLOCK.finditer(text)
    ]


class Shrink(ast.NodeTransformer):
    """Sets keyword arguments of all calls of the named functions."""

    def __init__(self, options: Options) -> None:
        self.options, self.used = options, set[str]()

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = ast.unparse(node.func).rpartition(".")[2]
        for key, value in self.options.get(name, {}).items():
            self.used.add(name)
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != key]
            node.keywords.append(ast.keyword(key, ast.parse(value, mode="eval").body))
        return node


def run_python(block: Block, names: dict[str, Any], where: str) -> None:
    shrink = Shrink(block.shrunk)
    tree = ast.fix_missing_locations(shrink.visit(ast.parse(block.text)))
    assert shrink.used == set(block.shrunk), (
        f"{where}: nothing to shrink in {set(block.shrunk) - shrink.used}"
    )
    ast.increment_lineno(tree, block.line)
    exec(compile(tree, where, "exec"), names)  # noqa: S102 our own pages


def run_shell(block: Block, where: str) -> None:
    """Runs commands `ecnn` in this process, to save their start; of `make` only the target is looked up."""
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), f"{where}: no target of {line}"
            continue
        assert words[0] == "ecnn", f"{where}: what is {line}?"
        for key, value in block.shrunk.get(words[1], {}).items():
            words += [f"--{key.replace('_', '-')}", *([value] if value else [])]
        done = CliRunner().invoke(app, words[1:])
        # An audit's status is its verdict, which random pictures do not decide.
        allowed = (0, 1, 3) if words[1] == "audit" else (0,)
        crashed = done.exception is not None and not isinstance(done.exception, SystemExit)
        ended = not crashed and done.exit_code in allowed
        assert ended, f"{where}: {line}\n{done.output}\n{done.exception!r}"


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        text = page.read_text()
        assert text.count("```") == 2 * len(blocks_of(page)), (
            f"a block of {page.name} is not seen by this file"
        )
        assert text.count("<!-- test:") == sum(bool(block.note) for block in blocks_of(page)), page.name
        for block in blocks_of(page):
            assert block.language in LANGUAGES, f"{page.name}:{block.line}: {block.language or 'no language'}"
            assert not block.note or block.note.startswith(("shrink ", "save as ", "skip, ")), block.note


def test_commands_in_the_text_have_options_that_exist() -> None:
    """Code in a sentence or table that begins with `ecnn COMMAND`, or with an option of some command."""
    flags = json.loads((ROOT / "tests" / "cli_flags.json").read_text())
    of_any = {flag for options in flags.values() for flag in options}
    for page in PAGES:
        for words in map(str.split, re.findall(r"`((?:ecnn |--)[^`]+)`", BLOCK.sub("", page.read_text()))):
            known = flags[words[1]] if words[0] == "ecnn" else of_any
            wrong = [word for word in words if word.startswith("--") and word not in known]
            assert not wrong, f"{page.name}: {' '.join(words)}"


def test_every_finding_is_explained() -> None:
    page = (ROOT / "docs" / "findings.md").read_text()
    assert [name for name in CHECKS if f"`{name}`" not in page] == []


def test_every_family_of_the_benchmark_has_a_false_claim_told_in_three_sentences() -> None:
    told = (
        (ROOT / "docs" / "auditing.md")
        .read_text()
        .split("## One false claim per family\n")[1]
        .split("\n## ")[0]
    )
    entries = re.findall(r"^- \*\*(.+?)\*\* \(`(\w+)`\): ((?:.|\n(?!- ))+)", told, re.M)
    families = {name: models for name, models in FAMILIES.items() if not SUBJECTS[models[0]].honest}
    assert {family for family, _, _ in entries} == set(families)
    for family, model, text in entries:
        assert model in families[family]
        assert len(re.split(r"(?<=\.)\s+(?=[A-Z])", text.strip())) == 3, family


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
            path, _, heading = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not heading or heading in headings_of(linked), f"{page.name}: {target}"


def headings_of(page: Path) -> set[str]:
    """What links call the headings of a page: small letters, no punctuation, hyphens for spaces."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.usefixtures("unofficial", "one_thread", "short_audits")
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "data", fine=False)
    write_pictures(tmp_path / "photos", {"car": 8, "dog": 8, "ship": 8}, size=(8, 8))
    (tmp_path / "new.png").write_bytes((tmp_path / "photos" / "dog" / "000.png").read_bytes())
    for folder in ("signs", "my_photos"):
        write_pictures(tmp_path / folder, {f"class {number}": 4 for number in range(10)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ECNN_DATA", raising=False)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}"
        if block.note.startswith("save as "):
            path = tmp_path / block.note.removeprefix("save as ")
            path.write_text(block.text)
            monkeypatch.delitem(sys.modules, path.stem, raising=False)
        elif block.language == "python" and not block.note.startswith("skip, "):
            run_python(block, names, where)
        elif block.language == "sh" and not block.note.startswith("skip, "):
            run_shell(block, where)
