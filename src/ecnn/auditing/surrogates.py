"""Surrogates of a model: a softmax head on its frozen features, and small networks (students) that imitate its answers.

Adversarial images are made on a surrogate and then tried on the model. Surrogates are trained on clean images that are
not audited, if there are enough. Otherwise they are trained on the audited ones with the model's own answers as labels,
so that no true label is used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn import files
from ecnn.asking import full_precision, undisturbed
from ecnn.attacks import PGD, Draws, Neighbours, RaySearch
from ecnn.attacks.deadlines import check_time
from ecnn.attacks.images import at_once
from ecnn.attacks.norms import Norm
from ecnn.attacks.randomness import forked_generators
from ecnn.auditing.adaptive import features_of
from ecnn.auditing.subject import Subject, once
from ecnn.data import Split
from ecnn.errors import InputError

#: Most clean images that surrogates are trained on.
MOST_EXAMPLES = 1000
_HEAD_STEPS, _HEAD_LR = 300, 0.1
_STUDENT_STEPS, _STUDENT_LR, _STUDENT_BATCH, _STUDENT_WIDTH = 500, 5e-3, 64, 16
#: A student's training stops when so many steps raise its agreement with the model by less than this. More steps do not
#: improve transfer: on digits, 120 steps broke as many images as 500, or more.
_LESSON, _LEARNT = 40, 0.02
_HEAD_LESSON, _HEAD_LEARNT = 30, 0.02  # the same for a head, whose loss must fall by this share
_STUDENT_ROUNDS, _STUDENT_ATTACKED, _STUDENT_COPIES, _STUDENT_QUESTIONS = 3, 500, 8, 6000
#: Pixel values that a student is trained on, about; so fewer images are used if they are larger than 70 x 70 pixels.
_STUDENT_NUMBERS = 2**28
_BATCH = 256
_NEIGHBOURS = 64


@dataclass(frozen=True, eq=False)
class Examples:
    """Clean images to train surrogates on.

    Attributes:
        images: (image, channel, height, width) in [0, 1], on the model's device.
        labels: (image,) classes: the true ones, or the model's own answers.
        are_true: whether they are the true ones.
    """

    images: Tensor
    labels: Tensor
    are_true: bool

    def __post_init__(self) -> None:
        if not len(self.images) or len(self.images) != len(self.labels):
            raise InputError(
                f"examples need images and as many labels, not {len(self.images)} images and {len(self.labels)} labels."
            )


def choose_examples(model: nn.Module, split: Split, audited: Tensor) -> Examples:
    """Images of the split after the audited ones, with their labels; or the audited ones with the model's answers.

    Args:
        audited: (image, channel, height, width) the first images of the split, on the model's device.
    """
    rest = min(len(split) - len(audited), MOST_EXAMPLES)
    if rest < 100:  # too few: each class should occur several times
        images = audited[:MOST_EXAMPLES]
        return Examples(images, give_answers(model, images), are_true=False)
    images, labels = split[len(audited) : len(audited) + rest]
    images = images.to(audited)  # the precision too: a model may change it when it is first asked
    return Examples(images, labels.to(images.device), are_true=True)


def give_answers(model: nn.Module, images: Tensor) -> Tensor:
    """(image,) the classes that the model predicts for the images."""
    answers = []
    with undisturbed(model), torch.no_grad():
        for part in torch.split(images, at_once(_BATCH)):
            check_time()
            answers.append(full_precision(model(part)).argmax(dim=1))
    return torch.cat(answers)


def all_features(model: nn.Module, images: Tensor) -> Tensor:
    """(image, feature) the model's features of the images, as `features_of` reads them."""
    with undisturbed(model), torch.no_grad():
        return torch.cat([features_of(model, part)[0] for part in torch.split(images, at_once(_BATCH))])


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """(class, feature) mean features of each class; NaN for a class that no label names."""
    precise = features.double()
    sums = precise.new_zeros(num_classes, features.shape[1]).index_add_(0, labels, precise)
    counts = torch.bincount(labels, minlength=num_classes)[:, None]
    return (sums / counts).to(features.dtype)


