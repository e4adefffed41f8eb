"""Models as files that other programs run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from ecnn import exporting, files, runs
from ecnn.cli import app
from ecnn.errors import InputError
from ecnn.exporting import export_model
from ecnn.predicting import Classifier, load_classifier

pytestmark = pytest.mark.usefixtures("one_thread")


def test_torch_export_answers_as_the_model_for_any_number_of_images(tmp_path: Path) -> None:
    found = export_model("mnist-tanh16", tmp_path / "digits.pt2")
    assert found.difference is not None
    assert found.difference <= 1e-5
    facts = {"classes.json": ""}
    program = torch.export.load(found.path, extra_files=facts).module()
    assert json.loads(facts["classes.json"]) == list("0123456789")
    ours = load_classifier("mnist-tanh16")
    for count in (1, 7):
        images = torch.rand(count, 1, 28, 28)
        scores, distances = program(images)
        assert torch.allclose(scores, ours.model(images), atol=1e-5)
        assert torch.allclose(distances, ours.distances(images), atol=1e-5)
    card = found.card.read_text()
    assert "float32 (batch, 1, 28, 28), grey" in card
    assert "99.45 %" in card
    assert "Not audited" in card
    assert files.file_sum(found.path) in card
    assert "10 classes and codewords of no class" in card


def test_onnx_answers_as_the_model(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime: Any = pytest.importorskip("onnxruntime")
    words = ["export", "cifar10-ecnn30-q2", "--format", "onnx", "--out", str(tmp_path / "m.bin"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["difference"] <= 1e-5
    session = runtime.InferenceSession((tmp_path / "m.bin").read_bytes())
    kept = session.get_modelmeta().custom_metadata_map
    assert json.loads(kept["classes.json"])[9] == "truck"
    assert json.loads(kept["input.json"]) == {"channels": 3, "size": [32, 32], "range": [0, 1]}
    ours, images = load_classifier("cifar10-ecnn30-q2"), torch.rand(3, 3, 32, 32)
    scores, distances = session.run(None, {"images": images.numpy()})
    expected = ours.model(images).detach()
    assert torch.allclose(torch.from_numpy(scores), expected, atol=1e-5 * float(expected.abs().max()))
    assert torch.allclose(torch.from_numpy(distances), ours.distances(images), atol=1e-4)
    assert "9. truck" in Path(said["card"]).read_text()


def test_a_model_that_a_format_cannot_hold_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")

    class Strange(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            means = images.mean(dim=(2, 3))
            return torch.nextafter(means, means + 1)  # which ONNX does not know

    ours = Classifier(Strange(), ("r", "g", "b"), 3, (4, 4))
    with pytest.raises(
        InputError, match=r"cannot be written as onnx \(.*nextafter.*\): try another --format"
    ):
        exporting._write_onnx(ours, tmp_path / "m.onnx")
    assert capfd.readouterr().out == ""


def test_a_file_that_answers_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(classifier: Classifier, path: Path) -> float:
        path.write_bytes(b"a model")
        model: Any = exporting._Deployed(classifier.model)
        return exporting._compare(classifier, lambda images: [part + 1e-3 for part in model(images)])

    monkeypatch.setattr(exporting, "_write_program", write)
    done = CliRunner().invoke(app, ["export", "mnist-tanh16", "--out", str(tmp_path / "digits.pt2")])
    assert done.exit_code == 4
    assert "answers otherwise than the model" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)  # as if it were not installed
    for out, options, sentence in (
        ("m.onnx", {}, r"needs the package onnx, .* pip install 'ecnn\[export\]'"),
        ("m.zip", {}, r"should end in \.onnx or \.pt2"),
        ("m.onnx", {"format": "onx"}, "format must be onnx or torchexport, not 'onx'; did you mean 'onnx'"),
    ):
        with pytest.raises(InputError, match=sentence):
            export_model("mnist-tanh16", tmp_path / out, **options)
    with pytest.raises(InputError, match="and a model by name must be"):
        export_model("mnist-tanh17", tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_the_card_of_a_plain_network_has_no_distance(tmp_path: Path) -> None:
    exported = exporting.Exported(tmp_path / "plain.pt2", tmp_path / "plain.pt2.md", "torchexport", 0.0)
    exported.path.write_bytes(b"a model")
    card = exporting.model_card("cifar10-resnet20-at", exported)
    assert "distance" not in card
    assert "trained adversarially within 8/255 on `cifar10`" in card
    assert (
        f"{sum(p.numel() for p in runs.load_model('cifar10-resnet20-at').parameters()):,} parameters" in card
    )
