"""The quickstart: three run folders like any others, a table of what their audits say, and a page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import pytest
from PIL import Image
from toys import shorten_audits
from typer.testing import CliRunner, Result

from ecnn import runs
from ecnn.auditing import load_audit
from ecnn.cli import app, quickstart_command
from ecnn.codes import load_code
from ecnn.data import load_data
from ecnn.errors import InputError
from ecnn.evaluation import load_evaluation
from ecnn.pipeline import quickstart
from ecnn.pipeline.training import plan
from ecnn.training.loop import LOG

pytestmark = pytest.mark.usefixtures("one_thread")
NETWORKS = ["plain", "ecnn", "ecnn-at"]


def command(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, Result]:
    """A folder, and what the command said in it: interrupted before the report, and once more."""

    def interrupted(*args: Any, **kwargs: Any) -> Path:
        raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shorten_audits(patch)
        with patch.context() as inner:
            inner.setattr(quickstart, "write_report", interrupted)
            first = command("quickstart", "--quick")
        assert not Path("out/report.html").exists()
        logs = [Path("out", name, LOG).read_bytes() for name in NETWORKS]
        again = command("quickstart", "--quick")
        assert logs == [Path("out", name, LOG).read_bytes() for name in NETWORKS]  # nothing was trained again
    return folder, first, again


@pytest.mark.slow
def test_three_networks_a_table_and_a_page(
    demo: tuple[Path, Result, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first, again = demo
    monkeypatch.chdir(folder)
    assert first.exit_code == 130
    assert "What is finished is kept in out: the same command goes on from there." in first.stderr
    assert again.exit_code == 0, again.output
    assert again.stdout.count("was trained before") == 3
    _check_table(again.stdout)
    page = Path("out/report.html").read_text()
    assert all(f'id="run{number}"' in page for number in range(3))
    assert "open out/report.html" in again.stdout.lower()
    _check_what_to_try(again.stdout)
    _check_folders()


@pytest.mark.slow
@pytest.mark.browser
def test_a_picture_of_the_report_is_taken(browser: Any, request: pytest.FixtureRequest) -> None:
    """That of the README is one of these: the table of verdicts and the first network."""
    folder = Path(pictures.DEMO) if pictures.DEMO else request.getfixturevalue("demo")[0] / "out"
    page = browser.new_page(viewport={"width": 900, "height": 1250}, color_scheme="light")
    page.goto((folder / "report.html").resolve().as_uri())
    assert page.inner_text("h1") == "Report: plain, ecnn, ecnn-at"
    pictures.check(pictures.keep("report.png", page.screenshot()))


def _check_table(printed: str) -> None:
    """Every row says what the records and the audit of its network say."""
    lines = printed.splitlines()
    rows = {line.split()[0]: line for line in lines if re.match(r"(plain|ecnn|ecnn-at)  ", line)}
    assert list(rows) == NETWORKS
    for name, row in rows.items():
        audit = load_audit(Path("out", name))
        claim = round(load_evaluation(Path("out", name)).accuracy_after["paper"], 2)
        assert audit.claimed == claim
        assert row.endswith(audit.verdict)
        assert row.split()[1:6:2] == [
            f"{100 * audit.clean_accuracy:.1f}",
            f"{100 * claim:.0f}",
            f"{100 * audit.accuracy:.1f}",
        ]


def _check_what_to_try(printed: str) -> None:
    flags = json.loads((Path(__file__).parent / "cli_flags.json").read_text())
    tries = [line.partition("#")[0].split() for line in printed.splitlines() if line.startswith("  ecnn ")]
    assert len(tries) == 4
    for words in tries:
        assert {word for word in words if word.startswith("--")} <= {*flags[words[1]]}


def _check_folders() -> None:
    """They are run folders that other commands take."""
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save("new.png")
    for name in NETWORKS:
        shown = command("predict", f"out/{name}", "new.png", "--json")
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.stdout)["class_names"] == [str(digit) for digit in range(10)]
        assert (runs.read_spec(f"out/{name}").code is None) == (name == "plain")
        assert Path("out", name, "audit.png").read_bytes().startswith(b"\x89PNG")
    done = command("evaluate", "out/ecnn", "--attack", "fgsm", "--eps", "0.12", "--limit", "4", "--json")
    assert done.exit_code == 0, done.output


def test_the_commands_that_it_names_can_be_pasted() -> None:
    named = quickstart_command._next(Path("my out"))
    commands = [shlex.split(line, comments=True) for line in named.splitlines() if line.startswith("  ecnn")]
    assert commands[0] == ["ecnn", "serve", "my out/ecnn", "--compare", "my out/plain"]
    assert commands[3] == ["ecnn", "report", "my out/mine", "--out", "my out/mine.html"]


def test_a_run_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").touch()
    with pytest.raises(InputError, match="is a run folder, whose code this would replace"):
        quickstart.quickstart_steps(tmp_path)


def test_its_networks_are_a_file_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    code, data = load_code("10x30"), load_data("digits")
    monkeypatch.setattr("ecnn.pipeline.training._designed", lambda *settings: code)  # a design takes seconds
    plans = {arm.name: plan(arm.spec, data) for arm in quickstart._experiment(quick=False).arms}
    assert list(plans) == NETWORKS
    assert [made.recipe.epochs for made in plans.values()] == [15, 30, 25]
    assert [made.code for made in plans.values()] == [None, code, code]
    assert [made.attack is None for made in plans.values()] == [True, True, False]
    assert all(made.spec.model["width"] == 6 for made in plans.values())