class HeadOnFeatures(nn.Module):
    """A softmax classifier that reads another model's features: pixels in [0, 1] to scores (batch, class).

    Args:
        model: the other model, which is not changed.
        shift, spread: (feature,) mean and standard deviation by which its features are standardised.
        num_classes: scores per image.
    """

    shift: Tensor
    spread: Tensor

    def __init__(self, model: nn.Module, shift: Tensor, spread: Tensor, num_classes: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("shift", shift)
        self.register_buffer("spread", spread)
        self.weight = nn.Parameter(shift.new_zeros(num_classes, len(shift)))
        self.bias = nn.Parameter(shift.new_zeros(num_classes))

    def judge(self, features: Tensor) -> Tensor:
        """(batch, class) scores of features (batch, feature)."""
        return F.linear((features - self.shift) / self.spread, self.weight, self.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.judge(features_of(self.model, images)[0])


def train_head(model: nn.Module, features: Tensor, labels: Tensor, num_classes: int) -> HeadOnFeatures:
    """A head trained with cross-entropy on features (image, feature) and their labels; the model is not trained."""
    spread = features.std(dim=0, correction=0).clamp_min(1e-6 * float(features.abs().amax()) + 1e-12)
    head = HeadOnFeatures(model, features.mean(dim=0), spread, num_classes)
    optimiser = torch.optim.Adam([head.weight, head.bias], lr=_HEAD_LR)
    before = torch.inf
    with torch.enable_grad():
        for step in range(_HEAD_STEPS):
            loss = F.cross_entropy(head.judge(features), labels)
            loss = loss + 1e-4 * head.weight.square().sum()
            if step % _HEAD_LESSON == 0:
                now = float(loss.detach())
                if now > (1 - _HEAD_LEARNT) * before:
                    break
                before = now
            head.weight.grad, head.bias.grad = torch.autograd.grad(loss, [head.weight, head.bias])
            optimiser.step()
    head.weight.grad = head.bias.grad = None
    return head


class Student(nn.Module):
    """A small convolutional network: pixels in [0, 1] to scores (batch, class)."""

    def __init__(self, in_channels: int, num_classes: int, width: int = _STUDENT_WIDTH) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1, stride=2),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.body(2 * images - 1)
        return scores


class DenseStudent(nn.Module):
    """A dense network with two hidden layers: pixels in [0, 1] to scores (batch, class)."""

    def __init__(self, inputs: int, num_classes: int, width: int = 8 * _STUDENT_WIDTH) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.body(2 * images - 1)
        return scores


def train_student(
    model: nn.Module,
    examples: Examples,
    num_classes: int,
    eps: float,
    seed: int,
    *,
    norm: Norm = "linf",
    dense: bool = False,
) -> nn.Module:
    """A student: a small network in eval mode, trained to predict the model's classes on the examples and near them.

    It is trained on the examples, on noisy and mixed copies of them and, in rounds, on the points to which attacks on
    the student itself lead, since it has to agree with the model there. This is the substitute of Papernot et al.
    (2017). It needs classes only, so that hidden gradients do not matter. Torch's random state is not changed.

    Args:
        model: asked for classes.
        examples: clean images.
        num_classes: of the model.
        eps, norm: of the ball in which the student will be attacked.
        seed: of the initial weights, the noise and the batches.
        dense: makes a network without convolutions, for small images.
    """
    images = examples.images
    images = images[: max(1, _STUDENT_NUMBERS // (16 * images[0].numel()))]
    asked = _around(images, eps, seed)
    answers = give_answers(model, asked)
    with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []), torch.device("cpu"):
        torch.manual_seed(seed)
        student: nn.Module = (
            DenseStudent(images[0].numel(), num_classes) if dense else Student(images.shape[1], num_classes)
        )
    student.to(images.device, images.dtype)
    optimiser = torch.optim.AdamW(student.parameters(), lr=_STUDENT_LR)
    generator = torch.Generator().manual_seed(seed)
    _teach(student, optimiser, asked, answers, _STUDENT_STEPS, generator)
    some = images[:_STUDENT_ATTACKED]
    own = answers[: len(some)]
    for number in range(_STUDENT_ROUNDS):
        craft = PGD(norm=norm, eps=eps, steps=10, step_size=eps / 4, keep="last", loss="cross_entropy")
        found = [craft.run(student, *part, seed=seed + number) for part in _pieces(some, own)]
        points = torch.cat([part.images for part in found])
        points = torch.cat([points, (points + some) / 2])
        asked, answers = torch.cat([asked, points]), torch.cat([answers, give_answers(model, points)])
        _teach(student, optimiser, asked, answers, _STUDENT_STEPS // 2, generator)
    for parameter in student.parameters():
        parameter.grad = None
    return student.eval()


def _around(images: Tensor, eps: float, seed: int) -> Tensor:
    """The images, then several times noisy copies of them (up to twice the radius) and mixtures with other images."""
    asked = [images]
    most = min(_STUDENT_QUESTIONS, _STUDENT_NUMBERS // (2 * images[0].numel()))
    for number in range(min(_STUDENT_COPIES, max(1, most // (2 * len(images))))):
        draws = Draws.of(seed, torch.arange(len(images), device=images.device)).fold(number)
        signs = (2 * draws.fold(1).integers(2, *images.shape[1:]) - 1).to(images.dtype)
        lengths = 2 * eps * draws.fold(2).uniform(1, 1, 1, dtype=images.dtype)
        asked.append((images + lengths * signs).clamp(0, 1))
        others = images[draws.fold(3).integers(len(images), 1).flatten()]
        shares = 0.6 * draws.fold(4).uniform(1, 1, 1, dtype=images.dtype)
        asked.append((1 - shares) * images + shares * others)
    return torch.cat(asked)


def _pieces(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(torch.split(images, at_once(_BATCH)), torch.split(labels, at_once(_BATCH)), strict=True)


def _teach(
    student: nn.Module,
    optimiser: torch.optim.Optimizer,
    asked: Tensor,
    answers: Tensor,
    steps: int,
    generator: torch.Generator,
) -> None:
    """Trains the student on random batches for `steps` steps, or until its agreement with the answers stops growing."""
    parameters = list(student.parameters())
    right, before = torch.zeros((), dtype=torch.int64, device=asked.device), 0.0
    with torch.enable_grad():
        for step in range(1, steps + 1):
            rows = torch.randint(len(asked), (_STUDENT_BATCH,), generator=generator, device="cpu").to(
                asked.device
            )
            scores = student(asked[rows])
            step_down(F.cross_entropy(scores, answers[rows]), parameters, optimiser)
            right += (scores.detach().argmax(dim=1) == answers[rows]).sum()
            if step % _LESSON == 0:
                agreement = float(right) / (_LESSON * _STUDENT_BATCH)
                if agreement < before + _LEARNT:
                    return
                before = agreement
                right.zero_()


def step_down(loss: Tensor, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer) -> None:
    """Makes one optimiser step on the loss; the gradients of all other parameters stay unchanged."""
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimiser.step()


def rebuild_head(model: nn.Module, state: dict[str, Tensor]) -> HeadOnFeatures:
    """The head whose weights `own_state` gave."""
    head = HeadOnFeatures(model, state["shift"], state["spread"], len(state["bias"]))
    with torch.no_grad():
        head.weight.copy_(state["weight"])
        head.bias.copy_(state["bias"])
    return head


def rebuild_student(state: dict[str, Tensor]) -> nn.Module:
    """The student whose weights `own_state` gave, in eval mode."""
    is_dense = "body.1.weight" in state
    first = state["body.1.weight" if is_dense else "body.0.weight"]
    last = state["body.5.weight" if is_dense else "body.8.weight"]
    kind: type[DenseStudent] | type[Student] = DenseStudent if is_dense else Student
    # Drawing initial weights, which are replaced below, must not change torch's random state.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        student = kind(first.shape[1], len(last))
    student.to(first.device, first.dtype).load_state_dict(state)
    return student.eval()


def own_state(surrogate: nn.Module) -> dict[str, Tensor]:
    """The weights of a surrogate, without those of the model that it reads."""
    return {name: value for name, value in surrogate.state_dict().items() if not name.startswith("model.")}


def keep_or_load(
    make: Callable[[], dict[str, Tensor]], path: Path, *, resume: bool, device: torch.device
) -> dict[str, Tensor]:
    """The tensors at the path if a run that is resumed has saved them; otherwise new ones, which are saved.

    They are saved because training again on a GPU would give others.
    """
    if resume and files.exists(path):
        kept, _ = files.read_tensors(path)
        return {name: value.to(device) for name, value in kept.items()}
    made = make()
    files.write_tensors(path, made, {"format": "ecnn-surrogate"})
    return made


@dataclass(frozen=True)
class Surrogates:
    """Surrogates of one model, trained when they are first needed, or read from the folder of a resumed audit."""

    subject: Subject
    examples: Examples
    num_classes: int
    folder: Path | None
    resume: bool

    @cached_property
    def features(self) -> Tensor:
        return all_features(self.subject.model, self.examples.images)

    @cached_property
    def has_features(self) -> bool:
        """Whether features can be read for all examples; some images may bypass the layer that gives them."""
        try:
            return len(self.features) > 0
        except Exception:  # a model that was not made for this may raise anything
            return False

    def means(self) -> Tensor:
        labels = self.examples.labels
        kept = self._kept(lambda: {"means": class_means(self.features, labels, self.num_classes)}, "means")
        return kept["means"]

    def head(self) -> nn.Module:
        def make() -> dict[str, Tensor]:
            return own_state(
                train_head(self.subject.model, self.features, self.examples.labels, self.num_classes)
            )

        return rebuild_head(self.subject.model, self._kept(make, "head"))

    def neighbours(self) -> Neighbours:
        """Some examples with the model's answers, and the move that changes each answer; zero if none was found."""
        images, subject = self.examples.images[:_NEIGHBOURS], self.subject
        attack = RaySearch(norm=subject.norm, eps=subject.eps, queries=max(1, subject.budget.queries // 2))

        def make() -> dict[str, Tensor]:
            answers = give_answers(subject.model, images)
            try:
                with forked_generators(images.device, subject.seed):
                    moves = attack.run(subject.model, images, answers, seed=subject.seed).images - images
            except Exception:  # a model may raise anything, and neighbours are not essential
                moves = torch.zeros_like(images)
            return {"images": images, "labels": answers, "moves": moves}

        return Neighbours(**self._kept(make, "neighbours"))

    def student(self, *, dense: bool = False) -> nn.Module | None:
        """A student; None if the model raises an error on its training images, which may be unlike all clean ones."""
        subject = self.subject

        def make() -> dict[str, Tensor]:
            settings = (subject.model, self.examples, self.num_classes, subject.eps, subject.seed)
            try:
                return own_state(train_student(*settings, norm=subject.norm, dense=dense))
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:  # a model may raise anything on images that it was not made for
                return {}

        kept = self._kept(make, "dense_student" if dense else "student")
        return rebuild_student(kept) if kept else None

    def _kept(self, make: Callable[[], dict[str, Tensor]], name: str) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = once(self.subject, name, lambda: self._made(make, name))
        return kept

    def _made(self, make: Callable[[], dict[str, Tensor]], name: str) -> dict[str, Tensor]:
        if self.folder is None:
            return make()
        path, device = self.folder / f"{name}.safetensors", self.examples.images.device
        try:
            return keep_or_load(make, path, resume=self.resume, device=device)
        except (KeyError, RuntimeError) as error:
            raise InputError(f"{path} holds another surrogate: choose another run_dir.") from error
