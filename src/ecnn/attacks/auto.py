"""AutoAttack: four attacks in turn, and the signs that even they may be fooled (Croce & Hein 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ecnn.attacks.apgd import APGD
from ecnn.attacks.base import Attack, Attacked, Target, check_batch
from ecnn.attacks.draws import Draws
from ecnn.attacks.fab import FAB
from ecnn.attacks.images import check_unit_range
from ecnn.attacks.norms import NORMS, Norm, l2_norm
from ecnn.attacks.square import Square
from ecnn.attacks.turns import Turn, take_turns
from ecnn.attacks.views import SCORE_VIEWS, check_view, read_scores, score_loss
from ecnn.backbones import without_tf32
from ecnn.checks import check_choice, parse_eps
from ecnn.errors import InputError

Version = Literal["standard", "apgd-ce", "apgd-t", "fab-t", "square"]
_STEPS, _TARGETS, _QUERIES = 100, 9, 5000
#: Starts of APGD on cross-entropy and targets of APGD-T: one and nine, in L1 five and five.
_APGD: dict[str, tuple[int, int]] = {"linf": (1, 9), "l2": (1, 9), "l1": (5, 5)}
_CHECKED = 256  # images that the warnings look at
_DIFFERENCE = 1e-4  # of two passes, relative to the length of the scores
_SUM_TOLERANCE = 1e-5
_SQUARE_SHARE = 0.002

_DYNAMIC = (
    "The model takes gradients while it classifies (a dynamic defence): these attacks do not see through that, so "
    "attack the defence itself."
)
_FEW_CLASSES = (
    "The targeted DLR loss needs 4 classes and the model has {}: APGD-T raised the margin, whose gradient may vanish "
    "with the scale of the scores."
)
_PROBABILITIES = (
    "The scores are probabilities (in [0, 1], summing to 1): attack the logits before the softmax, which do not "
    "saturate."
)
_NO_GRADIENT = (
    "No gradient reaches the pixels: the model is not differentiable, so that only Square has attacked it."
)


@dataclass(frozen=True)
class SuiteResult:
    """What AutoAttack made of a set of images, attack by attack.

    Attributes:
        attacked: images, verdicts and cost of the whole suite.
        names: "clean" and the attacks, in the order in which they ran.
        broken_by: (batch,) position in `names` of what broke each image, 0 if it was wrong before any attack; -1 if it
            still stands.
        accuracies: name -> share of all images that stand after it.
        warnings: sentences, each a reason to doubt the last accuracy.
    """

    attacked: Attacked
    names: tuple[str, ...]
    broken_by: Tensor
    accuracies: dict[str, float]
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AutoAttack(Attack):
    """AutoAttack (Croce & Hein 2020): APGD on cross-entropy, APGD-T on DLR, FAB-T, Square, each on what still stands.

    `run_suite` also tells which of them broke an image, and warns.

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        version: the "standard" suite, or one of its attacks with the suite's settings: 100 steps, the nine best wrong
            classes, 5,000 queries, one start; in L1 five starts of APGD, and the five best classes for APGD-T.
        on: where all of them look, a name of `SCORE_VIEWS`; "scores" is the published suite.

    Departs: with fewer than four classes, where the targeted DLR loss is not defined, APGD-T raises the margin; with
        fewer than ten all wrong classes are targets. Both are where the authors' program fails.
    """

    norm: Norm
    eps: float | str
    version: Version = "standard"
    on: str = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("norm", self.norm, NORMS)
        parse_eps(self.eps)
        check_view(self.on, SCORE_VIEWS)
        if self.version not in get_args(Version):
            raise InputError(f"version must be one of {', '.join(get_args(Version))}, not {self.version!r}.")
        if self.keep == "last":
            raise InputError('AutoAttack keeps what breaks an image: keep="last" has no meaning here.')

    def members(self, num_classes: int) -> dict[str, Attack]:
        """The attacks by name, in the order in which they run, for a model of so many classes."""
        common: dict[str, Any] = {
            "norm": self.norm,
            "eps": self.eps,
            "on": self.on,
            "early_exit": self.early_exit,
            "precision": self.precision,
            "quick": self.quick,
        }
        loss: Literal["dlr", "margin"] = "dlr" if num_classes >= 4 else "margin"
        restarts, targets = _APGD[self.norm]
        suite: dict[str, Attack] = {
            "apgd-ce": APGD(steps=_STEPS, loss="cross_entropy", restarts=restarts, **common),
            "apgd-t": APGD(steps=_STEPS, loss=loss, targets=targets, **common),
            "fab-t": FAB(steps=_STEPS, targets=_TARGETS, **common),
            "square": Square(queries=_QUERIES, rescale=False, **common),
        }
        return suite if self.version == "standard" else {self.version: suite[self.version]}

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if not len(images):
            return images.clone()
        num_classes = target.scores(images).shape[1]

        def turn_of(member: Attack) -> Turn:
            def turn(part: Target, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                points = member.search(part, images[rows], labels[rows], draws.take(rows))
                broken = part.verdict(points) != labels[rows]
                return points, broken, broken.to(images.dtype)

            return turn

        turns = (turn_of(member) for member in self.members(num_classes).values())
        return take_turns(turns, target, images, early_exit=True)

    def run_suite(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        *,
        seed: int = 0,
        index: Tensor | None = None,
        batch_size: int | None = None,
    ) -> SuiteResult:
        """`run`, attack by attack over all images, so that it can say what each of them did.

        Args:
            batch_size: images asked about at once, all of them if not given; it changes no result.
        """
        check_batch(images, labels)
        images = images.detach()
        check_unit_range(images)
        if not len(images):
            raise InputError("a suite needs images: there are none.")
        rows = torch.arange(len(images), device=images.device)
        index, size = rows if index is None else index.to(images.device), batch_size or len(images)
        target = Target(model, len(images), images.device, self.precision)
        with without_tf32():
            predictions = torch.cat(
                [target.narrow(part).verdict(images[part]) for part in torch.split(rows, size)]
            )
            checked = rows[: min(size, _CHECKED)]
            num_classes, warnings = examine(target.narrow(checked), images[checked], self.on)
        labels = predictions if self.labels == "predicted" else labels
        progress = _Progress(images, labels, predictions, target)
        members = self.members(num_classes)
        for name, member in members.items():
            for part in torch.split(progress.standing(), size):
                attacked = member.run(model, images[part], labels[part], seed=seed, index=index[part])
                progress.take(name, part, attacked)
            progress.close(name)
        return progress.result((*warnings, *_warn_of_square(progress.accuracies)))


class _Progress:
    """The suite's result as it grows."""

    def __init__(self, images: Tensor, labels: Tensor, predictions: Tensor, target: Target) -> None:
        self.images, self.predictions = images.clone(), predictions.clone()
        self.forwards, self.backwards = target.forwards, target.backwards
        self.names = ["clean"]
        self.broken_by = torch.where(predictions == labels, -1, 0)
        self.accuracies = {"clean": self.accuracy()}

    def standing(self) -> Tensor:
        """(n,) positions of the images that nothing has broken."""
        return torch.nonzero(self.broken_by < 0).squeeze(1)

    def accuracy(self) -> float:
        return float((self.broken_by < 0).double().mean())

    def take(self, name: str, rows: Tensor, attacked: Attacked) -> None:
        """Books what an attack made of some images that stood."""
        won = rows[attacked.success]
        self.images[won] = attacked.images[attacked.success]
        self.predictions[won] = attacked.predictions[attacked.success]
        self.broken_by[won] = len(self.names)
        self.forwards[rows.cpu()] += attacked.forwards
        self.backwards[rows.cpu()] += attacked.backwards

    def close(self, name: str) -> None:
        """Ends an attack's turn."""
        self.names.append(name)
        self.accuracies[name] = self.accuracy()

    def result(self, warnings: tuple[str, ...]) -> SuiteResult:
        attacked = Attacked(self.images, self.predictions, self.broken_by >= 0, self.forwards, self.backwards)
        return SuiteResult(attacked, tuple(self.names), self.broken_by, self.accuracies, warnings)


