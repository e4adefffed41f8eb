"""Sections of a report on one run: accuracy by radius, attacked images, members, audit, code, training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ecnn.auditing import Audit, Finding
from ecnn.codes import CodeMatrix
from ecnn.evaluation import Curve, Evaluation
from ecnn.report.contents import STEPS, TRANSFER_STEPS, RunContents, Samples
from ecnn.report.drawings import Line, bars, chart, code_matrix, heat_map, picture
from ecnn.report.markup import Html, element, joined, table

_MOST_CLASSES = 26  # with more, a matrix of distances cannot be read


def accuracy_section(contents: RunContents, samples: Samples | None) -> Html | None:
    """Accuracy against the radius, and a table of the recorded attacks; None if there is neither."""
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
    note = (
        "Share of images that are right before and after the attack; shading and bars show its 95 % interval."
    )
    if samples is not None:
        note += (
            f" A search is {STEPS} steps of APGD, made for this report on the first {samples.images} images: it shows "
            "how accuracy falls, and the true accuracy may be lower."
        )
    return _section("Accuracy against the radius", note, element("div", figures, recorded, class_="figures"))


def _curve_line(name: str, curve: Curve) -> Line:
    rates = list(zip(curve.eps, curve.cumulative, strict=True))
    if len(rates) == 2:  # radius 0 and one more: drop 0, since a line would suggest values in between
        rates = rates[1:]
    return Line(
        f"{name}, {curve.cumulative[0].n:,} images",
        [(eps, 100 * rate.accuracy) for eps, rate in rates],
        [_ends(rate.interval) for _, rate in rates],
    )


def _recorded(found: Evaluation) -> Html:
    rows = [("no attack", percent(found.clean_accuracy), _range(found.interval["clean"]), "")]
    rows += [
        (
            name,
            percent(found.accuracy[name]),
            _range(found.interval[name]),
            percent(found.accuracy_after[name]),
        )
        for name in found.outcomes
    ]
    if len(found.outcomes) > 1:
        worst = found.worst_case
        rows.append(("worst case", percent(worst.accuracy), _range(worst.interval), ""))
    note = (
        f"Attacks recorded in the run folder, on {len(found):,} test images. Robust accuracy counts images that are "
        "right before and after; many papers count those that are right after, even if they were wrong before."
    )
    head = ("attack", "right before and after", "95 % interval", "right after")
    return element("div", table(head, rows), element("p", note, class_="quiet"))


def images_section(contents: RunContents, samples: Samples) -> Html | None:
    """A few test images beside their attacked forms and the differences; None if there are none to show."""
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
        f"{ball(samples.norm, samples.eps)}, {broken} of them are broken. Left: the image; middle: the "
        "attacked image (the best attempt, where the attack failed); right: the difference, where grey is no change "
        "and the largest change is black or white."
    )
    return _section("What an attack does to images", note, element("div", strips, class_="strips"))


def _said(contents: RunContents, answer: tuple[int, float], label: int) -> Html:
    number, share = answer
    name = element("b", _class_name(contents, number), class_=None if number == label else "wrong")
    return element("span", "says ", name, f", {100 * share:.0f} %")


def _class_name(contents: RunContents, number: int) -> str:
    if 0 <= number < len(contents.class_names):
        return contents.class_names[number]
    return "no answer" if number < 0 else f"no class (codeword {number})"


def members_section(contents: RunContents, samples: Samples) -> Html | None:
    """How often an attack flips each member, by class, and transfer between members; None without a code."""
    if samples.flips is None or contents.code is None:
        return None
    flips, transfer = samples.flips, samples.transfer
    share, count = flips.share[: len(contents.class_names)], contents.code.correctable_errors
    names = [_class_name(contents, number) for number in range(len(share))]
    members = [str(member) for member in range(share.shape[1])]
    note = (
        f"An attack succeeds if it turns enough members from right to wrong. This one turned {flips.per_image:.1f} of "
        f"{len(members)} per image, on average over {flips.n} images (broken or not); the code corrects {count}."
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
                    f"Transfer between the first {len(short)} members: per cent of {transfer.n} images on which the "
                    f"column's member is wrong after an attack on the row's member (PGD, {TRANSFER_STEPS} steps).",
                ),
            )
        )
    return _section("Which members are turned", note, element("div", figures, class_="figures"))


def audit_section(audit: Audit) -> Html:
    """Accuracy after each attack of an audit that broke an image, and the audit's findings."""
    telling = [stage for position, stage in enumerate(audit.stages) if position == 0 or stage.broken]
    steps = {"no attack": (audit.clean_accuracy, percent(audit.clean_accuracy))}
    steps |= {stage.name: (stage.accuracy, percent(stage.accuracy)) for stage in telling}
    quiet = len(audit.stages) - len(telling)
    caption = f"Accuracy left after each attack, one after the other, on {audit.images:,} images."
    if quiet:
        caption += f" {quiet} more broke no image."
    if audit.certified is not None:
        steps["certified"] = (audit.certified.accuracy, percent(audit.certified.accuracy))
        caption += f" No attack can leave less than the certified accuracy, proven by {audit.certified.how}."
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


def code_section(code: CodeMatrix, names: Sequence[str]) -> Html:
    """The code as a picture, and a table of its distances beside upper bounds for any code."""
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


def training_section(contents: RunContents) -> Html | None:
    """Training loss and validation accuracy by epoch; None for a run without a log."""
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
    return _section("Training", note, element("div", figures, class_="figures"))


def _section(title: str, note: str, shown: Html) -> Html:
    return joined([element("h3", title), element("p", note, class_="quiet"), shown])


def _ends(interval: tuple[float, float]) -> tuple[float, float]:
    return 100 * interval[0], 100 * interval[1]


def _range(interval: tuple[float, float]) -> str:
    return f"{percent(interval[0])} to {percent(interval[1])}"


def percent(share: float) -> str:
    """A share as text, such as "71.6 %"."""
    return f"{100 * share:.1f} %"


def ball(norm: str, eps: float) -> str:
    """The norm and radius of a ball as text, such as "Linf 0.031"."""
    return f"{norm.capitalize()} {eps:.4g}"
