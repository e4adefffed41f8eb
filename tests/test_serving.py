"""A model behind HTTP: what it answers, and what it refuses without falling over."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pictures
import pytest
import schemathesis
import torch
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from PIL import Image, ImageOps
from processes import start
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from torch import Tensor, nn
from toys import TINY, Saturated, images_of_classes, shorten_lessons, tiny_ecnn
from typer.testing import CliRunner

import ecnn
from ecnn.auditing import AuditSummary, load_audit
from ecnn.cli import app
from ecnn.data import load_data
from ecnn.errors import InputError
from ecnn.predicting import Classifier, load_classifier
from ecnn.serving import Limits, Subject, make_app
from ecnn.serving.guard import Guard, is_loopback
from ecnn.serving.server import listen
from ecnn.serving.workers import BatchingWorker, Ended, TimedWorker
from ecnn.spec import attack_options

pytestmark = pytest.mark.usefixtures("one_thread")
HERE = "http://127.0.0.1:8000"
DIGITS = tuple("0123456789")


def png(pixels: np.ndarray, **options: Any) -> bytes:
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, format="PNG", **options)
    return written.getvalue()


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def picture(seed: int = 0, size: tuple[int, ...] = (4, 4)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def saturated(**options: Any) -> Subject:
    """Ten classes, 30 members, 4 x 4 grey pixels, and no training."""
    return Subject(Classifier(Saturated(**options), DIGITS, 1, (4, 4)), "toy", "ecnn", "toys")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    limits = Limits(request_bytes=200_000, pixels=50_000, images=8, attack_steps=50, seconds=20)
    with TestClient(make_app(saturated(scale=2), limits=limits), base_url=HERE) as made:
        yield made


def predict(client: TestClient, *images: Any, **fields: Any) -> Any:
    answer = client.post("/v1/predict", json={"images": list(images), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]


def service(client: TestClient) -> Any:
    app: Any = client.app
    return app.state.service


def refused(answer: httpx2.Response, status: int, words: str) -> None:
    """One sentence, of the right status."""
    assert answer.status_code == status, answer.text
    sentence = answer.json()["error"]
    assert words in sentence, sentence
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence


def test_every_way_to_send_an_image_gives_the_classifiers_own_answer(client: TestClient) -> None:
    pixels = picture()
    classifier = service(client).models["served"].subject.classifier
    expected = classifier.predict(pixels, top=3, reject=1.0)[0]
    by_base64 = predict(client, encoded(png(pixels)), top=3, reject=1.0)[0]
    by_url = predict(client, f"data:image/png;base64,{encoded(png(pixels))}", top=3, reject=1.0)[0]
    by_numbers = predict(client, (pixels / 255).tolist(), top=3, reject=1.0)[0]
    files = {"images": ("a.png", png(pixels), "image/png")}
    by_file = client.post("/v1/predict", files=files, data={"top": "3", "reject": "1.0"}).json()
    for found in (by_base64, by_url, by_numbers, by_file["predictions"][0]):
        assert [guess["name"] for guess in found["guesses"]] == [guess.name for guess in expected.guesses]
        assert found["guesses"][0]["probability"] == pytest.approx(expected.guesses[0].probability, abs=1e-5)
        assert found["distance"] == pytest.approx(expected.distance, abs=1e-4)
        assert found["rejected"] == expected.rejected
        assert found["details"] is found["picture"] is None
    assert by_file["predictions"][0]["image"] == "a.png"
    assert by_base64["image"] == "image 0"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_photo_is_turned_as_its_camera_says_and_only_once(client: TestClient, kind: str) -> None:
    classifier = service(client).models["served"].subject.classifier
    pixels = np.repeat(np.repeat(picture(size=(4, 4)), 8, axis=0), 8, axis=1)  # which a JPEG keeps
    for orientation in range(1, 9):
        exif, written = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(written, format=kind, exif=exif, quality=100)
        (found,) = predict(client, encoded(written.getvalue()), details=True)
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["picture"]))))
        with Image.open(written) as photo:
            upright = ImageOps.exif_transpose(photo)
        expected = np.asarray(upright.convert("L").resize((4, 4), Image.Resampling.BILINEAR))
        assert np.array_equal(shown, expected), orientation
        assert found["guesses"][0]["name"] == classifier.predict(written.getvalue())[0].name


def test_details_say_how_the_answer_comes_about(client: TestClient) -> None:
    images, labels = images_of_classes(1)
    about = client.get("/v1/model").json()
    code = np.array(about["model"]["code"])
    assert code.shape == (10, 30)
    for found, label in zip(
        predict(client, *[image[0].tolist() for image in images[:8]], details=True), labels, strict=False
    ):
        details = found["details"]
        assert np.asarray(Image.open(io.BytesIO(base64.b64decode(found["picture"])))).shape == (4, 4)
        assert sum(details["probabilities"]) == pytest.approx(1)
        assert int(np.argmin(details["distances"])) == int(label)
        assert details["bits"] == code[int(label)].tolist()
        assert all(0.5 <= certainty <= 1 for certainty in details["certainties"])
        # The distance is the expected number of members that contradict the codeword.
        agreed = np.array(details["bits"]) == code[int(label)]
        certainties = np.array(details["certainties"])
        expected = np.where(agreed, 1 - certainties, certainties).sum()
        assert details["distances"][int(label)] == pytest.approx(expected, abs=1e-4)


def test_what_the_model_is(client: TestClient) -> None:
    about = client.get("/v1/model").json()
    model = about["model"]
    assert model["classes"] == list(DIGITS)
    assert model["num_classes"] == 10
    assert (model["in_channels"], model["height"], model["width"]) == (1, 4, 4)
    assert model["audit"] is None
    assert about["compared"] is None
    assert about["limits"]["images"] == 8
    assert {attack["name"] for attack in about["attacks"]} >= {"pgd", "apgd", "fgsm", "square"}
    assert client.get("/healthz").json() == {"status": "ok"}


def test_codewords_of_no_class_are_told_from_classes() -> None:
    subject = Subject(Classifier(tiny_ecnn(1), ("a", "b"), 1, (4, 4)), "two of four")
    model = TestClient(make_app(subject), base_url=HERE).get("/v1/model").json()["model"]
    assert model["num_classes"] == 2
    assert model["classes"] == ["a", "b", "none (codeword 2)", "none (codeword 3)"]


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_an_attack_flips_bits_within_its_ball(client: TestClient, norm: str) -> None:
    image = images_of_classes(1)[0][3]
    eps = {"linf": 0.3, "l2": 0.8, "l1": 2.0}[norm]
    request = {"image": image[0].tolist(), "attack": "pgd", "norm": norm, "eps": eps, "steps": 40, "seed": 1}
    answer = client.post("/v1/attack", json={**request, "on": "members"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["success"]
    assert found["before"]["guesses"][0]["name"] == "3" != found["after"]["guesses"][0]["name"]
    before, after = (found[side]["details"]["bits"] for side in ("before", "after"))
    assert found["flipped"] == [place for place in range(30) if before[place] != after[place]] != []
    assert found[norm] <= eps + 1e-5
    attacked = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["after"]["picture"]))))
    # The PNG is the attacked image in whole 255ths, and what it says of the PNG is what the model says of it.
    assert np.abs(attacked / 255 - image[0].numpy()).max() <= found["linf"] + 0.5 / 255 + 1e-6
    assert predict(client, encoded(png(attacked)))[0]["guesses"][0]["name"] == found["rounded_name"]
    again = client.post("/v1/attack", json={**request, "on": "members"}).json()
    assert again["after"]["picture"] == found["after"]["picture"]  # same seed, same attack


def test_an_attack_that_fails_shows_how_far_it_came(client: TestClient) -> None:
    image = images_of_classes(1)[0][3][0].tolist()
    request = {"image": image, "attack": "pgd", "eps": 0.02, "steps": 5, "on": "members"}
    found = client.post("/v1/attack", json=request).json()
    assert not found["success"]
    assert 0 < found["linf"] <= 0.02 + 1e-6
    for side in ("before", "after"):
        assert found[side]["guesses"][0]["name"] == "3"
    assert found["after"]["distance"] > found["before"]["distance"]
    # The attack is counted, and not that it was run again for the picture.
    assert found["backwards"] == 5
    fgsm = {"image": image, "attack": "fgsm", "eps": 0.02, "on": "members"}
    assert client.post("/v1/attack", json=fgsm).json()["backwards"] == 1


def test_every_attack_that_is_offered_works(client: TestClient) -> None:
    image = png((images_of_classes(1)[0][3][0].numpy() * 255).round().astype(np.uint8))
    for offer in client.get("/v1/model").json()["attacks"]:
        for view in offer["on"] or [None]:
            fields = {"attack": offer["name"], "norm": "l2", "seed": "3"}
            fields |= {"eps": "1/2"} if offer["has_eps"] else {}
            fields |= {"steps": "3"} if offer["has_steps"] else {}
            fields |= {"on": view} if view else {}
            answer = client.post("/v1/attack", files={"image": ("a.png", image)}, data=fields)
            assert answer.status_code == 200, (fields, answer.text)
            assert answer.json()["attack"] == offer["name"]


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_head(width: int, height: int) -> bytes:
    """The beginning of a PNG: its size and no pixels."""
    size = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", size) + png_chunk(b"IDAT", b"")


def big_png(width: int, height: int) -> bytes:
    """A PNG of few bytes that unpacks to that many pixels."""
    rows = zlib.compress(b"\0" * (height * (width + 1)), 9)
    return png_head(width, height) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


EPS_FILE = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
BAD_IMAGES = {
    "empty": b"",
    "text": b"not an image at all",
    "cut short": png(picture(size=(64, 64)))[:200],
    "head only": png(picture())[:30],
    "damaged": png(picture(size=(64, 64)))[:80] + b"\xff" * 100 + png(picture(size=(64, 64)))[180:],
    "bomb": big_png(2000, 2000),
    "postscript": EPS_FILE,
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    "zip": b"PK\x03\x04" + bytes(100),
    "gif of no size": b"GIF89a\0\0\0\0\0\0\0;",
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_a_bad_image_is_refused_and_the_server_keeps_serving(client: TestClient, kind: str) -> None:
    content = BAD_IMAGES[kind]
    good = encoded(png(picture()))
    refused(client.post("/v1/predict", json={"images": [good, encoded(content)]}), 422, "image 1")
    refused(client.post("/v1/predict", files={"images": ("x.png", content)}), 422, "x.png")
    body = {"image": encoded(content), "attack": "fgsm", "eps": 0.1}
    refused(client.post("/v1/attack", json=body), 422, "the image")
    assert predict(client, good)[0]["guesses"]


NEST: list[Any] = []
for _ in range(60):
    NEST = [NEST]


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "at least one"),
        ("abc", "images must be a list"),
        (None, "images must be a list"),
        (["%%%"], "no base64"),
        (["ä" * 10], "no base64"),
        ([5], "outside [0, 1]"),
        ([None], "nested lists"),
        ([True], "nested lists"),
        ([{"pixels": []}], "nested lists"),
        ([[]], "(height, width)"),
        ([[[]]], "(height, width)"),
        ([[[0.1, 0.2], [0.3]]], "equal length"),
        ([[["0.5"]]], "nested lists"),
        ([[[128, 255]]], "divide bytes by 255"),
        ([[[-0.1]]], "outside [0, 1]"),
        ([[[1e300]]], "outside [0, 1]"),
        ([[[10**400]]], "nested lists"),
        ([NEST], "(height, width)"),
        ([np.zeros((5, 4, 5)).tolist()], "channel"),
        ([np.zeros((250, 250), dtype=int).tolist()], "with image 0 the request has more than 50,000 pixels"),
        ([[[0.0]]] * 9, "more images than it may, 8"),
    ],
)
def test_pixels_that_are_none_are_refused(client: TestClient, images: Any, words: str) -> None:
    refused(client.post("/v1/predict", json={"images": images}), 422, words)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"images": [[[NaN]]]}', 400, "not JSON"),
        (b"9" * 10_000, 400, "not JSON"),
        (b"[]", 422, "JSON object"),
        (b"{}", 422, "needs images"),
        (b'{"image": []}', 422, "did you mean 'images'"),
        (b'{"images": ["", 1], "top": 0}', 422, "top must be"),
        (b'{"images": ["", 1], "top": "many"}', 422, "top must be"),
        (b'{"images": ["", 1], "top": 1e400}', 422, "top must be"),
        (b'{"images": ["", 1], "reject": -1}', 422, "reject must be"),
        (b'{"images": ["", 1], "details": 1}', 422, "details must be"),
        (b'{"images": [[[0.5]]], "model": "compared"}', 422, "model must be served"),
    ],
)
def test_a_bad_body_is_refused(client: TestClient, body: bytes, status: int, words: str) -> None:
    headers = {"content-type": "application/json"}
    refused(client.post("/v1/predict", content=body, headers=headers), status, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attack": "pdg"}, "did you mean 'pgd'"),
        ({"attack": None}, "attack must be text"),
        ({"norm": "L2"}, "did you mean 'l2'"),
        ({"on": "member"}, "did you mean 'members'"),
        ({"eps": None}, "the attack pgd needs eps, a radius"),
        ({"eps": 8}, "8/255"),
        ({"eps": "1/0"}, "fraction"),
        ({"eps": -1}, "from 0 up"),
        ({"norm": "l2", "eps": 1e300}, "[0, 1] scale"),
        ({"steps": None}, "needs steps"),
        ({"steps": 51}, "from 1 to 50"),
        ({"steps": 0}, "from 1 to 50"),
        ({"steps": 2.5}, "whole number"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**70}, f"seed must be a whole number of at most {2**63 - 1} in size"),
        ({"steps": 10**30}, "steps must be a whole number of at most"),
        ({"attack": "deepfool"}, "leave eps out"),
        ({"attack": "square", "on": "members"}, "on must be one of scores, linear, tempered for square"),
        ({"attack": "noise", "on": "members"}, "leave on out"),
        ({"attack": "fgsm"}, "one step"),
        ({"image": None}, "needs an image"),
        ({"restarts": 5}, "no option 'restarts'"),
        ({"model": 3}, "model must be text"),
    ],
)
def test_a_bad_attack_is_refused(client: TestClient, changes: dict[str, Any], words: str) -> None:
    request = {"image": [[0.5]], "attack": "pgd", "eps": 0.1, "steps": 3, **changes}
    refused(client.post("/v1/attack", json=request), 422, words)


def test_a_refused_attack_is_told_only_of_what_a_request_can_say(client: TestClient) -> None:
    """Every attack with everything left out, and with everything: no option that only Python has is named."""
    for offer in client.get("/v1/model").json()["attacks"]:
        hidden = set(attack_options(offer["name"])) - {"norm", "eps", "steps", "on", "labels"}
        for fields in ({}, {"steps": 3}, {"eps": 0.1}, {"eps": 0.1, "steps": 3, "on": "members"}):
            answer = client.post("/v1/attack", json={"image": [[0.5]], "attack": offer["name"], **fields})
            if answer.status_code != 200:
                words = set(re.findall(r"\w+", answer.json()["error"]))
                assert not words & hidden, answer.text
                assert "ScoreView" not in words


def test_the_limit_that_is_quoted_is_the_one_in_force(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what earlier images have left of it, and not Pillow's, unless that is the smaller one."""
    sentence = (
        "with image 1 the request has more than 50,000 pixels, and all its images together may have no more"
    )
    large, good = encoded(big_png(200, 200)), encoded(png(picture()))
    refused(client.post("/v1/predict", json={"images": [large, large]}), 422, sentence)
    for size in (10_000, 20_000):  # Pillow warns of the first, and raises an error of the second
        body = {"images": [good, encoded(png_head(size, size))]}
        refused(client.post("/v1/predict", json=body), 422, sentence)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30_000)
    body = {"images": [encoded(png_head(200, 200))]}
    refused(client.post("/v1/predict", json=body), 422, "image 0 has more than 30,000 pixels")


