"""Recipes: all settings of a training run as data, and the recipes for any model by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from ecnn.checks import check_choice, check_count, check_fields, check_number

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("authors", "steps", "onecycle", "cosine", "constant")
PRECISIONS = ("auto", "float32", "bfloat16")
FILLS = ("nearest", "zero")
#: Options of member objectives that are fields of a recipe.
MEMBER_OPTIONS = ("diversity_weight", "entropy_unit")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete training recipe.

    Attributes:
        epochs: passes over the training images.
        batch_size: images per step, of all processes together if several train.
        optimizer: "adam", "adamw" or "sgd" (Nesterov momentum 0.9).
        lr: the largest learning rate.
        weight_decay: on every parameter with two or more axes that is no bias (so not on norms either). "adamw" takes
            lr * weight_decay off a weight; "adam" and "sgd" add weight_decay times the weight to its gradient, as a
            penalty of weight_decay / 2 times its square would.
        schedule: "authors" (x0.1, x1e-2, x1e-3, x0.5e-3 after 40, 60, 80, 90 % of the epochs), "steps" (x0.1, x1e-2
            after 50, 75 %), "onecycle" (up linearly over the first fifth, down linearly to 0), "cosine", "constant".
        objective: name of an objective. diversity_weight and entropy_unit are options of member objectives.
        objective_options: further options of the objective, by name.
        shift, flip, fill: augmentation: largest shift in pixels, mirror images or not, and the filling of the border.
        ema: decay of a running average of the weights, which is validated and kept in their place; None for none.
        adversarial_ratio: share of attacked images in a batch if an attack is given; 0.5 is the paper's 1:1.
        precision: "auto" is bfloat16 on CUDA and float32 elsewhere.
    """

    epochs: int
    batch_size: int
    optimizer: str
    lr: float
    weight_decay: float = 0.0
    schedule: str = "constant"
    objective: str = "member_hinge"
    diversity_weight: float = 0.0
    entropy_unit: str = "normalised"
    objective_options: dict[str, Any] = field(default_factory=dict)
    shift: int = 0
    flip: bool = False
    fill: str = "nearest"
    ema: float | None = None
    adversarial_ratio: float = 1.0
    precision: str = "auto"

    def __post_init__(self) -> None:
        check_fields("a recipe", self)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("fill", self.fill, FILLS)
        check_count("epochs", self.epochs)
        check_count("shift", self.shift, least=0)
        check_count("batch_size", self.batch_size)
        check_number("lr", self.lr, above=True)
        check_number("weight_decay", self.weight_decay)
        check_number("diversity_weight", self.diversity_weight)
        check_number("adversarial_ratio", self.adversarial_ratio, above=True, most=1)
        if self.ema is not None:
            check_number("ema", self.ema, above=True, most=1, below=True)

    def lr_at(self, progress: float) -> float:
        """The learning rate after that share of all steps, from 0 to 1."""
        if self.schedule == "authors":
            # x0.1 after epoch 80 of 200, x1e-2 after 120, x1e-3 after 160, x0.5e-3 after 180 (authors' program).
            passed = sum(progress >= limit for limit in (0.4, 0.6, 0.8, 0.9))
            return self.lr * (1.0, 1e-1, 1e-2, 1e-3, 0.5e-3)[passed]
        if self.schedule == "steps":
            return self.lr * (1.0, 1e-1, 1e-2)[sum(progress >= limit for limit in (0.5, 0.75))]
        if self.schedule == "onecycle":
            return self.lr * (progress / 0.2 if progress < 0.2 else (1 - progress) / 0.8)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr


# Our choice: more accuracy in a fraction of the time, with and without batch norm (docs/training.md).
_ONECYCLE = Recipe(
    epochs=60,
    batch_size=256,
    optimizer="adamw",
    lr=2e-3,
    weight_decay=0.05,
    schedule="onecycle",
    objective="member_cross_entropy",
    shift=4,
    flip=True,
    fill="zero",
    ema=0.999,
)

RECIPES: dict[str, Recipe] = {
    # The authors' program (it covers the q-ary CIFAR-10 model): Adam, 200 epochs, batch 128, no weight decay, shifts
    # up to 10 % with nearest fill, flips. Their loss is 5 * hinge - 0.5 * entropy / log(arity): a ratio of 0.1.
    # Departs: sub-pixel shifts become whole pixels; the last incomplete batch of an epoch is left out.
    "paper": Recipe(
        epochs=200,
        batch_size=128,
        optimizer="adam",
        lr=1e-3,
        schedule="authors",
        objective="member_hinge",
        diversity_weight=0.1,
        entropy_unit="normalised",
        shift=3,
        flip=True,
    ),
    "onecycle": _ONECYCLE,
    # Adversarial training that reached 46 % at 8/255 with a ResNet-32 (docs/training.md); give it an attack.
    "robust": replace(_ONECYCLE, epochs=80, batch_size=512, optimizer="sgd", lr=0.3, weight_decay=5e-4),
}
# Small grey images without symmetry, as the embedded digits: seconds on a laptop.
RECIPES["small"] = replace(
    RECIPES["paper"], epochs=30, batch_size=32, lr=2e-3, schedule="onecycle", shift=1, flip=False, ema=0.99
)


#: Name, in specs, of the recipe that `auto_recipe` makes.
AUTO = "auto"


def auto_recipe(num_images: int, image_size: tuple[int, int]) -> Recipe:
    """A recipe for images of one's own without any tuning, from dozens to many thousands (docs/own_images.md).

    The fewer images, the smaller the batches and the more epochs: about 800 steps or more, from 32 images up.

    Args:
        num_images: number of training images.
        image_size: (height, width).
    """
    batch_size = min(max(num_images, 1), max(8, min(256, 2 ** int(math.log2(max(num_images / 8, 1))))))
    steps = max(1, num_images // batch_size)
    epochs = max(60, min(200, math.ceil(800 / steps)))
    return replace(
        _ONECYCLE,
        epochs=epochs,
        batch_size=batch_size,
        shift=max(1, min(4, min(image_size) // 8)),
        ema=0.99 if epochs * steps < 5000 else 0.999,
    )
