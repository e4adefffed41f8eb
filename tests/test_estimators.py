"""The scikit-learn face: what scikit-learn asks of an estimator, and what ours promise beyond that."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_digits, load_wine, make_blobs
from sklearn.linear_model import LinearRegression, LogisticRegression, Perceptron
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.multiclass import OutputCodeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import check_estimator

import ecnn
from ecnn import files
from ecnn.attacks import PGD
from ecnn.codes import CodeMatrix, load_code
from ecnn.constructions import random_code
from ecnn.errors import DiskError, InputError
from ecnn.estimators import ECNNClassifier, ErrorCorrectingClassifier
from ecnn.estimators.codewords import find_code, mean_distance, softmax
from ecnn.evaluation import evaluate
from ecnn.training import TrainingError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def wine() -> tuple[np.ndarray, np.ndarray]:
    found = load_wine()
    return found.data, found.target_names[found.target]


@pytest.fixture(scope="module")
def fitted(wine: Any) -> ECNNClassifier:
    return ECNNClassifier(epochs=60, random_state=0).fit(*wine)


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    rows, labels = load_digits(return_X_y=True)
    return rows, labels


@pytest.fixture(scope="module")
def fitted_images(digits: Any) -> ECNNClassifier:
    rows, labels = digits
    made = ECNNClassifier(
        image_shape=(1, 8, 8), code_length=10, width=8, epochs=10, batch_size=16, lr=1e-2, random_state=0
    )
    return made.fit(rows[:500], labels[:500])


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator",
    [ECNNClassifier(epochs=20), ErrorCorrectingClassifier(LogisticRegression())],
    ids=lambda estimator: type(estimator).__name__,
)
def test_scikit_learn_has_no_complaint(estimator: Any) -> None:
    found = check_estimator(estimator, on_fail=None, on_skip=None)
    assert [check["check_name"] for check in found if check["status"] not in ("passed", "skipped")] == []
    assert sum(check["status"] == "passed" for check in found) > 40


def test_it_learns_in_a_pipeline_a_search_and_a_cross_validation(wine: Any) -> None:
    rows, labels = wine
    assert cross_val_score(ECNNClassifier(epochs=30, random_state=0), rows, labels, cv=3).min() > 0.9
    steps = make_pipeline(MinMaxScaler(), ECNNClassifier(epochs=10, random_state=0))
    search = GridSearchCV(steps, {"ecnnclassifier__code_length": [3, np.uint8(9)]}, cv=2).fit(rows, labels)
    assert search.best_score_ > 0.9
    assert search.predict(rows[:1])[0] == labels[0]
    assert {len(search.cv_results_["params"]), search.n_features_in_} == {2, 13}


def test_scores_probabilities_and_labels_agree(wine: Any, fitted: ECNNClassifier) -> None:
    rows, labels = wine
    scores, chances = fitted.decision_function(rows), fitted.predict_proba(rows)
    assert scores.dtype == chances.dtype == np.float64
    assert np.array_equal(fitted.classes_[scores.argmax(axis=1)], fitted.predict(rows))
    assert np.allclose(np.log(chances[:, 0] / chances[:, 1]), scores[:, 0] - scores[:, 1])
    assert fitted.score(rows, labels) > 0.95
    assert np.allclose(fitted.predict_proba(rows[3:4])[0], chances[3], atol=1e-12)


def test_the_same_random_state_repeats_and_leaves_torch_alone(wine: Any, fitted: ECNNClassifier) -> None:
    rows, labels = wine
    state = torch.get_rng_state()
    again = clone(fitted).fit(rows, labels)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(again.decision_function(rows), fitted.decision_function(rows))
    other = clone(fitted).set_params(random_state=1).fit(rows, labels)
    assert not np.allclose(other.decision_function(rows), fitted.decision_function(rows))


LABELS = {
    "text": np.array(["ox", "ant", "zebra"]),
    "objects": np.array(["ox", "ant", "zebra"], dtype=object),
    "numbers": np.array([7, -3, 100]),
    "bytes": np.array([7, 3, 255], dtype=np.uint8),
    "floats": np.array([1.0, 2.0, 0.0]),
    "truths": np.array([False, True]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_every_kind_come_back_with_and_without_pickle(kind: str, tmp_path: Path) -> None:
    rows, numbers = make_blobs(60, centers=len(LABELS[kind]), random_state=0)
    labels = LABELS[kind][numbers]
    made = ECNNClassifier(width=8, epochs=100, random_state=0).fit(rows, labels)
    assert made.score(rows, labels) > 0.85
    made.save(tmp_path)
    for again in (ECNNClassifier.load(tmp_path), pickle.loads(pickle.dumps(made))):  # noqa: S301 our own
        assert again.predict(rows).dtype == made.predict(rows).dtype == labels.dtype
        assert np.array_equal(again.predict(rows), made.predict(rows))
        assert np.array_equal(again.decision_function(rows), made.decision_function(rows))
        assert again.get_params() == made.get_params()
        assert again.n_features_in_ == 2


def test_images_are_read_by_a_residual_network_that_can_be_attacked(
    digits: Any, fitted_images: ECNNClassifier, tmp_path: Path
) -> None:
    rows, labels = (part[1000:] for part in digits)
    assert fitted_images.score(rows, labels) > 0.85
    assert float(fitted_images.offset_) == 0
    assert float(fitted_images.scale_) == 16
    fitted_images.save(tmp_path)
    again = ECNNClassifier.load(tmp_path)
    assert np.array_equal(again.predict_proba(rows), fitted_images.predict_proba(rows))
    images = torch.from_numpy(rows[:50] / 16).float().reshape(-1, 1, 8, 8)
    test = ecnn.data.Split(images, torch.from_numpy(labels[:50]))
    attack = PGD(norm="linf", eps=0.3, steps=10, step_size=0.08, on="members")
    found = evaluate(again.network_.float(), test, {"pgd": attack}, limit=None)
    assert found.accuracy["pgd"] < 0.5


def test_a_code_of_ones_own(wine: Any, tmp_path: Path) -> None:
    rows, labels = wine
    ternary = CodeMatrix([[0, 1, 2, 0], [1, 2, 0, 0], [2, 0, 1, 1]], 3)
    made = ECNNClassifier(code=ternary, epochs=20, random_state=0).fit(rows, labels)
    assert made.score(rows, labels) > 0.9
    assert log_loss(labels, made.predict_proba(rows)) < 0.2
    made.save(tmp_path)
    assert ECNNClassifier.load(tmp_path).code == ternary
    with pytest.raises(InputError, match="the code is for 10 classes, but the labels have 3"):
        ECNNClassifier(code="10x30").fit(rows, labels)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"image_shape": (1, 8, 8)}, "images of 1x8x8 have 64 values, but the rows have 13"),
        ({"image_shape": 13}, r"image_shape must be \(channel, height, width\), not 13"),
        ({"image_shape": (1, 13, 1), "pixel_range": (1, 1)}, "pixel_range: white must be a number above 1"),
        (
            {"image_shape": (1, 13, 1), "pixel_range": (0, 1)},
            "reach from 0.13 to 1680, beyond the pixel_range of 0 to 1",
        ),
        ({"code_length": 1}, "3 classes need 3 different codewords"),
        ({"epochs": 0}, "epochs must be a whole number from 1"),
        ({"width": 0}, "width must be a whole number from 1"),
        ({"lr": -1.0}, "lr must be a number above 0"),
        ({"device": "tpu", "image_shape": (1, 13, 1)}, "the device 'tpu' cannot be used"),
        ({"device": "nonsense"}, "the device 'nonsense' cannot be used"),
    ],
)
def test_what_cannot_be_fitted_is_one_sentence(wine: Any, params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ECNNClassifier(**params).fit(*wine)


def test_channels_last_are_refused() -> None:
    """64 values are an image of 8 x 8 x 1 as well as eight channels of 8 x 1, and the second is never meant."""
    with pytest.raises(InputError, match=r"\(8, 8, 1\) has its channels last: transpose the images"):
        ECNNClassifier(image_shape=(8, 8, 1)).fit(np.eye(64)[:6], [0, 1] * 3)


def test_a_damaged_folder_is_one_sentence(fitted: ECNNClassifier, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("sha256", None)
    for change, sentence in (
        ({"version": 9}, "no estimator of this version"),
        ({"params": {"epoch": 3}}, "has no option 'epoch'.*did you mean 'epochs'"),
        ({"classes": {"dtype": "<M8", "labels": [1]}}, "classes must be a list of numbers or of text"),
        ({"classes": {"dtype": "<i8", "labels": [1]}}, "1 classes are named, but the code has 3"),
        ({"n_features_in": 4}, "lacks what rows of 4 features are scaled by"),
        ({"network": None}, "network must be a table"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(InputError, match=sentence):
            ECNNClassifier.load(tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        ECNNClassifier.load(tmp_path / "nothing")


def test_parameters_of_numpy_are_saved(digits: Any, tmp_path: Path) -> None:
    rows, labels = digits[0][:100].astype(np.uint8), digits[1][:100]
    shape = tuple(np.array([1, 8, 8], dtype=np.uint8))
    made = ECNNClassifier(
        image_shape=shape,
        pixel_range=(rows.min(), np.float32(rows.max())),  # type: ignore[arg-type]
        device=torch.device("cpu"),  # type: ignore[arg-type]
        width=np.int64(4),  # type: ignore[arg-type]
        epochs=1,
        random_state=np.int32(0),
    ).fit(rows, labels)
    made.save(tmp_path)
    again = ECNNClassifier.load(tmp_path)
    assert np.array_equal(again.predict_proba(rows), made.predict_proba(rows))
    assert (again.image_shape, again.pixel_range, again.device) == ((1, 8, 8), (0, 16.0), "cpu")


def test_pixels_of_small_types_do_not_overflow(digits: Any) -> None:
    rows, labels = digits[0][:60] * 255 / 16 - 128, digits[1][:60]
    ends: Any = (np.int8(-128), np.int8(127))
    made = ECNNClassifier(image_shape=(1, 8, 8), pixel_range=ends, width=2, epochs=1).fit(rows, labels)
    assert float(made.scale_) == 255
    wide = np.zeros((4, 768))
    shape: Any = tuple(np.array([3, 16, 16], dtype=np.uint8))
    assert ECNNClassifier(image_shape=shape, width=2, epochs=1).fit(wide, [0, 1, 0, 1]).n_features_in_ == 768


def test_a_save_that_fails_leaves_the_one_before(
    fitted: ECNNClassifier, tmp_path: Path, full_disk: Any
) -> None:
    fitted.save(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = clone(fitted).set_params(width=8, epochs=2).fit(*make_blobs(60, centers=4, random_state=0))
    with full_disk(2000), pytest.raises(DiskError, match="cannot write"):
        other.save(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_save_that_was_killed_is_refused_and_can_be_made_again(
    fitted: ECNNClassifier, wine: Any, tmp_path: Path
) -> None:
    other = clone(fitted).set_params(epochs=2).fit(*wine)
    for made, name in ((fitted, "a"), (other, "b")):
        made.save(tmp_path / name)
    for killed, sentence in (("fresh", "cannot read"), ("b", "do not belong together: a save was cut short")):
        (tmp_path / killed).mkdir(exist_ok=True)
        shutil.copy(tmp_path / "a" / "config.json", tmp_path / killed)  # the weights were to follow
        with pytest.raises(InputError, match=sentence):
            ECNNClassifier.load(tmp_path / killed)
        fitted.save(tmp_path / killed)
        assert np.array_equal(
            ECNNClassifier.load(tmp_path / killed).predict(wine[0]), fitted.predict(wine[0])
        )
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config.pop("weights_sha256") == files.file_sum(tmp_path / "a" / "model.safetensors")
    del config["sha256"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))  # as saves of before
    assert ECNNClassifier.load(tmp_path / "a").n_features_in_ == 13


def test_a_run_is_not_replaced_by_an_estimator(fitted: ECNNClassifier, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights of a run")
    with pytest.raises(InputError, match=r"model\.safetensors would be replaced.*choose another folder"):
        fitted.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights of a run"
    for _ in range(2):
        fitted.save(tmp_path / "mine")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(InputError, match="no estimator of this version"):
        ECNNClassifier.load(tmp_path)


def test_probabilities_are_about_as_sure_as_they_may_be() -> None:
    """Sums over members are divided by how many of them differ, or they would be several times too sure."""
    rows, labels = make_blobs(1200, centers=4, cluster_std=2.0, random_state=3)
    parts = train_test_split(rows, labels, random_state=0)
    linear = LogisticRegression().fit(parts[0], parts[2])  # what blobs of one shape are made for
    ours = ECNNClassifier(epochs=30, width=16, random_state=0).fit(parts[0], parts[2])
    undivided = softmax(16 * ours.decision_function(parts[1]))
    losses = [
        log_loss(parts[3], chances)
        for chances in (linear.predict_proba(parts[1]), ours.predict_proba(parts[1]), undivided)
    ]
    assert losses[1] < 1.25 * losses[0]
    assert losses[2] > 3 * losses[0]


def test_two_classes_are_as_sure_as_the_estimator_itself() -> None:
    rows, labels = make_blobs(80, centers=2, cluster_std=3.0, random_state=0)
    alone = LogisticRegression().fit(rows, labels)
    coded = ErrorCorrectingClassifier(LogisticRegression(), code_size=3, random_state=0).fit(rows, labels)
    assert len(coded.estimators_) == 6
    assert np.allclose(coded.predict_proba(rows), alone.predict_proba(rows), atol=1e-6)
    assert np.allclose(coded.decision_function(rows), alone.decision_function(rows), atol=1e-6)


@pytest.mark.parametrize(
    "base", [LogisticRegression(max_iter=200), Perceptron(), DecisionTreeClassifier(random_state=0)]
)
def test_any_binary_estimator_will_do(base: Any, wine: Any) -> None:
    rows, labels = wine
    made = make_pipeline(MinMaxScaler(), ErrorCorrectingClassifier(base, code_size=2, random_state=0))
    assert made.fit(rows, labels).score(rows, labels) > 0.9
    assert np.allclose(made.predict_proba(rows).sum(axis=1), 1)
    assert np.array_equal(made.predict(rows), made.classes_[made.predict_proba(rows).argmax(axis=1)])


def test_the_code_is_as_good_as_the_shipped_one_and_follows_random_state(digits: Any) -> None:
    rows, labels = (part[:300] for part in digits)
    base = DecisionTreeClassifier(max_depth=2, random_state=0)
    first, again, other = (
        ErrorCorrectingClassifier(base, code_size=3, random_state=seed).fit(rows, labels)
        for seed in (0, 0, 1)
    )
    assert first.code_.min_row_distance == load_code("10x30").min_row_distance == 16
    assert first.code_ == again.code_ != other.code_
    assert (
        first.code_book_.shape == OutputCodeClassifier(base, code_size=3).fit(rows, labels).code_book_.shape
    )
    assert mean_distance(first.code_) >= 16


@pytest.mark.parametrize("size", [(2, 1), (3, 2), (3, 4), (6, 9), (60, 90), (300, 24)])
def test_a_code_is_found_for_any_number_of_classes(size: tuple[int, int]) -> None:
    found = find_code(*size)
    assert found.symbols.shape == size
    assert found.min_row_distance >= random_code(*size, seed=0).min_row_distance
    assert find_code(*size) is found


def test_what_cannot_be_coded_is_one_sentence(wine: Any) -> None:
    rows, labels = wine
    for estimator, sentence in (
        (ErrorCorrectingClassifier(LinearRegression()), "must have predict_proba or decision"),
        (ErrorCorrectingClassifier(Perceptron(), code_size=0), "code_size must be a number above 0"),
        (
            ErrorCorrectingClassifier(Perceptron(), code_size=1e308),
            "code_size must be a number above 0 and up to",
        ),
        (
            ErrorCorrectingClassifier(Perceptron(), code_size=0.5),
            r"a code_size of 0\.5 gives 1 members, and 3 classes need 2: use 0\.67 or more",
        ),
        (
            ErrorCorrectingClassifier(Perceptron(), code_size=1000),
            "a code_size of 1000 gives 3000 members for 3 classes, more than the 2048 .* use 682 or less",
        ),
    ):
        with pytest.raises(InputError, match=sentence):
            estimator.fit(rows, labels)
    with pytest.raises(InputError, match="only one class"):
        ErrorCorrectingClassifier(Perceptron()).fit(rows, ["a"] * len(rows))


def test_the_least_code_size_that_is_named_is_taken(wine: Any) -> None:
    assert len(ErrorCorrectingClassifier(Perceptron(), code_size=0.67).fit(*wine).estimators_) == 2


def test_weights_of_rows_need_metadata_routing_and_are_told_so(wine: Any) -> None:
    weights = np.ones(len(wine[0]))
    made = ErrorCorrectingClassifier(Perceptron())
    with pytest.raises(
        InputError, match=r"(?s)sample_weight reaches .*enable_metadata_routing=True\), and set"
    ):
        made.fit(*wine, sample_weight=weights)
    with config_context(enable_metadata_routing=True):
        asked = ErrorCorrectingClassifier(Perceptron().set_fit_request(sample_weight=True))
        assert asked.fit(*wine, sample_weight=weights).score(*wine) > 0.3


def test_a_training_that_diverges_is_an_error(wine: Any) -> None:
    rows, labels = wine
    with pytest.raises(TrainingError, match=r"training diverged: .* Lower lr \(now 1000\)"):
        ECNNClassifier(lr=1000, random_state=0).fit(rows, labels)
    with pytest.raises(InputError, match="feature 1 has values too large to be standardised"):
        ECNNClassifier().fit(rows * np.where(np.arange(13) == 1, 1e307, 1), labels)


def test_rows_without_an_answer_are_an_error(wine: Any, fitted: ECNNClassifier) -> None:
    class Lost(LogisticRegression):  # type: ignore[misc]
        def predict_proba(self, rows: Any) -> np.ndarray:
            return np.full((len(rows), 2), np.nan)

    rows = wine[0].copy()
    rows[3] = 1e308
    lost = ErrorCorrectingClassifier(Lost(max_iter=10)).fit(*wine)
    for made, row in ((fitted, 3), (lost, 0)):
        for ask in (made.predict, made.predict_proba, made.decision_function):
            with pytest.raises(InputError, match=f"row {row} gets scores that are not finite numbers"):
                ask(rows)


def test_designed_codes_beat_random_ones(digits: Any) -> None:
    """A part of benchmarks/estimators.md: every split alone, where random codes of ten tasks are weakest."""
    rows, labels = digits
    leads = []
    for split in range(3):
        parts = train_test_split(rows, labels, train_size=700, stratify=labels, random_state=split)
        rates = [
            kind(DecisionTreeClassifier(random_state=0), code_size=1, random_state=split)
            .fit(parts[0], parts[2])
            .score(parts[1], parts[3])
            for kind in (ErrorCorrectingClassifier, OutputCodeClassifier)
        ]
        leads.append(rates[0] - rates[1])
    assert min(leads) > 0
    assert np.mean(leads) > 0.02