def examine(target: Target, images: Tensor, on: str = "scores") -> tuple[int, tuple[str, ...]]:
    """The number of classes, and a sentence for each reason to doubt what attacks will find on these images.

    The reasons are those that the authors of AutoAttack warn of: random scores, probabilities in place of logits,
    gradients taken while classifying, no gradient or exactly zero ones, and too few classes for a loss.
    """
    with _noticing_gradients() as taken:
        scores = target.scores(images)
    again = target.scores(images)
    num_classes = scores.shape[1]
    sentences = (
        _warn_of_randomness(scores, again),
        _warn_of_probabilities(scores),
        _DYNAMIC if taken else "",
        _warn_of_gradients(target, images, scores.argmax(dim=1), on),
        _FEW_CLASSES.format(num_classes) if num_classes < 4 else "",
    )
    return num_classes, tuple(sentence for sentence in sentences if sentence)


@contextmanager
def _noticing_gradients() -> Iterator[list[bool]]:
    """A list that is no longer empty once a gradient was taken of something computed inside."""
    taken: list[bool] = []

    def unpack(saved: Tensor) -> Tensor:
        taken.append(True)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        yield taken


def _warn_of_randomness(scores: Tensor, again: Tensor) -> str:
    apart = (l2_norm(scores - again) / l2_norm(scores).clamp_min(1e-10)).amax()
    if not float(apart) > _DIFFERENCE:
        return ""
    return (
        f"Two passes over the same images gave different scores (up to {float(apart):.2g} of their length): the model "
        "is random, so attack the average over its randomness."
    )


