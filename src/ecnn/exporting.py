"""Export of a trained model for other programs: an ONNX or torch.export file, checked, with a model card."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import ecnn
from ecnn import files, runs
from ecnn.attacks.views import has_code, members_of
from ecnn.auditing.report import find_audit
from ecnn.baselines import FeatureSqueezing
from ecnn.checks import check_choice, eps_text, parse_eps, printable
from ecnn.errors import InputError
from ecnn.objectives import codeword_distances
from ecnn.predicting import Classifier, ask_model, load_classifier

#: Formats by the suffix of the file.
FORMATS = {".onnx": "onnx", ".pt2": "torchexport"}
#: Largest allowed difference between the outputs of file and model, as a share of the largest output (or of 1).
TOLERANCE = 1e-5
#: Number of random images on which file and model are compared.
COMPARED = 5
_OPSET = 17
_CLASSES, _MADE_BY = "classes.json", "Made by ecnn "


@dataclass(frozen=True)
class Exported:
    """A file or folder that was written, and how much its outputs differ from the model's.

    Attributes:
        path: the file or folder.
        card: the model card in Markdown, beside the file or in the folder.
        format: name of the format.
        difference: largest difference of the outputs on random images, as a share of the largest one (or of 1). None
            if it was not measured: onnxruntime is not installed, or a folder was written with the weights as they are.
    """

    path: Path
    card: Path
    format: str
    difference: float | None = None


class _Deployed(nn.Module):
    """The network that is exported: it returns (scores,), with a code (scores, distance to the nearest codeword)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        model: Any = self.model
        if not has_code(model):
            return (model(images),)
        logits, symbols = members_of(model, images)
        scores = model.decode(logits) if hasattr(model, "decode") else model(images)
        return scores, codeword_distances(logits, symbols).amin(dim=1)


def export_model(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, format: str | None = None
) -> Exported:
    """Writes the model of a run folder, or a shipped one, as a file for other programs, and a model card beside it.

    The file takes float32 pixels in [0, 1] of one or more images and gives the model's scores. It is compared with the
    model before it is written (an ONNX file only if onnxruntime is installed). It holds the names of the classes too.

    Args:
        source: a run folder, or the name of a shipped model.
        out: the file; the card has the same name with .md at the end. Existing files are only replaced if they are an
            earlier export.
        format: "onnx" (needs the package onnx) or "torchexport"; None to decide by the suffix, .onnx or .pt2.
    """
    path = Path(out)
    if format is None:
        if path.suffix not in FORMATS:
            raise InputError(f"{path} should end in {' or '.join(FORMATS)}, or give the format.")
        format = FORMATS[path.suffix]
    check_choice("format", format, FORMATS.values())
    card = path.with_name(f"{path.name}.md")
    _check_targets(path, card)
    content, difference = (_onnx_file if format == "onnx" else _program_file)(load_classifier(source))
    exported = Exported(path, card, format, difference)
    text = _card(source, exported, hashlib.sha256(content).hexdigest())
    # The card is written first, because only with a card is a file recognised as an export. In the card question marks
    # replace what is not UTF-8, such as in the name of the file.
    files.write_together({card: text.encode(errors="replace"), path: content})
    return exported


def _check_targets(path: Path, card: Path) -> None:
    """Raises InputError unless both files can be written and replace nothing but an earlier export."""
    for target in (path, card):
        files.check_writable(target)
    is_ours = files.exists(card) and _MADE_BY.encode() in files.read_bytes(card)
    for target in (path, card):
        if files.exists(target) and not is_ours:
            raise InputError(
                f"{target} would be replaced, but it is not an earlier export: choose another --out."
            )


def _onnx_file(classifier: Classifier) -> tuple[bytes, float | None]:
    """Content of the ONNX file, and its largest difference from the model; None if onnxruntime is not installed."""
    onnx = _needed("onnx")
    names = ["scores", "distance"][: 1 + has_code(classifier.model)]
    written = io.BytesIO()
    options: dict[str, Any] = {
        "f": written,
        "input_names": ["images"],
        "output_names": names,
        "dynamic_axes": {name: {0: "batch"} for name in ("images", *names)},
        "opset_version": _OPSET,
    }
    if "dynamo" in inspect.signature(torch.onnx.export).parameters:  # the newer exporter needs more packages
        options["dynamo"] = False
    deployed = _Deployed(classifier.model).eval()
    with _refusing("onnx"):
        torch.onnx.export(deployed, (_images(classifier, 2),), **options)
    model = onnx.load_from_string(written.getvalue())
    for name, text in _facts(classifier).items():
        model.metadata_props.add(key=name, value=text)
    content: bytes = model.SerializeToString()
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return content, None
    quiet = runtime.SessionOptions()
    quiet.log_severity_level = 4
    with _refusing("onnx"):
        session = runtime.InferenceSession(content, quiet, providers=["CPUExecutionProvider"])

    def answer(images: Tensor) -> list[Tensor]:
        with _refusing("onnx"):
            return [torch.from_numpy(part) for part in session.run(None, {"images": images.numpy()})]

    return content, _compare(classifier, answer)