def test_bad_forms_are_refused(client: TestClient) -> None:
    file = ("a.png", png(picture()))
    refused(
        client.post("/v1/predict", data={"images": "text"}, files={"other": file}), 422, "should hold a file"
    )
    for url, right, wrong in (("/v1/predict", "images", "image"), ("/v1/attack", "image", "images")):
        refused(
            client.post(url, files={wrong: file}),
            422,
            f"into the field '{right}' of the form, not into '{wrong}'",
        )
    for count in (9, 10, 70):
        refused(
            client.post("/v1/predict", files=[("images", file)] * count), 422, "more images than it may, 8"
        )
        refused(client.post("/v1/attack", files=[("image", file)] * count), 422, "one image")
    refused(client.post("/v1/attack", files=[("image", file)] * 2), 422, "one image")
    many = {f"field {number}": "1" for number in range(17)}
    refused(client.post("/v1/predict", files=[("images", file)], data=many), 400, "fields")
    twice = {"attack": ["fgsm", "pgd"]}
    refused(client.post("/v1/attack", files=[("image", file)], data=twice), 422, "'attack' twice")
    form = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"", b"--x\r\n", b"--x\r\nContent-Disposition: nonsense\r\n\r\n\r\n--x--", b"\0" * 100):
        answer = client.post("/v1/predict", content=body, headers=form)
        assert answer.status_code in (400, 422), answer.text
    bare = client.post("/v1/predict", content=b"x", headers={"content-type": "multipart/form-data"})
    assert bare.status_code == 400
    refused(
        client.post("/v1/predict", content=b"x", headers={"content-type": "text/plain"}), 415, "text/plain"
    )
    refused(client.get("/v1/nothing"), 404, "Not Found")
    answer = client.get("/v1/predict")
    refused(answer, 405, "Method Not Allowed")
    assert answer.headers["allow"] == "POST"


