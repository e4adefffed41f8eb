"""The page of a report on one or several runs: for each the verdict first, then the evidence for it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch

import ecnn
from ecnn.auditing import Audit
from ecnn.report.commands import audit_command, commands_of
from ecnn.report.contents import RunContents, Samples
from ecnn.report.markup import Html, element, joined, table
from ecnn.report.sections import (
    accuracy_section,
    audit_section,
    ball,
    code_section,
    images_section,
    members_section,
    percent,
    training_section,
)

# Without a claim the verdict is not shown in green: an accuracy of 0 % can be trustworthy too.
_TONES = {"believable": "good", "trustworthy": "plain", "inconclusive": "doubt"}


@dataclass(frozen=True, eq=False)
class RunReport:
    """One run of a report.

    Attributes:
        contents: of its folder.
        parameters: how many the model has.
        samples: results of attacks on a few images; None if no images were attacked.
        absence: why none were attacked, in a sentence; empty if some were.
    """

    contents: RunContents
    parameters: int
    samples: Samples | None
    absence: str = ""


def report_page(reports: Sequence[RunReport], *, again: str) -> str:
    """The whole page as HTML, with styles and images inside it.

    Args:
        again: the command that makes the page again.
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
            "How accurate these networks are, without and under attack, and whether to believe the figures."
            if several
            else "How accurate this network is, without and under attack, and whether to believe the figures.",
            class_="quiet",
        ),
        _overview(reports) if several else None,
        [_run(report, number, several) for number, report in enumerate(reports)],
        _versions(reports, again),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}\n{body}</html>\n'


def _overview(reports: Sequence[RunReport]) -> Html:
    """A table with a row per network, each linked to its part of the page."""
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
        return (
            "None of these networks has been audited: no figure here is their accuracy under strong attacks."
        )
    if len(balls) == 1:
        ((norm, eps, images),) = balls
        return f"Audited on {images:,} test images within {ball(norm, eps)}."
    return "The audits are of different radii or images: compare them with care."


def _clean_cell(report: RunReport) -> str:
    audit, results = report.contents.audit, report.contents.results
    if audit is not None:
        return percent(audit.clean_accuracy)
    return "unknown" if results is None else percent(results["test_accuracy"])


def _audit_cells(audit: Audit | None) -> tuple[Any, ...]:
    if audit is None:
        return (element("span", "not audited", class_="doubt"), "", "", "")
    low, high = audit.interval
    claimed = "" if audit.claimed is None else percent(audit.claimed)
    verdict = element("span", audit.verdict, class_=_tone(audit))
    return (verdict, claimed, percent(audit.accuracy), f"{percent(low)} to {percent(high)}")


def _run(report: RunReport, number: int, several: bool) -> Html:
    contents, samples = report.contents, report.samples
    name = contents.name if several else "Verdict"
    return joined(
        [
            element("h2", name, id=f"run{number}", class_="first" if number == 0 else None),
            _verdict(contents),
            element("p", _what_it_is(report)),
            accuracy_section(contents, samples),
            None if samples is None else images_section(contents, samples),
            None if samples is None else members_section(contents, samples),
            element("p", report.absence, class_="quiet") if report.absence else None,
            None if contents.audit is None else audit_section(contents.audit),
            None if contents.code is None else code_section(contents.code, contents.class_names),
            training_section(contents),
            _commands(contents),
        ]
    )


def _verdict(contents: RunContents) -> Html:
    audit = contents.audit
    if audit is None:
        text = (
            "This network has not been audited: the figures below come from short attacks on few images, or from "
            "attacks chosen by hand, so its accuracy under strong attacks is not known. This command audits it:"
        )
        command = element("pre", audit_command(contents))
        return element(
            "div", element("strong", "Not audited"), element("p", text), command, class_="verdict doubt"
        )
    facts = f"{audit.images:,} test images, {ball(audit.norm, audit.eps)}, budget {audit.budget}."
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
            f"Without an attack {percent(results['test_accuracy'])} of {results['images']:,} test images are right."
        )
    return " ".join(parts)


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


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]