def _program_file(classifier: Classifier) -> tuple[bytes, float]:
    """Content of the torch.export file, and its largest difference from the model."""
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    deployed = _Deployed(classifier.model).eval()
    with _refusing("torchexport"), torch.no_grad():
        program = torch.export.export(deployed, (_images(classifier, 2),), dynamic_shapes=shapes)
    written = io.BytesIO()  # not a file, because torch ends the process when a disk is full
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about weights that share memory
        torch.export.save(program, written, extra_files=_facts(classifier))
    content = written.getvalue()
    return content, _compare(classifier, torch.export.load(io.BytesIO(content)).module())


@contextlib.contextmanager
def _refusing(format: str) -> Iterator[None]:
    """Turns every error of an exporter inside into an InputError: the format cannot hold this model."""
    # When torch's exporter fails it prints pages of the graph, whatever the log level.
    quiet = mock.patch.object(torch._C, "_jit_onnx_log", create=True)
    try:
        with quiet, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the age of this exporter and on models that read shapes
            yield
    except Exception as error:  # exporters raise many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(
            f"this model cannot be written as {format} ({reason}): try another --format."
        ) from error


def _compare(classifier: Classifier, answer: Any) -> float:
    """Largest relative difference of the file's outputs from the model's; RuntimeError if above `TOLERANCE`."""
    images, largest = _images(classifier, COMPARED), 0.0
    for batch in (images, images[:1]):  # not the batch size that the file was made with
        with torch.no_grad():
            expected, came = _Deployed(classifier.model).eval()(batch), answer(batch)
        for one, other in zip(expected, came, strict=True):
            same_form = one.shape == other.shape
            apart = float((one - other).abs().max() / one.abs().max().clamp_min(1)) if same_form else math.inf
            if not apart <= TOLERANCE:  # also for nan
                raise RuntimeError(
                    f"the scores of the exported file differ from those of the model by {apart:.1e} (at most "
                    f"{TOLERANCE:.0e} is allowed), so it is not kept"
                )
            largest = max(largest, apart)
    return largest


def _images(classifier: Classifier, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, classifier.in_channels, *classifier.image_size, generator=generator)


def _facts(classifier: Classifier) -> dict[str, str]:
    """Metadata stored in the file: class names, form of the input, version of ecnn."""
    form = {"channels": classifier.in_channels, "size": classifier.image_size, "range": [0, 1]}
    return {
        _CLASSES: json.dumps(_score_names(classifier)),
        "input.json": json.dumps(form),
        "made_by": f"ecnn {ecnn.__version__}",
    }