def test_head_says_what_get_would(client: TestClient) -> None:
    for path in ("/", "/page.js", "/docs", "/healthz", "/v1/model", "/v1/examples", "/openapi.json"):
        asked, told = client.get(path), client.head(path)
        assert (told.status_code, told.content) == (200, b""), path
        for name in ("content-type", "content-length"):
            assert told.headers[name] == asked.headers[name]
    assert client.head("/v1/predict").status_code == 405
    assert client.head("/v1/nothing").status_code == 404
    assert client.head("/healthz", headers={"host": "evil.example"}).status_code == 403


def test_a_body_too_large_is_refused_whether_it_says_so_or_not(client: TestClient) -> None:
    for size in (200_001, 300_000, 10**7):
        body = b"x" * size
        headers = {"content-type": "application/json"}
        refused(client.post("/v1/predict", content=body, headers=headers), 413, "200,000 bytes")

        def chunks(body: bytes = body) -> Iterator[bytes]:
            yield from (body[start : start + 4096] for start in range(0, len(body), 4096))

        refused(client.post("/v1/predict", content=chunks(), headers=headers), 413, "200,000 bytes")
    assert predict(client, [[0.5]])


def through_guard(receive: Any, **limits: float) -> list[Any]:
    """What a guard with these limits sends to a request whose body comes from `receive`."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the request reached the application")

    async def send(message: Any) -> None:
        sent.append(message)

    guard = Guard(app, limits=Limits(**limits), only_local=True, slots={"/": 1})  # type: ignore[arg-type]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")]}
    asyncio.run(guard(scope, receive, send))
    assert guard.under_way["/"] == 0
    return sent


def test_a_body_that_never_comes_or_breaks_off() -> None:
    async def never() -> Any:
        await asyncio.sleep(60)

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    start, body = through_guard(never, upload_seconds=0.05)
    assert start["status"] == 408
    assert (b"connection", b"close") in start["headers"]
    assert "did not arrive within 0.05 seconds" in body["body"].decode()
    assert through_guard(gone)[0]["status"] == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost@evil.example"},
        {"host": ""},
        {"host": "[::1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9000"},
        {"origin": "http://127.0.0.1:8000@evil.example"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    ],
)
def test_other_sites_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    for answer in (
        client.get("/v1/model", headers=headers),
        client.post("/v1/predict", json={"images": [[[0.5]]]}, headers=headers),
    ):
        assert answer.status_code == 403
        assert answer.json()["error"]


def test_this_site_is_served(client: TestClient) -> None:
    for headers in (
        {"host": "localhost:8000"},
        {"host": "[::1]:8000"},
        {"host": "127.9.9.9"},
        {"origin": HERE},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},  # a link from elsewhere
    ):
        assert client.get("/v1/model", headers=headers).status_code == 200, headers
    answer = client.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers
    everywhere = TestClient(make_app(saturated(), only_local=False), base_url="http://model.example")
    assert everywhere.get("/healthz").status_code == 200
    assert everywhere.get("/healthz", headers={"origin": "http://evil.example"}).status_code == 403


def test_what_a_loopback_address_is() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "127.0.0.1.x")))  # noqa: S104


class Gate(nn.Module):
    """A model that waits until it is let through, and counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.entered, self.batches = threading.Event(), threading.Event(), list[int]()
        self.open.set()

    def __deepcopy__(self, memo: Any) -> Gate:
        return self

    def forward(self, images: Tensor) -> Tensor:
        self.entered.set()
        assert self.open.wait(20)
        self.batches.append(len(images))
        return images.flatten(1)[:, :3]


