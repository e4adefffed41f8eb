"""Reports: one file that says what the run folder says, whatever the names in it are."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from test_data import write_pictures
from toys import shorten_audits
from typer.testing import CliRunner

from ecnn import files, pipeline
from ecnn.auditing import load_audit
from ecnn.cli import app
from ecnn.errors import InputError
from ecnn.evaluation import Outcomes, load_evaluation
from ecnn.report import radius_of, read_run, read_runs, take_samples
from ecnn.report.drawings import Line, chart
from ecnn.report.markup import Html, element
from ecnn.runs import load_model
from ecnn.spec import AuditTable, Spec

HOSTILE = "<script>alert(1)"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def train(folder: Path, out: Path, kind: str = "ecnn") -> Path:
    """A run on coloured noise, trained in a moment."""
    model = {"kind": kind, "depth": 8, "width": 2}
    tables = {"data": {"name": str(folder)}, "model": model, "train": {"epochs": 2, "batch_size": 8}}
    return pipeline.train_run(Spec.from_dict(tables), out=out, device="cpu").folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "photos"
    write_pictures(folder, {HOSTILE: 10, "b & c": 10, "d": 10}, size=(8, 8))
    return folder


@pytest.fixture(scope="module")
def run(photos: Path) -> Path:
    """A trained, attacked and audited ECNN whose classes and folder have names that would break a careless page."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = train(photos, photos.parent / "a & <b>run")
    tables = pipeline.attack_tables(
        ["pgd"], {"steps": 2, "step_size": 0.02, "on": "members"}, ["0.02", "0.1"]
    )
    tables |= {
        "noise": {"norm": "linf", "eps": "8/255", "samples": 3},
        "deepfool": {"norm": "l2", "steps": 2},
    }
    asked = read_run(folder).spec.changed({"attacks": tables})
    opened = pipeline.open_model(str(folder), spec=asked, device="cpu")
    pipeline.evaluate_run(pipeline.plan_evaluation(asked, opened), out=folder)
    table = AuditTable(eps=0.1, claim=0.9, limit=4, budget="quick")
    with pytest.MonkeyPatch.context() as patch:
        shorten_audits(patch)
        pipeline.audit_run(pipeline.plan_audit(table, opened), out=folder)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return pipeline.write_report([run], run.parent / "report.html", images=6, device="cpu").read_text()


