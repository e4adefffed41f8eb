"""`ECNNClassifier`: an error-correcting network as a scikit-learn estimator, for feature vectors and for images."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from ecnn import files
from ecnn.asking import eval_mode, in_usual_state
from ecnn.backbones import DENSE, MOST_OF_ANYTHING
from ecnn.checks import check_count, check_entries, check_number, check_options, plain, shown
from ecnn.codes import CodeMatrix, load_code
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.estimators.codewords import (
    ScoringMixin,
    check_several_classes,
    checked_scores,
    find_code,
    mean_distance,
)
from ecnn.models import build_model, describe_model, objective_of, rebuild_model, resolve_recipe
from ecnn.recipes import Recipe, auto_recipe
from ecnn.runs import find_device
from ecnn.training import TrainingError, fit
from ecnn.training.checkpoints import load_model_tensors
from ecnn.training.engine import parameter_groups

FORMAT, VERSION = "ecnn-estimator", 1
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_NETWORK = "network."
_BATCH = 1024
_LENGTH = 30


class ECNNClassifier(ScoringMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """An error-correcting network with the interface of scikit-learn.

    Rows are feature vectors, which are standardised and read by two dense layers; or, with `image_shape`, flattened
    images, which are read by a residual network. Predictions are computed in float64 on the CPU.

    Args:
        code: a `CodeMatrix`, the name of a shipped code, or the path of a code file. None takes a shipped code for the
            number of classes, or designs one.
        code_length: number of members if `code` is None; None for 30.
        image_shape: (channel, height, width) of the images that rows hold; None for feature vectors.
        pixel_range: values of black and white; None takes the smallest and largest value in the training images.
        width: units of a dense layer (64 if None), or channels of the residual network's first stack (16).
        depth: of the residual network, 6n + 2.
        epochs, batch_size, lr: settings of the training; None for defaults that suit the number of rows.
        random_state: decides the first weights and the order of the rows; with a whole number fits can be repeated.
        device: device on which a network for images is trained: auto, cpu, cuda, mps.

    Attributes:
        classes_: labels in the order of the scores.
        code_: the `CodeMatrix` that was used.
        network_: the trained `ECNN`, in float64. For images it takes (image, channel, height, width) in [0, 1], as
            attacks and audits expect; for feature vectors (row, feature, 1, 1), standardised.
        offset_, scale_: the network takes (rows - offset_) / scale_.
        n_features_in_, feature_names_in_: as in all of scikit-learn.
    """

    def __init__(
        self,
        *,
        code: CodeMatrix | str | None = None,
        code_length: int | None = None,
        image_shape: tuple[int, int, int] | None = None,
        pixel_range: tuple[float, float] | None = None,
        width: int | None = None,
        depth: int = 8,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.code = code
        self.code_length = code_length
        self.image_shape = image_shape
        self.pixel_range = pixel_range
        self.width = width
        self.depth = depth
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.random_state = random_state
        self.device = device

    @in_usual_state
    def fit(self, X: Any, y: Any) -> Self:
        """Trains on rows X (row, feature) with labels y (row,) and returns itself."""
        place = find_device(self.device)
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        check_several_classes(self, self.classes_)
        shape = self._input_shape()
        self.offset_, self.scale_ = self._find_scale(X)
        self.code_ = self._choose_code(len(self.classes_))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = self._build_network(shape)
        inputs, targets = self._inputs(X), torch.from_numpy(labels.astype(np.int64))
        recipe = resolve_recipe(
            _feature_recipe(len(X)) if self.image_shape is None else _image_recipe(len(X), shape[1:]),
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
        )
        recipe = replace(recipe, batch_size=min(recipe.batch_size, len(X)))
        if self.image_shape is None:
            _fit_features(network, inputs.float(), targets, recipe, seed)
        else:
            pixels = (255 * inputs.clamp(0, 1)).round().to(torch.uint8)
            fit(network.to(place), Split(pixels, targets), val=None, recipe=recipe, seed=seed)
        if not all(bool(value.isfinite().all()) for value in network.state_dict().values()):
            raise TrainingError(
                f"training diverged: the weights are no longer numbers. Lower lr (now {recipe.lr})."
            )
        self.network_ = network.cpu().double().eval()
        return self

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors, which `load` reads. There is no pickle, so no file can run code.

        A save that fails leaves an earlier one as it was. A `random_state` that is no whole number is saved as None.
        """
        check_is_fitted(self)
        files.check_replaceable(folder, _CONFIG, FORMAT, (_CONFIG, _WEIGHTS))
        classes = self.classes_
        if classes.dtype.kind not in "biufU" and not all(isinstance(label, str) for label in classes):
            raise InputError(f"only labels that are numbers or text can be saved, not {shown(classes[0])}.")
        names = getattr(self, "feature_names_in_", None)
        shape = list(self._input_shape())
        config = {
            "format": FORMAT,
            "version": VERSION,
            "params": self._plain_params(),
            "classes": {"dtype": classes.dtype.str, "labels": classes.tolist()},
            "n_features_in": self.n_features_in_,
            "feature_names_in": None if names is None else list(names),
            "network": describe_model(self.network_, len(classes), shape),
        }
        tensors = {f"{_NETWORK}{name}": value for name, value in self.network_.state_dict().items()}
        for name in ("offset_", "scale_"):
            tensors[name] = torch.from_numpy(getattr(self, name))
        weights = files.tensor_bytes(tensors, {"format": FORMAT})
        files.write_described(folder, (_WEIGHTS, weights), (_CONFIG, config))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """The fitted estimator that `save` wrote."""
        path = Path(folder) / _CONFIG
        config = files.read_json(path)
        if not isinstance(config, dict) or (config.get("format"), config.get("version")) != (FORMAT, VERSION):
            raise InputError(f"{path} holds no estimator of this version of ecnn.")
        kinds = {"params": dict, "classes": dict, "n_features_in": int}
        check_entries(str(path), config, {**kinds, "feature_names_in": list[str] | None, "network": dict})
        files.check_described(path, config, Path(folder) / _WEIGHTS)
        made = cls(**_read_params(str(path), config["params"], cls._get_param_names()))
        made.classes_ = _read_classes(str(path), config["classes"])
        made.n_features_in_ = config["n_features_in"]
        if config.get("feature_names_in") is not None:
            made.feature_names_in_ = np.array(config["feature_names_in"], dtype=object)
        tensors, _ = files.read_tensors(Path(folder) / _WEIGHTS)
        network: Any = rebuild_model(str(path), config["network"], 0.0).double()
        weights = {name: value for name, value in tensors.items() if name.startswith(_NETWORK)}
        load_model_tensors(network, weights, Path(folder) / _WEIGHTS, _NETWORK)
        made.network_, made.code_ = network.eval(), network.code
        made.offset_, made.scale_ = made._read_scale(tensors, Path(folder) / _WEIGHTS)
        if len(made.classes_) != made.code_.num_classes:
            raise InputError(
                f"{path}: {len(made.classes_)} classes are named, but the code has {made.code_.num_classes}."
            )
        return made

    def _scores(self, X: Any) -> np.ndarray:
        """(row, class) the network's scores on the scale of log odds."""
        check_is_fitted(self)
        inputs = self._inputs(validate_data(self, X, dtype=np.float64, reset=False))
        with eval_mode(self.network_), torch.no_grad():
            scores = torch.cat([self.network_(batch) for batch in torch.split(inputs, _BATCH)])
        agreeing = 2 if self.code_.arity == 2 else 1  # one logit stands for both symbols of a binary task
        return checked_scores(scores.numpy() / (agreeing * mean_distance(self.code_)))

    def _inputs(self, X: np.ndarray) -> Tensor:
        """(row, channel, height, width) input of the network, in float64."""
        with np.errstate(over="ignore"):  # `checked_scores` refuses the scores that follow
            scaled = (X - self.offset_) / self.scale_
        return torch.from_numpy(scaled).reshape(len(X), *self._input_shape())

    def _input_shape(self) -> tuple[int, int, int]:
        """(channel, height, width), checked against the number of features."""
        if self.image_shape is None:
            check_count("the number of features", self.n_features_in_, most=MOST_OF_ANYTHING)
            return self.n_features_in_, 1, 1
        shape = tuple(self.image_shape) if isinstance(self.image_shape, list | tuple) else ()
        if len(shape) != 3:
            raise InputError(f"image_shape must be (channel, height, width), not {shown(self.image_shape)}.")
        for name, size in zip(("channels", "height", "width"), shape, strict=True):
            check_count(f"image_shape: {name}", size)
        shape = tuple(map(int, shape))  # NumPy's small integers would overflow
        if math.prod(shape) != self.n_features_in_:
            raise InputError(
                f"images of {'x'.join(map(str, shape))} have {math.prod(shape)} values, but the rows have "
                f"{self.n_features_in_}: give the image_shape that they were flattened from."
            )
        if shape[2] in (1, 3, 4) and shape[0] > 4 and shape[1] > 4:
            raise InputError(
                f"image_shape must be (channel, height, width), but {shape} has its channels last: transpose the "
                "images before they are flattened."
            )
        return shape[0], shape[1], shape[2]

    def _find_scale(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Offset and scale of the rows: two (feature,) arrays, or two numbers for images."""
        if self.image_shape is None:
            with np.errstate(over="ignore", invalid="ignore"):
                means, deviations = X.mean(axis=0), X.std(axis=0)
            is_known = np.isfinite(means) & np.isfinite(deviations)
            if not is_known.all():
                raise InputError(
                    f"feature {is_known.argmin()} has values too large to be standardised: divide them first."
                )
            return means, np.where(deviations > 0, deviations, 1.0)
        if self.pixel_range is None:
            low, high = float(X.min()), float(X.max())
        elif isinstance(self.pixel_range, list | tuple) and len(self.pixel_range) == 2:
            low, high = self.pixel_range
            check_number("pixel_range: black", low, least=-math.inf)
            check_number("pixel_range: white", high, least=low, above=True)
            low, high = float(low), float(high)  # NumPy's small integers would overflow
            if X.min() < low or X.max() > high:
                raise InputError(
                    f"the values of the images reach from {X.min():g} to {X.max():g}, beyond the pixel_range of "
                    f"{low:g} to {high:g}: give the values of black and white."
                )
        else:
            raise InputError(f"pixel_range must be (black, white), not {shown(self.pixel_range)}.")
        if not math.isfinite(high - low):
            raise InputError("the values of the images are too large to be scaled: divide them first.")
        return np.array(low), np.array(high - low or 1.0)

    def _choose_code(self, num_classes: int) -> CodeMatrix:
        if self.code is None:
            if self.code_length is not None:
                check_count("code_length", self.code_length)
            return find_code(
                num_classes, int(self.code_length or max(_LENGTH, 2 * (num_classes - 1).bit_length()))
            )
        code = self.code if isinstance(self.code, CodeMatrix) else load_code(self.code)
        if code.num_classes != num_classes:
            raise InputError(
                f"the code is for {code.num_classes} classes, but the labels have {num_classes}: leave it out, or "
                "give a code for as many."
            )
        return code

    def _build_network(self, shape: tuple[int, int, int]) -> nn.Module:
        options: dict[str, Any] = {
            "trunk": DENSE,
            "branch": "linear",
            "width": 64 if self.width is None else self.width,
        }
        if self.image_shape is not None:
            options = {
                "width": 16 if self.width is None else self.width,
                "depth": self.depth,
                "batch_norm": True,
            }
        if self.code_.arity > 2:
            options["member_output"] = "symbols"
        return build_model(
            "ecnn",
            code=self.code_,
            num_classes=len(self.classes_),
            in_channels=shape[0],
            mean=None,
            decoder="linear",
            **options,
        )

    def _plain_params(self) -> dict[str, Any]:
        """The parameters as plain JSON values."""
        params = self.get_params(deep=False)
        if isinstance(params["code"], CodeMatrix):
            params["code"] = params["code"].to_dict()
        elif params["code"] is not None:  # a path is no JSON
            params["code"] = str(params["code"])
        if not isinstance(params["random_state"], int | np.integer):
            params["random_state"] = None
        params["device"] = str(params["device"])
        return {name: plain(value) for name, value in params.items()}

    def _read_scale(self, tensors: dict[str, Tensor], path: Path) -> tuple[np.ndarray, np.ndarray]:
        size = () if self.image_shape is not None else (self.n_features_in_,)
        found = [tensors.get(name) for name in ("offset_", "scale_")]
        for tensor in found:
            if tensor is None or tensor.dtype != torch.float64 or tuple(tensor.shape) != size:
                raise InputError(f"{path} lacks what rows of {self.n_features_in_} features are scaled by.")
        first, second = (tensor.numpy() for tensor in found if tensor is not None)
        return first, second


def _feature_recipe(num_rows: int) -> Recipe:
    """The recipe for feature vectors: at least 200 steps and 20 epochs, fewer epochs the more rows there are."""
    batch_size = min(num_rows, 128)
    steps = max(1, num_rows // batch_size)
    return Recipe(
        epochs=max(20, min(200, math.ceil(600 / steps))),
        batch_size=batch_size,
        optimizer="adamw",
        lr=1e-2,
        weight_decay=1e-2,
        schedule="onecycle",
        objective="member_cross_entropy",
    )


def _image_recipe(num_images: int, image_size: tuple[int, ...]) -> Recipe:
    """The recipe for a folder of as many images, but without mirroring, which may change the class of an image."""
    return replace(auto_recipe(num_images, (image_size[0], image_size[1])), flip=False)


def _fit_features(network: nn.Module, rows: Tensor, labels: Tensor, recipe: Recipe, seed: int) -> None:
    """Trains the network in place on rows (row, feature, 1, 1), because `training.fit` only takes images as bytes."""
    objective = objective_of(recipe)
    optimizer = torch.optim.AdamW(parameter_groups(network, recipe.weight_decay), lr=recipe.lr)
    generator = torch.Generator().manual_seed(seed)
    steps = max(1, len(rows) // recipe.batch_size)
    network.train()
    for step in range(steps * recipe.epochs):
        if step % steps == 0:
            order = torch.randperm(len(rows), generator=generator, device="cpu")
        batch = order[(step % steps) * recipe.batch_size :][: recipe.batch_size]
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr_at(step / (steps * recipe.epochs))
        loss = objective(network, rows[batch], labels[batch])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def _read_params(owner: str, params: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """The estimator's parameters from their JSON values; InputError if one is unknown."""
    check_options(owner, params, known)
    read = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    if isinstance(read.get("code"), dict):
        read["code"] = CodeMatrix.from_dict(read["code"])
    return read


def _read_classes(owner: str, described: dict[str, Any]) -> np.ndarray:
    check_entries(owner, described, {"dtype": str, "labels": list})
    try:
        classes = np.array(described["labels"], dtype=np.dtype(described["dtype"]))
    except (TypeError, ValueError, OverflowError):
        classes = np.array(None)
    if classes.dtype.kind not in "biufUO" or classes.ndim != 1:
        raise InputError(f"{owner}: classes must be a list of numbers or of text.")
    return classes
