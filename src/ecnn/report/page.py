"""A report on one or several runs as one HTML file: the verdict first, then what it rests on."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch

import ecnn
from ecnn.auditing import Audit, Finding
from ecnn.codes import CodeMatrix
from ecnn.evaluation import Curve, Evaluation
from ecnn.report.commands import audit_command, commands_of
from ecnn.report.contents import STEPS, TRANSFER_STEPS, RunContents, Samples
from ecnn.report.drawings import Line, bars, chart, code_matrix, heat_map, picture
from ecnn.report.markup import Html, element, joined, table

_MOST_CLASSES = 26  # of a matrix of distances that can still be read
# Without a claim there is nothing to be green about: 0 % can be trusted too.
_TONES = {"believable": "good", "trustworthy": "plain", "inconclusive": "doubt"}


@dataclass(frozen=True, eq=False)
class RunReport:
    """One run of a report.

    Attributes:
        contents: what its folder holds.
        parameters: of the model.
        samples: what was computed on a few images, or None
        absence: and then why not, in a sentence.
    """

    contents: RunContents
    parameters: int
    samples: Samples | None
    absence: str = ""


def report_page(reports: Sequence[RunReport], *, again: str) -> str:
    """The whole page, with everything in it that it needs.

    Args:
        again: the command that makes it once more.
    """
    names = [report.contents.name for report in reports]
    title = f"Report: {', '.join(names)}"
    style = (resources.files("ecnn") / "report" / "style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(style)),
    )
    several = len(reports) > 1
    body = element(
        "body",
        element("h1", title if several else names[0]),
        element(
            "p",
            "What these networks do without an attack, what attacks leave of it, and whether to believe that."
            if several
            else "What this network does without an attack, what attacks leave of it, and whether to believe that.",
            class_="quiet",
        ),
        _overview(reports) if several else None,
        [_run(report, number, several) for number, report in enumerate(reports)],
        _versions(reports, again),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}\n{body}</html>\n'


def _overview(reports: Sequence[RunReport]) -> Html:
    """A row per network, with links to their parts."""
    rows = []
    for number, report in enumerate(reports):
        audit = report.contents.audit
        name = element("a", report.contents.name, href=f"#run{number}")
        verdict, *figures = _audit_cells(audit)
        rows.append((name, verdict, _clean_cell(report), *figures))
    head = ("network", "verdict", "clean", "claimed", "audited", "95 % interval")
    return joined([table(head, rows), element("p", _overview_note(reports), class_="quiet")])


def _overview_note(reports: Sequence[RunReport]) -> str:
    audits = [report.contents.audit for report in reports if report.contents.audit is not None]
    balls = {(audit.norm, audit.eps, audit.images) for audit in audits}
    if not balls:
        return "None of them has been audited: nothing here says what an attack leaves."
    if len(balls) == 1:
        ((norm, eps, images),) = balls
        return f"Audited on {images:,} test images within {_ball(norm, eps)}."
    return "The audits are of different radii or images: compare them with care."


def _clean_cell(report: RunReport) -> str:
    audit, results = report.contents.audit, report.contents.results
    if audit is not None:
        return _percent(audit.clean_accuracy)
    return "unknown" if results is None else _percent(results["test_accuracy"])


def _audit_cells(audit: Audit | None) -> tuple[Any, ...]:
    if audit is None:
        return (element("span", "not audited", class_="doubt"), "", "", "")
    low, high = audit.interval
    claimed = "" if audit.claimed is None else _percent(audit.claimed)
    verdict = element("span", audit.verdict, class_=_tone(audit))
    return (verdict, claimed, _percent(audit.accuracy), f"{_percent(low)} to {_percent(high)}")


def _run(report: RunReport, number: int, several: bool) -> Html:
    contents, samples = report.contents, report.samples
    name = contents.name if several else "Verdict"
    return joined(
        [
            element("h2", name, id=f"run{number}", class_="first" if number == 0 else None),
            _verdict(contents),
            element("p", _what_it_is(report)),
            _accuracy(contents, samples),
            None if samples is None else _strips(contents, samples),
            None if samples is None else _members(contents, samples),
            element("p", report.absence, class_="quiet") if report.absence else None,
            None if contents.audit is None else _audit(contents.audit),
            None if contents.code is None else _code(contents.code, contents.class_names),
            _training(contents),
            _commands(contents),
        ]
    )


def _verdict(contents: RunContents) -> Html:
    audit = contents.audit
    if audit is None:
        text = (
            "No figure here says what an attack leaves: those below are of short searches on few images, or of attacks "
            "that were chosen by hand. This would say it:"
        )
        command = element("pre", audit_command(contents))
        return element(
            "div", element("strong", "Not audited"), element("p", text), command, class_="verdict doubt"
        )
    facts = f"{audit.images:,} test images, {_ball(audit.norm, audit.eps)}, budget {audit.budget}."
    return element(
        "div",
        element("strong", _sentence_case(audit.headline)),
        element("p", audit.reason),
        element("p", facts, class_="quiet"),
        class_=f"verdict {_tone(audit)}",
    )


def _tone(audit: Audit) -> str:
    return _TONES.get(audit.verdict, "bad")


def _what_it_is(report: RunReport) -> str:
    contents = report.contents
    kind, code = contents.spec.model.get("kind", "ecnn"), contents.code
    members = "" if code is None else f" of {code.code_length} members that write a code"
    parts = [
        f"A network of kind {kind}{members}, {report.parameters:,} parameters, for {len(contents.class_names)} classes "
        f"of {contents.spec.data.name}."
    ]
    attack = contents.spec.train.get("attack")
    if isinstance(attack, dict):
        parts.append(
            f"It was trained against {str(attack.get('kind', 'pgd')).upper()} within "
            f"{str(attack.get('norm', '')).capitalize()} {attack.get('eps', '')}."
        )
    elif contents.epochs:
        parts.append("It was trained without attacks.")
    results = contents.results
    if results is not None:
        parts.append(
            f"Without an attack {_percent(results['test_accuracy'])} of {results['images']:,} test images are right."
        )
    return " ".join(parts)


def _accuracy(contents: RunContents, samples: Samples | None) -> Html | None:
    """Accuracy against the radius, and a table of what was recorded."""
    lines: dict[str, list[Line]] = {}
    found = contents.evaluation
    for evaluation in (found, None if samples is None else samples.curves):
        for norm, curves in ({} if evaluation is None else evaluation.curves()).items():
            for name, curve in curves.items():
                shown = name if evaluation is found else f"search {name}"
                lines.setdefault(norm, []).append(_curve_line(shown, curve))
    audit = contents.audit
    if audit is not None:
        point = Line(
            f"audit, {audit.images:,} images", [(audit.eps, 100 * audit.accuracy)], [_ends(audit.interval)]
        )
        lines.setdefault(audit.norm, []).append(point)
    figures = [
        element(
            "figure",
            chart(
                own,
                x_title=f"radius, {norm.capitalize()}",
                y_title="right, %",
                most=100,
                label=f"accuracy against the radius in {norm}",
            ),
        )
        for norm, own in lines.items()
    ]
    recorded = None if found is None or not found.outcomes else _recorded(found)
    if not figures and recorded is None:
        return None
    note = "Share of images that are right before and after; shaded or as a bar, its 95 % interval."
    if samples is not None:
        note += (
            f" A search is {STEPS} steps of APGD, made for this report on the first {samples.images} images: it shows "
            "how accuracy falls, and the truth may be lower."
        )
    return joined(
        [
            element("h3", "Accuracy against the radius"),
            element("p", note, class_="quiet"),
            element("div", figures, recorded, class_="figures"),
        ]
    )


def _curve_line(name: str, curve: Curve) -> Line:
    rates = list(zip(curve.eps, curve.cumulative, strict=True))
    if len(rates) == 2:  # at one radius alone: nothing is known in between
        rates = rates[1:]
    return Line(
        f"{name}, {curve.cumulative[0].n:,} images",
        [(eps, 100 * rate.accuracy) for eps, rate in rates],
        [_ends(rate.interval) for _, rate in rates],
    )


def _recorded(found: Evaluation) -> Html:
    rows = [("no attack", _percent(found.clean_accuracy), _range(found.interval["clean"]), "")]
    rows += [
        (
            name,
            _percent(found.accuracy[name]),
            _range(found.interval[name]),
            _percent(found.accuracy_after[name]),
        )
        for name in found.outcomes
    ]
    if len(found.outcomes) > 1:
        worst = found.worst_case
        rows.append(("worst case", _percent(worst.accuracy), _range(worst.interval), ""))
    note = (
        f"Attacks that the run folder records, {len(found):,} test images. Right before and after is robust accuracy; "
        "right after counts as many papers do, whatever the image was before."
    )
    head = ("attack", "right before and after", "95 % interval", "right after")
    return element("div", table(head, rows), element("p", note, class_="quiet"))


def _strips(contents: RunContents, samples: Samples) -> Html | None:
    if not samples.shown:
        return None
    strips = []
    for shown in samples.shown:
        change = 0.5 + (shown.attacked - shown.clean) / (
            2 * max(float(np.abs(shown.attacked - shown.clean).max()), 1e-9)
        )
        true = _class_name(contents, shown.label)
        cells = [
            element(
                "div",
                picture(shown.clean, f"clean image of class {true}"),
                _said(contents, shown.before, shown.label),
            ),
            element(
                "div", picture(shown.attacked, "attacked image"), _said(contents, shown.after, shown.label)
            ),
            element("div", picture(change, "difference"), "difference"),
        ]
        strips.append(element("div", cells, class_="strip"))
    broken = sum(shown.after[0] != shown.label for shown in samples.shown)
    note = (
        f"The first {len(samples.shown)} test images that the network gets right; attacked {samples.attack} within "
        f"{_ball(samples.norm, samples.eps)}, {broken} of them are broken. Left the image, in the middle what the "
        "attack made of it (its best attempt, where it failed), right the difference: grey is no change, the largest "
        "change is black or white."
    )
    return joined(
        [
            element("h3", "What an attack does to images"),
            element("p", note, class_="quiet"),
            element("div", strips, class_="strips"),
        ]
    )


def _said(contents: RunContents, answer: tuple[int, float], label: int) -> Html:
    number, share = answer
    name = element("b", _class_name(contents, number), class_=None if number == label else "wrong")
    return element("span", "says ", name, f", {100 * share:.0f} %")


def _class_name(contents: RunContents, number: int) -> str:
    if 0 <= number < len(contents.class_names):
        return contents.class_names[number]
    return "no answer" if number < 0 else f"no class (codeword {number})"


def _members(contents: RunContents, samples: Samples) -> Html | None:
    """Which bits flip, member by class, and who falls for what was crafted on whom."""
    if samples.flips is None or contents.code is None:
        return None
    flips, transfer = samples.flips, samples.transfer
    share, count = flips.share[: len(contents.class_names)], contents.code.correctable_errors
    names = [_class_name(contents, number) for number in range(len(share))]
    members = [str(member) for member in range(share.shape[1])]
    note = (
        f"An attack wins by turning members. This one turned {flips.per_image:.1f} of {len(members)} on an image, on "
        f"average over {flips.n} images (broken or not); the code corrects {count}."
    )
    figures = [
        element(
            "figure",
            heat_map(share, names, columns=members, label="members turned, by class"),
            element(
                "figcaption",
                "Rows: classes; columns: members. The stronger the colour, the larger the share of images on which the "
                "member was right before the attack and wrong after it; grey where there is no such image.",
            ),
            class_="wide",
        )
    ]
    if transfer is not None:
        short = [name.removeprefix("member ") for name in transfer.names]
        figures.append(
            element(
                "figure",
                heat_map(1 - transfer.accuracy, short, columns=short, label="transfer between members"),
                element(
                    "figcaption",
                    f"Transfer: per cent of {transfer.n} images on which the member of the column is wrong when the "
                    f"member of the row was attacked, of the first {len(short)} members (PGD, {TRANSFER_STEPS} steps).",
                ),
            )
        )
    return joined(
        [
            element("h3", "Which members fall"),
            element("p", note, class_="quiet"),
            element("div", figures, class_="figures"),
        ]
    )


def _audit(audit: Audit) -> Html:
    telling = [stage for position, stage in enumerate(audit.stages) if position == 0 or stage.broken]
    steps = {"no attack": (audit.clean_accuracy, _percent(audit.clean_accuracy))}
    steps |= {stage.name: (stage.accuracy, _percent(stage.accuracy)) for stage in telling}
    quiet = len(audit.stages) - len(telling)
    caption = f"What stands after each attack, one after the other, on {audit.images:,} images."
    if quiet:
        caption += f" {quiet} more broke nothing."
    if audit.certified is not None:
        steps["certified"] = (audit.certified.accuracy, _percent(audit.certified.accuracy))
        caption += f" Below what is certified no attack can come: proven by {audit.certified.how}."
    drawn = element("figure", bars(steps, label="accuracy after each attack"), element("figcaption", caption))
    claims = [finding.claim for finding in audit.findings]
    said = [element("p", sentence) for sentence in audit.explanation if sentence not in claims]
    doubts = [_findings(audit, "alarm", "Alarms"), _findings(audit, "note", "Worth knowing")]
    return joined(
        [
            element("h3", "The audit"),
            element("div", drawn, element("div", said, doubts), class_="figures"),
            _findings(audit, "ok", "Checked, and nothing found"),
        ]
    )


def _findings(audit: Audit, level: str, title: str) -> Html | None:
    chosen = [_finding(finding) for finding in audit.findings if finding.level == level]
    if not chosen:
        return None
    return joined([element("h3", title), element("ul", chosen, class_=f"findings {level}")])


def _finding(finding: Finding) -> Html:
    advice = element("span", f" {finding.advice}", class_="quiet") if finding.advice else None
    shown = finding.figures if finding.level != "ok" else ""
    figures = element("details", element("summary", "figures"), shown, class_="quiet") if shown else None
    return element("li", element("b", f"{finding.name}: "), finding.claim, advice, figures)


def _code(code: CodeMatrix, names: Sequence[str]) -> Html:
    facts = code.report()
    known = [names[number] if number < len(names) else f"({number})" for number in range(code.num_classes)]
    rows = [
        ("smallest distance of two rows (Hamming)", facts.min_row_distance, facts.min_row_distance_bound),
        ("wrong members that it always corrects", facts.correctable_errors, facts.correctable_errors_bound),
        (
            "smallest distance of two columns (nats)",
            f"{facts.min_column_distance:.3f}",
            f"{facts.min_column_distance_bound:.3f}",
        ),
        ("smallest group of classes in a task", facts.smallest_group, facts.smallest_group_bound),
    ]
    figures = [
        element(
            "figure",
            code_matrix(code, known),
            element(
                "figcaption",
                f"The code: {code.num_classes} classes (rows) by {code.code_length} tasks (columns), "
                f"{code.arity} symbols.",
            ),
            class_="wide",
        )
    ]
    if code.num_classes <= _MOST_CLASSES:
        distances = code.row_distances
        texts = distances.astype(str).astype(object)
        figures.append(
            element(
                "figure",
                heat_map(
                    distances / code.code_length,
                    known,
                    columns=[str(number) for number in range(code.num_classes)],
                    label="distances between codewords",
                    texts=texts,
                ),
                element("figcaption", "In how many tasks two classes differ."),
            )
        )
    return joined(
        [
            element("h3", "The code"),
            table(("", "this code", "no code can exceed"), rows),
            element("div", figures, class_="figures"),
        ]
    )


def _training(contents: RunContents) -> Html | None:
    epochs = contents.epochs
    if not epochs:
        return None
    shares = {
        "validation images right": "val_accuracy",
        "right under the training attack": "val_robust_accuracy",
    }
    lines = [
        Line(name, [(epoch["epoch"] + 1, 100 * epoch[key]) for epoch in epochs if epoch.get(key) is not None])
        for name, key in shares.items()
    ]
    losses = Line("loss", [(epoch["epoch"] + 1, epoch["loss"]) for epoch in epochs])
    drawn = [line for line in lines if line.points]
    figures = [
        element(
            "figure",
            chart([losses], x_title="epoch", y_title="training loss", label="training loss by epoch"),
        )
    ]
    if drawn:
        figures.insert(
            0,
            element(
                "figure",
                chart(
                    drawn, x_title="epoch", y_title="right, %", most=100, label="validation accuracy by epoch"
                ),
            ),
        )
    recipe = contents.spec.train
    note = (
        f"Epochs {len(epochs)}, batches of {recipe.get('batch_size', '?')}, {recipe.get('optimizer', '?')}, "
        f"objective {recipe.get('objective', '?')}, seed {contents.spec.seed}."
    )
    return joined(
        [
            element("h3", "Training"),
            element("p", note, class_="quiet"),
            element("div", figures, class_="figures"),
        ]
    )


def _commands(contents: RunContents) -> Html:
    made = ", ".join(f"{name} {value}" for name, value in contents.environment.items() if value is not None)
    where = element("p", f"Trained with {made}.", class_="quiet") if made else None
    return joined([element("h3", "To repeat it"), element("pre", "\n".join(commands_of(contents))), where])


def _versions(reports: Sequence[RunReport], again: str) -> Html:
    hashes = ", ".join(
        f"{report.contents.name} {report.contents.spec.content_hash[:12]}" for report in reports
    )
    text = (
        f"This page was made by ecnn {ecnn.__version__}, torch {torch.__version__}, numpy {np.__version__}, Python "
        f"{platform.python_version()}. Specs (SHA-256): {hashes}."
    )
    return element(
        "footer",
        element("h2", "This page"),
        element("pre", again),
        element("p", text, class_="quiet"),
    )


def _ends(interval: tuple[float, float]) -> tuple[float, float]:
    return 100 * interval[0], 100 * interval[1]


def _range(interval: tuple[float, float]) -> str:
    return f"{_percent(interval[0])} to {_percent(interval[1])}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ball(norm: str, eps: float) -> str:
    return f"{norm.capitalize()} {eps:.4g}"


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]