def gate() -> Subject:
    return Subject(Classifier(Gate(), ("a", "b", "c"), 1, (2, 2)), "gate")


def wait_until(is_true: Any) -> None:
    end = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_requests_that_wait_go_through_the_model_together() -> None:
    """Thirty at once: one pass for the first, one for all that came meanwhile; each gets its own answer."""
    subject = gate()
    model: Any = subject.classifier.model
    with TestClient(make_app(subject), base_url=HERE) as client:
        model.open.clear()
        model.entered.clear()
        model.batches.clear()
        images = [[[float(number % 3 == column) for column in range(2)]] * 2 for number in range(30)]
        with ThreadPoolExecutor(30) as pool:
            first = pool.submit(predict, client, images[0])
            batches = service(client).models["served"].batches
            assert model.entered.wait(10)
            rest = [pool.submit(predict, client, image) for image in images[1:]]
            wait_until(lambda: batches._queue.qsize() >= 29)
            model.open.set()
            names = [work.result()[0]["guesses"][0]["name"] for work in (first, *rest)]
        assert names == ["aba"[number % 3] for number in range(30)]
        assert model.batches == [1, 29]


def test_too_many_at_once_are_told_to_come_again() -> None:
    subject = gate()
    model: Any = subject.classifier.model
    limits = Limits(requests=2, attacks=1, seconds=5)
    with TestClient(make_app(subject, limits=limits), base_url=HERE) as client:
        model.open.clear()
        model.entered.clear()
        batches = service(client).models["served"].batches
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(predict, client, [[0.5]])]
            assert model.entered.wait(10)
            waiting.append(pool.submit(predict, client, [[0.5]]))
            wait_until(lambda: batches._queue.qsize() == 1)
            answer = client.post("/v1/predict", json={"images": [[[0.5]]]})
            refused(answer, 429, "2 such requests")
            assert answer.headers["retry-after"] == "1"
            assert client.get("/healthz").status_code == 200  # which needs no model
            model.open.set()
            assert all(work.result() for work in waiting)
        assert predict(client, [[0.5]])


def test_what_takes_too_long_is_ended() -> None:
    """Both by the clock of the request and inside of the attack; afterwards the next one is served."""
    subject = gate()
    model: Any = subject.classifier.model
    with TestClient(make_app(subject, limits=Limits(seconds=0.3)), base_url=HERE) as client:
        model.open.clear()
        answer = client.post("/v1/predict", json={"images": [[[0.5]]]})
        refused(answer, 503, "0.3 seconds")
        assert answer.headers["retry-after"] == "1"
        model.open.set()
        assert predict(client, [[0.5]])
    slow = saturated()
    limits = Limits(seconds=0.5, attack_steps=10**9)
    with TestClient(make_app(slow, limits=limits), base_url=HERE) as client:
        request = {"image": [[0.5]], "attack": "noise", "eps": 0.0, "steps": 10**9}
        start = time.monotonic()
        assert client.post("/v1/attack", json=request).status_code == 503
        assert (
            client.post("/v1/attack", json={**request, "steps": 2}).status_code == 200
        )  # the thread is free
        assert time.monotonic() - start < 5