def _needed(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise InputError(
            f"this format needs the package {package}, which is not installed: pip install 'ecnn[export]', or use "
            "--format torchexport."
        ) from None


def _card(source: str | os.PathLike[str], exported: Exported, digest: str) -> str:
    """The model card in Markdown: the model, its known accuracy, how to use the file, and the file's SHA-256."""
    classifier = load_classifier(source)
    parity = "not compared with the model: onnxruntime is not installed"
    if exported.difference is not None:
        apart = f"{exported.difference:.1g} of the largest score apart"
        parity = f"compared with the model on {COMPARED} images of noise: {apart}"
    lines = [
        *about_lines(source, exported.path.stem),
        "",
        "## How to use it",
        "",
        *input_lines(classifier),
    ]
    if has_code(classifier.model):
        lines.append(
            "- Output `distance`: (batch,) expected number of members that disagree with the nearest codeword."
        )
    lines += [
        "- Images of another size are refused; `ecnn predict` resizes them whole, bilinearly.",
        f"- `{exported.path.name}` ({exported.format}), {parity}; SHA-256 `{digest}`.",
        "",
        "```python",
        *_SNIPPETS[exported.format].format(name=exported.path.name).splitlines(),
        "```",
        "",
        *class_lines(classifier),
    ]
    return "\n".join(lines)


def about_lines(source: str | os.PathLike[str], title: str) -> list[str]:
    """The beginning of a card: what the model is, and its known accuracy, clean and audited."""
    folder, spec, classifier = runs.run_folder(source), runs.read_spec(source), load_classifier(source)
    facts = runs.describe_run(folder)
    parameters = sum(parameter.numel() for parameter in classifier.model.parameters())
    code: Any = getattr(classifier.model, "code", None)
    members = "" if code is None else f", {code.code_length} members, {code.num_classes} codewords"
    eps = facts["adversarial"]
    trained = f"trained adversarially within {eps_text(parse_eps(eps))}" if eps else "trained"
    return [
        f"# {_as_markdown(title)}",
        "",
        f"An image classifier of kind `{facts['kind']}`{members}, {parameters:,} parameters, "
        f"{trained} on `{spec.data.name}`.",
        "",
        "## What is known of it",
        "",
        *_accuracy(folder),
        *([_DETECTS] if isinstance(classifier.model, FeatureSqueezing) else []),
        *_audited(folder, classifier.model),
    ]


def input_lines(classifier: Classifier) -> list[str]:
    """Lines of a card on the model's input and on the scores that it returns."""
    height, width = classifier.image_size
    return [
        f"- Input `images`: float32 (batch, {classifier.in_channels}, {height}, {width}), "
        f"{'grey' if classifier.in_channels == 1 else 'red, green, blue'}, bytes divided by 255: values in [0, 1]. The "
        "model does all else itself.",
        f"- Output `scores`: (batch, {_outputs(classifier)}; a softmax gives probabilities, the largest is the class.",
    ]


def class_lines(classifier: Classifier) -> list[str]:
    """The end of a card: the classes, and the versions of ecnn and torch that made it."""
    return [
        "## Classes",
        "",
        *(f"{number}. {_as_markdown(name)}" for number, name in enumerate(_score_names(classifier))),
        "",
        f"{_MADE_BY}{ecnn.__version__} with torch {torch.__version__}.",
        "",
    ]


_SNIPPETS = {
    "onnx": """import json
import onnxruntime

session = onnxruntime.InferenceSession("{name}")
class_names = json.loads(session.get_modelmeta().custom_metadata_map["classes.json"])
scores = session.run(["scores"], {{"images": images}})[0]
print(class_names[scores[0].argmax()])""",
    "torchexport": """import json
import torch

facts = {{"classes.json": ""}}
model = torch.export.load("{name}", extra_files=facts).module()
scores = model(images)[0]
print(json.loads(facts["classes.json"])[int(scores[0].argmax())])""",
}


_DETECTS = (
    "- The model also has a detector, which the scores do not show: in Python, `ecnn.load_model(...).detect(images)` "
    "uses it. An attack succeeds where the answer is wrong and not flagged, so accuracy alone means little."
)


def _score_names(classifier: Classifier) -> list[str]:
    """The class name of each score; scores of codewords that belong to no class are named "none (codeword ...)"."""
    images = torch.zeros(1, classifier.in_channels, *classifier.image_size)
    return [
        classifier.class_name(label) for label in range(ask_model(classifier.model, images).scores.shape[1])
    ]


def _outputs(classifier: Classifier) -> str:
    scores, classes = len(_score_names(classifier)), len(classifier.class_names)
    rest = "" if scores == classes else f": {classes} classes, and {scores - classes} codewords of no class"
    return f"{scores}){rest}"


def _as_markdown(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    line = re.sub(r"([\\`*_\[\]<>&~|])", r"\\\1", printable(text).strip())
    return re.sub(r"^(\d*)([-+#=.)])", r"\1\\\2", line)


def _accuracy(folder: Path) -> list[str]:
    if files.exists(folder / "card.md"):  # the card of a shipped model has more figures
        card = files.read_bytes(folder / "card.md").decode().splitlines()
        return [line for line in card if line[:2] in ("- ", "  ")]  # items and their continuation lines
    if not files.exists(folder / runs.RESULTS):
        return ["- Its accuracy is not known."]
    found = runs.read_results(folder)
    return [
        f"- Test accuracy {100 * found['test_accuracy']:.2f} % on {found['images']:,} images, looked at once."
    ]


def _audited(folder: Path, model: nn.Module) -> list[str]:
    found = find_audit(folder, model)
    if found is None:
        return ["- Not audited by `ecnn audit`: what a strong attack leaves is not known."]
    return [f"- Audited: **{found.verdict}**. {found.reason}"]
