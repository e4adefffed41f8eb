"""`ecnn predict`: classifies image files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ecnn.checks import printable
from ecnn.cli.options import Device, JsonFlag, Root, SavedModel
from ecnn.cli.statuses import MISTAKE
from ecnn.errors import InputError

if TYPE_CHECKING:
    from ecnn.predicting import Classifier, Prediction


def predict(
    model: SavedModel,
    images: Annotated[list[str], typer.Argument(help="Image files, or folders of them.")],
    top: Annotated[int, typer.Option(help="How many classes to name.")] = 3,
    reject: Annotated[
        str | None,
        typer.Option(
            help="Reject images further than this from every codeword: a distance such as 2.5, or "
            "the share of the run's validation images that may be rejected, such as 5%."
        ),
    ] = None,
    root: Root = Path("data"),
    device: Device = "auto",
    as_json: JsonFlag = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table with a row per image.")] = False,
) -> int:
    """Classify image files: names of the classes, probabilities, margin, distance to the nearest codeword."""
    from ecnn.baselines import FeatureSqueezing
    from ecnn.predicting import load_classifier
    from ecnn.runs import find_device

    if as_json and as_csv:
        raise InputError("--json and --csv are two forms of the same output: give one.")
    classifier = load_classifier(model, device=find_device(device))
    limit = None if reject is None else _reject_distance(reject, classifier, model, root)
    found = classifier.predict(images, top=top, reject=limit, keep_going=True)
    if as_json:
        facts = {"model": model, "class_names": classifier.class_names, "reject": limit}
        typer.echo(json.dumps({**facts, "predictions": [prediction.to_dict() for prediction in found]}))
    else:
        text = _as_csv(found, top) if as_csv else _as_text([entry for entry in found if not entry.error])
        typer.echo(text, nl=False)
    if isinstance(classifier.model, FeatureSqueezing):
        typer.echo(
            "ecnn: the model's detector was not used: in Python, ecnn.load_model(...).detect(images) uses it.",
            err=True,
        )
    for prediction in found:
        if prediction.error:
            typer.echo(f"ecnn: {prediction.error}", err=True)
    return MISTAKE if any(prediction.error for prediction in found) else 0


def _reject_distance(text: str, classifier: Classifier, model: str, root: Path) -> float:
    from ecnn import pipeline, runs

    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise InputError(
            f"--reject must be a distance such as 2.5 or a share such as 5%, not {text!r}."
        ) from None
    if not text.endswith("%"):
        return value
    return classifier.reject_distance(pipeline.load_own_data(runs.read_spec(model), root).val, value / 100)


def _as_text(found: list[Prediction]) -> str:
    """A line per image: the most probable classes, the margin, and the distance to the nearest codeword if any."""
    names = [printable(prediction.image) for prediction in found]
    width = max(map(len, names), default=0)
    lines = []
    for name, prediction in zip(names, found, strict=True):
        guesses = ", ".join(
            f"{printable(guess.name)} {100 * guess.probability:.1f} %" for guess in prediction.guesses
        )
        facts = [guesses, f"margin {prediction.margin:.2f}"]
        if prediction.distance is not None:
            facts.append(f"distance {prediction.distance:.2f}")
        if prediction.rejected:
            facts.append("REJECTED")
        lines.append(f"{name:<{width}}  {'   '.join(facts)}\n")
    return "".join(lines)


def _as_csv(found: list[Prediction], top: int) -> str:
    written = io.StringIO()
    table = csv.writer(written)
    more = [f"{what}_{number}" for number in range(2, top + 1) for what in ("class", "probability")]
    table.writerow(["image", "class", "probability", *more, "margin", "distance", "rejected", "error"])
    for prediction in found:
        guesses = [value for guess in prediction.guesses for value in (guess.name, guess.probability)]
        guesses += [""] * (2 * top - len(guesses))
        facts = (prediction.margin, prediction.distance, prediction.rejected, prediction.error)
        table.writerow([prediction.image, *guesses, *facts])
    return written.getvalue()