def test_a_worker_outlives_its_work() -> None:
    class Broken(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            if float(images.sum()) > 1:
                raise RuntimeError("no")
            return images.flatten(1)

    worker = BatchingWorker(Broken(), 8)
    with pytest.raises(RuntimeError, match="no"):
        worker.submit(torch.ones(1, 1, 2, 2)).result(10)
    cancelled = worker.submit(torch.zeros(1, 1, 2, 2))
    assert cancelled.cancel() or cancelled.done()
    assert len(worker.submit(torch.zeros(2, 1, 2, 2)).result(10).scores) == 2
    worker.close()
    assert not worker.is_alive
    with pytest.raises(Ended):
        worker.submit(torch.zeros(1, 1, 2, 2)).result(10)


def test_a_model_that_fails_is_a_fault_and_the_server_keeps_serving() -> None:
    subject = gate()
    model: Any = subject.classifier.model
    with TestClient(make_app(subject), base_url=HERE, raise_server_exceptions=False) as client:
        model.open = None
        answer = client.post("/v1/predict", json={"images": [[[0.5]]]})
        refused(answer, 500, "AttributeError")
        assert client.get("/healthz").status_code == 200


class NoNumber(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return torch.log(images.flatten(1)[:, :3] - 0.5)  # infinite, or not a number


def test_scores_that_are_no_numbers_are_said_to_be_so() -> None:
    subject = Subject(Classifier(NoNumber(), ("a", "b", "c"), 1, (2, 2)), "broken")
    with TestClient(make_app(subject), base_url=HERE) as client:
        found = predict(client, [[0.2, 0.2], [0.2, 0.2]], [[0.5, 0.7], [0.6, 0.5]], details=True)
        assert "not a number" in found[0]["error"]
        assert found[1]["guesses"][0]["name"] == "b"
        refused(client.post("/v1/predict", json={"images": [[[0.5]]], "reject": 1}), 422, "no codewords")


def test_models_that_differ_are_not_compared() -> None:
    other = Subject(Classifier(tiny_ecnn(1), ("a", "b", "c", "d"), 1, (4, 4)), "other")
    with pytest.raises(InputError, match="other cannot be compared with toy: its class_names"):
        make_app(saturated(), compare=other)
    with pytest.raises(InputError, match="4 scores for 5 classes"):
        Subject(Classifier(tiny_ecnn(1), tuple("abcde"), 1, (4, 4)), "other")


def test_limits_are_checked() -> None:
    for name, value in (("images", 0), ("seconds", 0), ("pixels", 1.5), ("attacks", True)):
        with pytest.raises(InputError, match=f"limits.{name}"):
            Limits(**{name: value})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ECNN with an audit beside it, and a plain network, both trained on digits in seconds."""
    folder = tmp_path_factory.mktemp("runs")
    for kind, epochs in (("ecnn", 6), ("resnet", 1)):
        words = (
            f"train --data digits --model {kind} --epochs {epochs} --set model.width=4 --set model.depth=8"
        )
        done = CliRunner().invoke(app, [*words.split(), "--out", str(folder / kind)])
        assert done.exit_code == 0, done.output
    data = load_data("digits")
    model = ecnn.load_model(folder / "ecnn")
    with pytest.MonkeyPatch.context() as patch:
        shorten_lessons(patch)
        ecnn.audit(model, data.test, norm="linf", eps=0.1, limit=4, budget=TINY, run_dir=folder / "ecnn")
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """Where `ecnn serve` serves both."""
    with served(str(runs / "ecnn"), str(runs / "resnet")) as found:
        yield found


@contextlib.contextmanager
def served(run: str, rival: str, *options: str) -> Iterator[str]:
    """The address at which the command serves a run beside another."""
    process = start("serve", run, "--compare", rival, "--port", "0", *options)
    said = process.first_line()
    found = re.search(r"at (http://127\.0\.0\.1:\d+) ", said)
    assert found, said
    yield found[1]
    process.interrupt()
    done = process.wait()
    assert done.returncode == 130
    assert done.stderr == f"{said}\necnn: interrupted.\n"


def test_the_command_serves_a_run_its_audit_and_its_rival(address: str, runs: Path) -> None:
    about = httpx2.get(f"{address}/v1/model").json()
    assert about["model"]["kind"] == "ecnn"
    assert about["compared"]["kind"] == "resnet"
    assert about["compared"]["code"] is None
    saved = load_audit(runs / "ecnn")
    said, held = about["model"]["audit"], saved.to_dict()
    for field in dataclasses.fields(AuditSummary):
        assert said[field.name] == held[field.name]
    assert said["headline"] == saved.headline
    examples = httpx2.get(f"{address}/v1/examples").json()["examples"]
    assert [example["label"] for example in examples] == [*range(10)] * 2
    test = load_data("digits").test
    first = int((test.labels == 0).nonzero()[0])
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(examples[0]["image"]))))
    assert np.array_equal(shown, test.images[first, 0].numpy())
    for name in ("served", "compared"):
        run = runs / {"served": "ecnn", "compared": "resnet"}[name]
        body = {"images": [example["image"] for example in examples], "model": name, "details": True}
        found = httpx2.post(f"{address}/v1/predict", json=body).json()["predictions"]
        expected = load_classifier(run).predict([base64.b64decode(example["image"]) for example in examples])
        assert [entry["guesses"][0]["name"] for entry in found] == [entry.name for entry in expected]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_an_attack_and_the_server(runs: Path, times: int) -> None:
    """In a process of its own, because one that ends with a thread at work can abort."""
    words = f"-m ecnn serve {runs / 'ecnn'} --port 0 --set limits.attack_steps=100000".split()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may be deaf to it
    try:
        process = subprocess.Popen(
            [sys.executable, *words], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    said = process.stderr.readline()
    address = re.findall(r"http://[\d.:]+", said)[0]
    image = httpx2.get(f"{address}/v1/examples").json()["examples"][0]["image"]
    request = {"image": image, "attack": "apgd", "eps": 0.0001, "steps": 100_000}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx2.post, f"{address}/v1/attack", json=request, timeout=60)
        time.sleep(1)
        assert not answer.done()
        begin = time.monotonic()
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        refused(answer.result(), 503, "the server is ending")
    assert process.communicate()[1] == "ecnn: interrupted.\n"
    assert process.returncode == 130
    assert time.monotonic() - begin < 20  # the attack takes minutes


def test_a_request_that_is_cancelled_is_told_so() -> None:
    """As uvicorn does with one that is still being sent when the server ends."""

    async def cancelled() -> Any:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(60)

    start, body = through_guard(cancelled)
    assert start["status"] == 503
    assert json.loads(body["body"]) == {"error": "the server is ending."}


def test_work_that_waits_when_the_server_ends_is_not_done() -> None:
    subject = gate()
    model: Any = subject.classifier.model
    worker = TimedWorker(model)
    model.open.clear()
    model.entered.clear()
    far = time.monotonic() + 60
    works = [worker.run_until(far, lambda model: model(torch.zeros(1, 1, 2, 2)) * 0) for _ in range(2)]
    assert model.entered.wait(10)
    worker.end()
    model.open.set()
    assert float(works[0].result(10).sum()) == 0  # which had called its last module
    with pytest.raises(Ended):
        works[1].result(10)
    worker.close()


def raw(address: str, content: bytes, *, seconds: float = 5) -> bytes:
    """What a server says to bytes that no client would send; it may also hang up."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        found = b""
        with contextlib.suppress(OSError):  # it hangs up as soon as it has seen enough
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                found += part
        return found


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 50_000,
        b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
        b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/model HTTP/1.0\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ],
)
def test_broken_http_breaks_nothing(address: str, content: bytes) -> None:
    answer = raw(address, content)
    assert not answer or answer.split(b" ", 2)[1].startswith(b"4"), answer[:200]
    assert not answer or json.loads(answer.partition(b"\r\n\r\n")[2])["error"].endswith(".")
    assert httpx2.get(f"{address}/healthz").status_code == 200