class Outline(HTMLParser):
    """Checks that elements are closed in order, and collects headings, text and what is loaded."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.loaded: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append(tag)
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_a_page_needs_nothing_but_itself(page: str) -> None:
    outline = Outline(page)
    assert not outline.tags & {"script", "link", "iframe", "object", "base"}
    assert all(value.startswith(("data:image/png;base64,", "#")) for value in outline.loaded)
    assert not re.search(r"https?://|url\(|@import", page)
    assert len([value for value in outline.loaded if value.startswith("data:")]) % 3 == 0
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert len(page) < 300_000


def test_names_of_classes_and_folders_stay_text(page: str) -> None:
    assert "<script" not in page
    assert "<b>run" not in page
    assert html.escape(HOSTILE) in page
    assert HOSTILE in Outline(page).text
    assert "a & <b>run" in Outline(page).text


def test_outcomes_of_another_network_are_refused(run: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "copied"))
    for path in (copied / "eval").glob("*.npz"):
        found = Outcomes.load(path)
        other = {**found.about["model"], "sha256": 64 * "0"}
        dataclasses.replace(found, about={**found.about, "model": other}).save(path)
    with pytest.raises(InputError, match="eval describes another network than the one in this folder"):
        pipeline.write_report([copied], tmp_path / "r.html", images=0)


def test_an_audit_that_was_tampered_with_stays_text(run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(run, tmp_path / "run")
    values = files.read_json(copied / "audit.json")
    values["reason"] = values["findings"][0]["claim"] = "<img src=x onerror=alert(1)>"
    files.write_json(copied / "audit.json", values)
    page = pipeline.write_report([copied], tmp_path / "r.html", images=0, device="cpu").read_text()
    assert page.count("&lt;img src=x onerror") == 2
    assert "<img src=x" not in page


def test_a_page_says_what_the_folder_says(run: Path, page: str) -> None:
    outline, audit, found = Outline(page), load_audit(run), load_evaluation(run)
    for heading in (
        "Verdict",
        "Accuracy against the radius",
        "The audit",
        "The code",
        "Training",
        "To repeat it",
    ):
        assert heading in outline.headings
    assert audit.reason in outline.text
    assert all(finding.claim in outline.text for finding in audit.findings)
    doubts = [finding for finding in audit.findings if finding.level != "ok"]
    assert doubts
    assert all(finding.figures in outline.text for finding in doubts)
    for name in ("pgd@0.02", "pgd@0.1"):
        assert name in outline.text
        assert f"{100 * found.accuracy[name]:.1f} %" in outline.text
    assert f"pgd, {len(found)} images" in outline.text
    assert "search on the members, 6 images" in outline.text
    assert "audit, 4 images" in outline.text
    assert "Which members are turned" in outline.headings
    assert not re.search(r"\{['\"]|\bNone\b|\bnan\b", outline.text)  # no raw values


@pytest.mark.usefixtures("one_thread")
def test_samples_are_attacked_within_the_ball_and_the_same_each_time(run: Path) -> None:
    model, split = load_model(run), pipeline.load_spec_data(read_run(run).spec, "data").test
    first, again = (take_samples(model, split, norm="linf", eps=0.001, limit=6) for _ in range(2))
    assert first.images == 6
    assert first.curves.accuracy == again.curves.accuracy
    assert first.shown
    for one, other in zip(first.shown, again.shown, strict=True):
        assert np.array_equal(one.attacked, other.attacked)
        change = np.abs(one.attacked - one.clean).max()
        assert 0 < change <= 0.001 + 1e-6  # also where the attack failed: then its best attempt
    assert first.flips is not None
    assert first.flips.n == 6
    assert first.transfer is not None
    assert first.transfer.n == 6


def test_the_verdict_comes_first(page: str) -> None:
    assert Outline(page).headings[0] == "Verdict"
    assert page.index("verdict bad") < page.index("<svg")


@pytest.mark.usefixtures("one_thread")
def test_its_commands_repeat_the_numbers(run: Path, page: str) -> None:
    (written,) = re.findall(r"<h3>To repeat it</h3><pre>(.*?)</pre>", page, re.S)
    lines = [shlex.split(line) for line in html.unescape(written).splitlines()]
    assert [words[1] for words in lines] == ["train", *["evaluate"] * 4, "audit"]
    found = load_evaluation(run)
    for words, name in zip(lines[1:5], found.outcomes, strict=True):
        done = CliRunner().invoke(app, [*words[1:], "--json"])
        assert done.exit_code == 0, done.output
        (again,) = json.loads(done.stdout)["attacks"].values()
        assert again["accuracy"] == found.accuracy[name]
        before = found.outcomes[name].about["attack"]
        lengths = dict.fromkeys(("eps", "step_size"))  # which a command takes as text
        assert {**again["attack"], **lengths} == {**before, **lengths}
    done = CliRunner().invoke(app, [*lines[0][1:], "--dry-run"])
    assert done.exit_code == 0, done.output
    asked = dict(zip(lines[5][3::2], lines[5][4::2], strict=True))
    audit = load_audit(run)
    assert (asked["--eps"], asked["--claim"], asked["--limit"]) == ("0.1", "0.9", str(audit.images))


def test_without_images_a_sentence_says_so(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / "run")
    spec = files.read_toml(moved / "spec.toml")
    spec["data"] |= {"name": "gone", "path": "/gone"}
    (moved / "DONE").unlink()
    files.write_toml(moved / "spec.toml", spec)
    outline = Outline(pipeline.write_report([moved], tmp_path / "r.html", device="cpu").read_text())
    assert "Curves and pictures that need images are left out: " in outline.text
    assert "Which members are turned" not in outline.headings
    assert "The audit" in outline.headings


@pytest.mark.usefixtures("one_thread")
def test_several_runs_and_one_without_a_code(photos: Path, run: Path, tmp_path: Path) -> None:
    plain = train(photos, tmp_path / "plain", "resnet")
    written = pipeline.write_report([run, plain], tmp_path / "r.html", images=4, device="cpu")
    outline = Outline(written.read_text())
    assert outline.headings.count("The code") == 1
    assert outline.headings.count("Which members are turned") == 1
    assert outline.headings.count("What an attack does to images") >= 1
    assert "Not audited" in outline.text
    assert f"ecnn audit {plain} --norm linf --eps 8/255 --out {plain}" in outline.text
    assert "not audited" in outline.text  # in the table
    assert radius_of(read_run(plain)) == ("linf", 8 / 255)
    assert "Linf 0.03137" in outline.text


def test_shipped_models_have_reports_too(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["report", "cifar10-ecnn30-at", "--images", "0", "--out", str(tmp_path / "r.html")]
    )
    assert done.exit_code == 0, done.output
    outline = Outline((tmp_path / "r.html").read_text())
    assert "airplane" in outline.text
    assert "The code" in outline.headings
    assert "60.5 % of 10,000 test images" in outline.text or "60.4 % of 10,000 test images" in outline.text


def test_a_code_that_belongs_to_the_kind_of_model_is_shown_too(tmp_path: Path) -> None:
    written = pipeline.write_report(
        ["mnist-tanh16", "cifar10-adp"], tmp_path / "r.html", images=0, device="cpu"
    )
    assert Outline(written.read_text()).headings.count("The code") == 1


def test_a_folder_without_a_spec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no spec\.toml"):
        read_run(tmp_path)


def test_text_is_escaped_unless_it_was_made_here() -> None:
    assert element("p", "<b>", Html("<i>x</i>"), None, ["&", 3]) == "<p>&lt;b&gt;<i>x</i>&amp;3</p>"
    assert element("p", "x", class_='"><script>', title=None) == '<p class="&quot;&gt;&lt;script&gt;">x</p>'


def test_names_that_are_no_text_can_be_written() -> None:
    made = element("p", "caf\udce9 \x00\x1b[31m \u202e", title="\udcff")
    made.encode("utf-8")
    assert not [letter for letter in made if ord(letter) < 32 or letter in "\u202e\udce9\udcff"]
    assert made.startswith('<p title="\ufffd">caf\ufffd ')


def test_runs_that_are_called_the_same_are_told_apart(run: Path, tmp_path: Path) -> None:
    assert read_run(run).name == "a & <b>run"
    paths = [tmp_path / kind / "0" for kind in ("ecnn", "resnet")]
    for path in paths:
        shutil.copytree(run, path)
    assert [contents.name for contents in read_runs(paths)] == [
        f"{tmp_path.name}/{kind}/0" for kind in ("ecnn", "resnet")
    ]
    same = [contents.name for contents in read_runs([paths[0], paths[0]])]
    assert same == [str(paths[0])] * 2


def test_a_chart_begins_at_zero_and_has_its_points_in_place() -> None:
    drawn = chart([Line("a", [(0, 100), (2, 50), (4, 0)])], x_title="x", y_title="y", most=100)
    (points,) = re.findall(r'<polyline points="([^"]*)"', drawn)
    places = [[float(number) for number in point.split(",")] for point in points.split()]
    assert places[1] == pytest.approx([(places[0][axis] + places[2][axis]) / 2 for axis in (0, 1)])
    assert places[0][0] < places[2][0]
    assert places[0][1] < places[2][1]  # down the page
    assert Outline(drawn).text.split()[0] == "0"


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [375, 1200])
def test_no_page_is_wider_than_its_window(page: str, tmp_path: Path, width: int) -> None:
    """A frame of that width in a page of our own: a window cannot be made narrower than 500 pixels everywhere."""
    root = "document.documentElement"
    measure = f"<script>document.title = {root}.clientWidth + ' holds ' + {root}.scrollWidth</script></body>"
    (tmp_path / "report.html").write_text(page.replace("</body>", measure))
    frame = (
        f'<iframe src="report.html" style="width:{width}px;height:900px;border:0" '
        'onload="document.title = this.contentDocument.title"></iframe>'
    )
    (tmp_path / "frame.html").write_text(f"<html><body>{frame}</body></html>")
    options = ["--headless", "--no-sandbox", "--allow-file-access-from-files", "--window-size=1400,1000"]
    done = subprocess.run(
        [str(CHROMIUM), *options, "--dump-dom", f"file://{tmp_path}/frame.html"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    (room, needed) = re.findall(r"<title>(\d+) holds (\d+)</title>", done.stdout)[0]
    assert int(needed) == int(room)
    assert width - 20 <= int(room) <= width  # less what a scroll bar takes
