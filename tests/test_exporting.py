"""Models as files that other programs run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

from ecnn import exporting, files, runs
from ecnn.cli import app
from ecnn.constructions import random_code
from ecnn.decoders import decoders_for
from ecnn.errors import DiskError, InputError
from ecnn.exporting import export_model
from ecnn.hub import export_folder
from ecnn.model import ECNN
from ecnn.pipeline import train_run
from ecnn.predicting import Classifier, load_classifier
from ecnn.spec import Spec

pytestmark = pytest.mark.usefixtures("one_thread")


def test_torch_export_answers_as_the_model_for_any_number_of_images(tmp_path: Path) -> None:
    found = export_model("mnist-tanh16", tmp_path / "digits.pt2")
    assert found.difference is not None
    assert found.difference <= 1e-5
    facts = {"classes.json": ""}
    program = torch.export.load(found.path, extra_files=facts).module()
    names = json.loads(facts["classes.json"])
    assert names == [*"0123456789", *(f"none (codeword {number})" for number in range(10, 16))]
    ours = load_classifier("mnist-tanh16")
    for count in (1, 7):
        images = torch.rand(count, 1, 28, 28)
        scores, distances = program(images)
        assert scores.shape == (count, len(names))
        assert torch.allclose(scores, ours.model(images), atol=1e-5)
        assert torch.allclose(distances, ours.distances(images), atol=1e-5)
    card = found.card.read_text()
    assert "float32 (batch, 1, 28, 28), grey" in card
    assert "99.45 %" in card
    assert "Not audited" in card
    shipped = (runs.zoo_folder("mnist-tanh16") / "card.md").read_text()
    assert "\n- **Much less robust" + shipped.split("\n- **Much less robust")[1].split("\n\n")[0] in card
    assert files.file_sum(found.path) in card
    assert "(batch, 16): 10 classes, and 6 codewords of no class;" in card
    assert "\n15. none (codeword 15)\n" in card
    assert "Images of another size are refused" in card


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


def test_a_model_that_a_format_cannot_hold_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnx")

    class Strange(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            means = images.mean(dim=(2, 3))
            return torch.nextafter(means, means + 1)  # which ONNX does not know

    ours = Classifier(Strange(), ("r", "g", "b"), 3, (4, 4))
    with pytest.raises(
        InputError, match=r"cannot be written as onnx \(.*nextafter.*\): try another --format"
    ):
        exporting._onnx_file(ours)
    assert capfd.readouterr().out == ""


def test_a_file_that_answers_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(classifier: Classifier) -> tuple[bytes, float]:
        model: Any = exporting._Deployed(classifier.model)
        return b"a model", exporting._compare(
            classifier, lambda images: [part + 1e-3 for part in model(images)]
        )

    monkeypatch.setattr(exporting, "_program_file", write)
    done = CliRunner().invoke(app, ["export", "mnist-tanh16", "--out", str(tmp_path / "digits.pt2")])
    assert done.exit_code == 4
    assert "differ from those of the model" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "arity", "decoder"),
    [
        (output, arity, decoder)
        for output, arity in (("logit", 2), ("symbols", 2), ("symbols", 3))
        for decoder in decoders_for(output)
    ],
)
def test_every_decoder_answers_as_the_model_for_any_number_of_images(
    output: Any, arity: int, decoder: str
) -> None:
    """The file is made with two images; none of what it holds may be for two."""
    pytest.importorskip("onnx")
    runtime: Any = pytest.importorskip("onnxruntime")
    code = random_code(5, 7, arity=arity, seed=0)
    model = ECNN(code, in_channels=1, width=2, depth=8, decoder=decoder, member_output=output).eval()
    content, _ = exporting._onnx_file(Classifier(model, tuple("abcde"), 1, (8, 8)))
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for count in (1, 2, 7):
        images = torch.rand(count, 1, 8, 8)
        scores = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
        assert torch.allclose(scores, model(images), atol=1e-4)


def test_an_export_replaces_only_an_export(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs.zoo_folder("mnist-tanh16"), run)
    before = {path: path.read_bytes() for path in run.iterdir()}
    (tmp_path / "README.md").write_text("# My project")
    (tmp_path / "mine.pt2").write_bytes(b"of another program")
    for out, named in (("README", "README.md"), ("mine.pt2", "mine.pt2"), ("run/model.safetensors", "model")):
        with pytest.raises(InputError, match=f"{named}.* would be replaced, but it is not an earlier export"):
            export_model(run, tmp_path / out, format="torchexport")
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    for _ in range(2):
        export_model(run, tmp_path / "m.pt2")


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_full_disk_leaves_the_export_of_before(tmp_path: Path, full_disk: Any, ending: str) -> None:
    if ending == "onnx":
        pytest.importorskip("onnx")
    out = tmp_path / f"m.{ending}"
    with full_disk(2**16), pytest.raises(DiskError, match=f"cannot write .*m.{ending}: File too large"):
        export_model("mnist-tanh16", out)
    assert list(tmp_path.iterdir()) == []
    export_model("mnist-tanh16", out)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with full_disk(2**16), pytest.raises(DiskError, match="cannot write"):
        export_model("mnist-tanh16", out)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_name_that_is_not_utf8_gets_its_card(tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"bad\xff.pt2")
    done = CliRunner().invoke(app, ["export", "mnist-tanh16", "--out", str(out)])
    assert done.exit_code == 0, done.stderr
    assert "`bad?.pt2` (torchexport)" in out.with_name(f"{out.name}.md").read_text()


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
    card = exporting._card("cifar10-resnet20-at", exported, 64 * "0")
    assert "distance" not in card
    assert "`scores`: (batch, 10); a softmax" in card
    assert "detector" not in card
    assert "trained adversarially within 8/255 on `cifar10`" in card
    assert (
        f"{sum(p.numel() for p in runs.load_model('cifar10-resnet20-at').parameters()):,} parameters" in card
    )


def test_the_card_of_a_detector_says_that_the_scores_are_not_all(tmp_path: Path) -> None:
    small = {"model": {"kind": "feature_squeezing", "width": 2, "depth": 8}, "train": {"epochs": 1}}
    train_run(Spec.from_dict({"data": {"name": "digits"}, **small}), out=tmp_path / "run")
    card = export_model(tmp_path / "run", tmp_path / "m.pt2").card.read_text()
    assert "The model also has a detector" in card
    folder = export_folder(tmp_path / "run", tmp_path / "hub", format="huggingface")
    assert "detect(images)" in folder.card.read_text()
    picture = tmp_path / "p.png"
    Image.new("L", (8, 8)).save(picture)
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(picture)])
    assert done.exit_code == 0
    assert "the model's detector was not used" in done.stderr


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("<script>", r"\<script\>"),
        ("**x** `y` [z](w) a_b", r"\*\*x\*\* \`y\` \[z\](w) a\_b"),
        ("two\nlines\x1b", "two?lines?"),
        ("# x", r"\# x"),
        ("- x", r"\- x"),
        ("12. x", r"12\. x"),
        ("stop-sign 2.5", "stop-sign 2.5"),
        ("Füchse \udcff", "Füchse ?"),
    ],
)
def test_names_of_classes_stay_text_in_a_card(name: str, shown: str) -> None:
    ours = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (name, "b"), 1, (2, 2))
    assert exporting.class_lines(ours)[2:5] == [f"0. {shown}", "1. b", ""]