@contextlib.contextmanager
def connected(address: str, content: bytes = b"") -> Iterator[socket.socket]:
    """A connection over which this was sent."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(content)
        yield connection


def told(connection: socket.socket) -> bytes:
    """The next answer, to the end of its JSON."""
    found = b""
    while not found.endswith(b"}"):
        found += connection.recv(65536)
    return found


def test_broken_http_after_the_answer_is_hung_up_on(address: str) -> None:
    """The server's standard error stays empty (`served` looks): nothing is sent after an answer."""
    head = b"POST /v1/model HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(address, head) as connection:
        assert told(connection).startswith(b"HTTP/1.1 405")
        connection.sendall(b"zz\r\n")
        assert connection.recv(65536) == b""


def test_connections_that_say_nothing_shut_nobody_out_for_long(runs: Path) -> None:
    """Silent ones and one that never ends its head are closed; one that asks now and then, in pieces, is not."""
    half, rest = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", b"\r\n"
    with contextlib.ExitStack() as stack:
        options = ("--set", "limits.connections=4")
        narrow = stack.enter_context(served(str(runs / "ecnn"), str(runs / "resnet"), *options))
        start = time.monotonic()
        silent = [stack.enter_context(connected(narrow)) for _ in range(2)]
        slow, patient = (stack.enter_context(connected(narrow, half)) for _ in range(2))
        time.sleep(0.2)
        answer = httpx2.get(f"{narrow}/healthz")
        refused(answer, 503, "4 connections")
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["connection"] == "close"
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < 9:
                patient.sendall(rest)
                assert told(patient).startswith(b"HTTP/1.1 200")
                time.sleep(0.3)
                patient.sendall(half)
                slow.sendall(b"X: y\r\n")
        assert 4 < time.monotonic() - start < 9
        assert [connection.recv(100) for connection in silent] == [b"", b""]
        assert httpx2.get(f"{narrow}/healthz").status_code == 200


def test_a_bad_form_leaves_no_line_on_standard_error(address: str) -> None:
    """Which `served` sees to; the one who sent it is told."""
    form = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"--x\r\nContent\r\n", b"--y\r\n", b"\0" * 100):
        refused(httpx2.post(f"{address}/v1/predict", content=body, headers=form), 400, "")
    bare = {"content-type": "multipart/form-data"}
    refused(httpx2.post(f"{address}/v1/predict", content=b"x", headers=bare), 400, "boundary")


def test_a_body_without_an_end_is_cut_off(address: str) -> None:
    """Chunk after chunk, with no length given: the server stops reading when it has seen enough."""
    host, port = address.removeprefix("http://").split(":")
    head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 200 * 2**20:
                connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                sent += 65536
        assert sent < 64 * 2**20
    assert httpx2.get(f"{address}/healthz").status_code == 200