def _warn_of_probabilities(scores: Tensor) -> str:
    low, high = (float(bound) for bound in scores.aminmax())
    sums_to_one = bool(((scores.sum(dim=1) - 1).abs() < _SUM_TOLERANCE).all())
    if not (sums_to_one and low > -_SUM_TOLERANCE and high < 1 + _SUM_TOLERANCE):
        return ""
    return _PROBABILITIES


def _warn_of_gradients(target: Target, images: Tensor, labels: Tensor, on: str) -> str:
    """Looks at the gradient of the DLR loss (with two classes the margin), which no confidence makes vanish."""
    points = images.clone().requires_grad_(True)
    with torch.enable_grad(), target.autocast():
        scores, _ = read_scores(target.model, points, on)
        losses = score_loss(scores, labels, "dlr" if scores.shape[1] >= 3 else "margin")
    target.count(1, 1)
    gradient = None
    if losses.requires_grad:
        (gradient,) = torch.autograd.grad(losses.sum(), points, allow_unused=True)
    if gradient is None:
        return _NO_GRADIENT
    zero = float((gradient.flatten(1) == 0).all(dim=1).double().mean())
    if not zero:
        return ""
    return (
        f"The gradient is exactly zero for {zero:.1%} of the images: gradient attacks are blind there; look before the "
        "layer that saturates or quantises."
    )


def _warn_of_square(accuracies: dict[str, float]) -> tuple[str, ...]:
    """Only a suite can say this: Square must have followed something else."""
    if "square" not in accuracies or len(accuracies) < 3:
        return ()
    gain = min(value for name, value in accuracies.items() if name != "square") - accuracies["square"]
    if gain <= _SQUARE_SHARE:
        return ()
    return (
        f"Square broke another {gain:.1%} of the images, without gradients, that the gradient attacks had left: the "
        "gradients mislead, so attack with more queries and look for what masks them.",
    )