def test_what_it_says_of_itself_is_what_it_does(address: str) -> None:
    """Requests drawn from the schema, and ones that break it: every answer is one that the schema announces."""
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    seen: set[tuple[str, int]] = set()
    for found in schema.get_all_operations():
        operation: Any = found.ok()  # type: ignore[union-attr]
        has_body = bool(operation.body)
        for mode in [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * has_body:

            @settings(
                max_examples=8 if has_body else 2,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
                database=None,
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                # A text that the schema allows need not be an image.
                answer = case.call_and_validate(excluded_checks=[positive_data_acceptance])
                seen.add((case.path, answer.status_code))

            ask()
    assert {("/v1/model", 200), ("/v1/predict", 422), ("/v1/attack", 422)} <= seen


@contextlib.contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """The page, ready, in a window of its own; it must complain of nothing and load nothing from elsewhere."""
    options = {"viewport": {"width": 1100, "height": 900}, **options}
    context = browser.new_context(**options)
    page, complaints, asked = context.new_page(), list[str](), list[str]()
    page.set_default_timeout(15_000)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_selector("#code tbody tr.decoded")
    yield page
    context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith((f"{address}/", "data:"))] == []


def is_about(response: Any, what: str) -> bool:
    """Whether a response is that of the served model, and not of the one beside it."""
    return bool(response.url.endswith(f"/v1/{what}") and response.request.post_data_json["model"] == "served")


def attacked(page: Any) -> Any:
    """What the server answers to a click on Attack, once the page shows it."""
    with page.expect_response(lambda response: is_about(response, "attack")) as caught:
        page.click("#go")
    page.wait_for_selector("#undo:not([disabled])")
    return caught.value.json()


def drawn_bits(page: Any, row: str) -> list[int]:
    """The bits of a row of the table, as they are drawn."""
    return [int("one" in name) for name in page.eval_on_selector_all(f"{row} rect", _CLASSES)]


_CLASSES = "found => found.map(rect => rect.getAttribute('class').split(' '))"


@pytest.mark.browser
def test_draw_attack_see_bits_flip_and_read_the_verdict(address: str, runs: Path, browser: Any) -> None:
    with opened(browser, address) as page:
        page.click("#tab-draw")
        box = page.locator("#canvas").bounding_box()
        across, down, side = box["x"] + box["width"] / 2, box["y"], box["height"]
        with page.expect_response(lambda response: is_about(response, "predict")) as caught:
            page.mouse.move(across, down + 0.15 * side)
            page.mouse.down()
            page.mouse.move(across, down + 0.85 * side, steps=8)
            page.mouse.up()
        drawn = caught.value.json()["predictions"][0]
        seen = np.asarray(Image.open(io.BytesIO(base64.b64decode(drawn["picture"]))))
        assert seen.shape == (8, 8)
        assert seen[:, 3:5].mean() > 150 > 20 > seen[:, :2].mean()  # an upright stroke
        page.wait_for_function(
            "name => document.querySelector('#class-before').textContent.startsWith(name)",
            arg=drawn["guesses"][0]["name"],
        )
        assert drawn_bits(page, "#code tr.said") == drawn["details"]["bits"]
        page.fill("#eps-number", "0.4")
        found = attacked(page)
        assert (found["attack"], found["on"], found["eps"], found["norm"]) == ("pgd", "members", 0.4, "linf")
        assert drawn_bits(page, "#code tr.said.last") == found["after"]["details"]["bits"]
        assert page.locator("#code tr.said.last rect.changed").count() == len(found["flipped"]) > 0
        assert f"{len(found['flipped'])} of 30 members changed" in page.inner_text("#outcome")
        label = found["after"]["guesses"][0]["label"]
        assert page.get_attribute("#code tr.decoded", "data-label") == str(label)
        distance = found["after"]["details"]["distances"][label]
        assert page.inner_text("#code tr.decoded td.distance") == f"{distance:.1f}"
        faint = page.locator("#code tr.decoded rect.faint").count()
        code = httpx2.get(f"{address}/v1/model").json()["model"]["code"]
        assert faint == sum(
            a != b for a, b in zip(code[label], found["after"]["details"]["bits"], strict=True)
        )
        audit = load_audit(runs / "ecnn")
        assert page.inner_text("#audit-headline").lower() == audit.headline.lower()
        assert page.inner_text("#audit-reason") == audit.reason
        rows = page.locator("#compare tbody tr")
        assert rows.count() == 2
        assert "resnet" in rows.nth(1).inner_text()
        page.select_option("#attack", "deepfool")  # which has no ball
        assert page.is_hidden("#eps-number")
        assert page.is_visible("#steps")
        page.select_option("#attack", "fgsm")
        assert page.is_visible("#eps-number")
        assert page.is_hidden("#steps")
        page.click("#undo")
        page.wait_for_selector("#undo[disabled]")
        assert page.locator("rect.changed").count() == 1  # of the legend


@pytest.mark.browser
def test_a_radius_that_is_none_is_not_taken_for_zero(address: str, browser: Any) -> None:
    with opened(browser, address) as page:
        attacks = list[str]()
        page.on("request", lambda asked: attacks.append(asked.url) if "attack" in asked.url else None)
        before = page.inner_text("#outcome")
        for keys, problem in (("", "valueMissing"), ("1e", "badInput"), ("-1", "rangeUnderflow")):
            page.fill("#eps-number", "")
            page.type("#eps-number", keys)
            page.click("#go")
            assert page.evaluate("name => document.querySelector('#eps-number').validity[name]", problem)
            assert page.evaluate("document.activeElement.id") == "eps-number"  # where the browser says why
        assert page.inner_text("#outcome") == before
        assert attacks == []
        page.fill("#eps-number", "0.12345")
        assert page.input_value("#eps") == "0.12345"
        assert attacked(page)["eps"] == 0.12345
        page.select_option("#attack", "fgsm")
        page.fill("#eps-number", "0.001")
        attacked(page)
        assert "FGSM fails after 1 gradient:" in page.inner_text("#outcome")
        page.fill("#eps-number", "")
        page.select_option("#attack", "deepfool")  # which has no radius that could be missing
        assert attacked(page)["eps"] is None


@pytest.mark.browser
def test_the_page_counts_classes_and_shows_the_winner_whatever_the_decoder(
    address: str, browser: Any
) -> None:
    """Of 16 codewords 10 have a class, and the most probable class is not the one of the nearest codeword."""
    about = httpx2.get(f"{address}/v1/model").json()
    code = [[label >> place & 1 for place in range(4)] for label in range(16)]
    names = [*DIGITS, *(f"none (codeword {label})" for label in range(10, 16))]
    about["model"] |= {"code": code, "classes": names, "num_classes": 10}
    about["compared"] = None
    probabilities = [0.2 / 15] * 15 + [0.8]
    details = {
        "probabilities": probabilities,
        "bits": [0] * 4,
        "certainties": [1.0] * 4,
        "distances": [*range(16)],
    }
    winner = {"label": 15, "name": names[15], "probability": 0.8}
    answer = {"guesses": [winner], "error": None, "picture": None, "details": details}
    context = browser.new_context()
    page = context.new_page()
    page.route("**/v1/model", lambda route: route.fulfill(json=about))
    page.route("**/v1/predict", lambda route: route.fulfill(json={"predictions": [answer]}))
    page.goto(address)
    assert page.get_attribute("#code tr.decoded", "data-label") == "15"
    assert page.inner_text("#code tr.decoded th") == "codeword 15"
    assert page.locator("#code tr[data-label]").count() == 12
    assert "10 classes, 16 codewords, 4 members" in page.inner_text("#facts")
    text = page.inner_text("#code-text")
    assert "highest probability wins" in text
    assert "12 most probable of 16" in text
    assert "nearest" not in text
    context.close()


@pytest.mark.browser
def test_a_picture_of_the_page_is_taken(browser: Any, request: pytest.FixtureRequest) -> None:
    """That of the README is one of these: an example attacked, its bits, the rival, the audit."""
    with contextlib.ExitStack() as stack:
        if pictures.DEMO:
            address = stack.enter_context(served(f"{pictures.DEMO}/ecnn", f"{pictures.DEMO}/plain"))
        else:
            address = request.getfixturevalue("address")
        window = {"viewport": {"width": 1120, "height": 880}, "color_scheme": "light"}
        page = stack.enter_context(opened(browser, address, **window))
        page.locator("#examples button").nth(8).click()
        page.fill("#eps-number", "0.12")
        page.wait_for_selector("#go:not([disabled])")
        attacked(page)
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(500)  # bars grow to their length
        taken = pictures.keep("page.png", page.screenshot(full_page=True))
    pictures.check(taken)


@pytest.mark.browser
def test_the_page_works_by_keyboard(address: str, browser: Any) -> None:
    with opened(browser, address) as page:
        focus = "document.activeElement.id || document.activeElement.textContent"
        page.keyboard.press("Tab")
        assert page.evaluate(focus) == "Skip to the results"
        while page.evaluate(focus) != "tab-examples":
            page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("ArrowRight")
        assert page.evaluate(focus) == "tab-draw"
        page.keyboard.press("Tab")
        assert page.evaluate(focus) == "canvas"
        before = page.get_attribute("#image-before", "src")
        for _ in range(4):
            page.keyboard.press("Shift+ArrowDown")
        page.wait_for_function("before => document.querySelector('#image-before').src !== before", arg=before)
        while page.evaluate(focus) != "go":
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("#undo:not([disabled])")
        assert "PGD" in page.inner_text("#outcome")
        assert page.get_attribute("#outcome", "aria-live") == "polite"


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(address: str, browser: Any, scheme: str) -> None:
    phone = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "color_scheme": scheme}
    with opened(browser, address, **phone) as page:
        page.tap("#tab-draw")
        before = page.get_attribute("#image-before", "src")
        page.tap("#canvas")
        page.wait_for_function("before => document.querySelector('#image-before').src !== before", arg=before)
        attacked(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        small = page.eval_on_selector_all(
            "button, select, input, a",
            "all => all.filter(one => one.offsetParent && one.offsetHeight < 18).length",
        )
        assert small == 0
        ground, ink = (
            sum(map(int, re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{name}"))[:3]))
            for name in ("backgroundColor", "color")
        )
        assert (ground > ink) == (scheme == "light")
        assert abs(ground - ink) > 500


@pytest.mark.browser
def test_a_bad_upload_is_explained_and_a_good_one_works(address: str, browser: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(png(picture(size=(64, 64)))[:200])
    (tmp_path / "good.png").write_bytes(png(picture(size=(20, 30, 3))))
    with opened(browser, address) as page:
        page.click("#tab-upload")
        page.set_input_files("#file", tmp_path / "good.png")
        page.wait_for_function("document.querySelector('#image-before').naturalWidth === 8")
        assert page.locator("#problem").is_hidden()
    context = browser.new_context()  # a refusal is a line on the console of every browser
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#code tbody tr.decoded")
    page.click("#tab-upload")
    page.set_input_files("#file", tmp_path / "bad.png")
    page.wait_for_selector("#problem:not([hidden])")
    assert "image 0 cannot be read" in page.inner_text("#problem")
    assert page.is_disabled("#go")
    page.set_input_files("#file", tmp_path / "good.png")
    page.wait_for_selector("#problem", state="hidden")
    page.wait_for_selector("#go:not([disabled])")
    page.goto(f"{address}/docs")
    page.wait_for_selector("section.card")
    assert "POST /v1/attack" in page.inner_text("main")
    context.close()


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Every connection sends at once: asyncio sees to it, if the socket says that it is TCP."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.proto == socket.IPPROTO_TCP


def test_a_port_that_is_taken_and_a_host_that_lets_others_in(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(runs / "ecnn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = CliRunner().invoke(app, ["serve", run, "--port", str(taken.getsockname()[1])])
        assert done.exit_code == 2
        assert "cannot be listened at" in done.stderr
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    done = CliRunner().invoke(app, ["serve", run, "--host", "0.0.0.0", "--port", "0"])  # noqa: S104
    assert "other machines can use the model" in done.stderr
    done = CliRunner().invoke(app, ["serve", run, "--port", "0"])
    assert "other machines" not in done.stderr


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ecnn.serving.app")
    monkeypatch.delattr("ecnn.serving.app")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(InputError, match=r'pip install "ecnn\[serve\]"'):
        make_app(saturated())


def test_the_benchmark_asks_a_server(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    benchmark: Any = importlib.import_module("serving")
    host, port = address.removeprefix("http://").split(":")
    found = benchmark.measure((host, int(port), os.getpid()), 4, 0.5)
    assert found["per_second"] > 1
    assert 0 < found["median_ms"] <= found["p95_ms"]
    row = {"model": "m", "clients": 4, "batched": found, "single": found, "ratio": 1.0}
    assert "| m | 4 |" in benchmark.markdown([row], "a machine")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_commands_and_limits_of_the_docs_are_true(address: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()
    for name in ("3", "8"):
        (tmp_path / f"{name}.png").write_bytes(png(picture(int(name), (8, 8))))
    lines = re.findall(r"^curl .*$", page, re.M)
    assert len(lines) == 5
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line.replace("curl ", "curl -sS ").replace("http://127.0.0.1:8000", address)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "error" not in json.loads(done.stdout), (line, done.stdout)
    told = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.M))
    assert {name: float(value) for name, value in told.items()} == vars(Limits())
