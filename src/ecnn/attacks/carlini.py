"""Carlini & Wagner's L2 attack and variants: Adam on an unbounded variable, with a search for the constant c."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ecnn.attacks.attempts import Rows
from ecnn.attacks.base import Cost, Target
from ecnn.attacks.images import per_image
from ecnn.attacks.minimal import MinimumNormAttack, misclassified
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import Aim, Look, View, WeakestBit, decode_linearly, find_score_view, members_of
from ecnn.checks import check_count, check_counts, check_number

_BETAS, _TINY = (0.9, 0.999), 1e-8  # Adam's, as published
_NO_PROGRESS = 0.999  # of the loss at the last check
_CHECKS, _LEAST_BETWEEN_CHECKS = 10, 20
_LARGEST_CONSTANT = 1e10
_STRETCH = 0.9


@dataclass(frozen=True, kw_only=True)
class _TanhAttack(MinimumNormAttack):
    """The settings that all attacks here share; `CarliniWagnerL2` explains them."""

    steps: int
    search_steps: int
    initial_constant: float
    confidence: float = 0.0
    lr: float = 0.01
    abort_early: bool = True
    pull_steps: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "steps", "search_steps")
        check_count("pull_steps", self.pull_steps, least=0)
        check_number("initial_constant", self.initial_constant, above=True)
        check_number("lr", self.lr, above=True)
        check_number("confidence", self.confidence)

    def cost(self, num_classes: int) -> Cost:
        steps = self.steps * self.search_steps
        return Cost(2 + steps + self.pull_steps, steps)


@dataclass(frozen=True, kw_only=True)
class CarliniWagnerL2(_TanhAttack):
    """The attack of Carlini & Wagner (2017) in L2: Adam on |x' - x|^2 + c max(margin + confidence, 0).

    The margin is the score of the label minus the best other score. x' is a tanh of an unbounded w, which keeps it in
    [0, 1]. Each image has its own c: ten times larger after each failure until a success, then halfway between the
    largest that failed and the smallest that succeeded. The result is the nearest point found that is misclassified by
    `confidence`, or without one the nearest misclassified point. A step costs a forward pass, and a gradient unless (on
    a CPU) the margin term is 0; images whose search is over leave the batch.

    Attributes:
        steps: the largest number of Adam steps with each constant.
        search_steps: how many constants are tried for each image; the authors' 9.
        initial_constant: the first constant; the authors' 0.001.
        confidence: by how much a wrong class must lead, in scores; the authors' kappa.
        lr: learning rate of Adam; the authors' 0.01.
        abort_early: go to the next constant when a tenth of the steps, and at least twenty, has not lowered an image's
            loss by 0.1 %.
        pull_steps: bisection steps, at the end, on the line from the image to the point found: Adam stays about one
            step length away from the border. 0 as published.
        on: the view that is attacked: "scores", "linear", "tempered" or another `ScoreView`.

    Departs: x' is (tanh(w) + 1)/2 as in the original, where the paper's appendix prints x + (tanh(w) + 1)/2. Here the
        tanh is stretched by 1/0.9 and w is bounded so that x' stays in [0, 1]: black and white pixels can then move
        like others. In the authors' program they start at 0.999999 of the tanh's range, where hundreds of steps hardly
        move them.
    Departs: the authors' program starts every constant at the image, and any success counts for it. Here the descent
        goes on from its current point, and only successes since the last check count: the first few steps can cross the
        border merely by their length, and too small a constant would seem large enough.
    Departs: the authors' program aborts when the summed loss of the batch has not fallen by 0.01 %; here this is
        decided for each image.
    """

    on: str | View = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        find_score_view(self.on)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        return _Descent(self, target, find_score_view(self.on), self.confidence).run(images, labels).found


@dataclass(frozen=True, kw_only=True)
class BlindSpot(CarliniWagnerL2):
    """The blind-spot attack (Zhang et al. 2019; Verma & Swami 2019): `CarliniWagnerL2` on images of less contrast.

    Pixels x become 0.5 + shrink (x - 0.5): people see the same image with less contrast, but such images are not in the
    training data. Distances are measured from the shrunken image, so the result lies in [0, 1] but far from the given
    image. A shrunken image that is already misclassified counts as success. A failure returns the image as given.

    Attributes:
        shrink: the paper's alpha, 0.8 in its tables.
    """

    shrink: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("shrink", self.shrink, most=1, above=True)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        points = 0.5 + self.shrink * (images - 0.5)
        broken = misclassified(target, None, points, labels)
        rest = torch.nonzero(~broken).squeeze(1)
        if len(rest):
            points[rest] = super().search(target.narrow(rest), points[rest], labels[rest], draws.take(rest))
        return points


@dataclass(frozen=True, kw_only=True)
class MemberCarliniWagner(_TanhAttack):
    """The fine-tuned C&W attack (Zhang et al. 2020): to the codeword of a wrong class, on logits before any tanh.

    Minimises |x' - x|^2 - c min(min_n 2 t_n z_n, confidence). The member furthest from its wanted bit t_n decides, and
    no decoder can hide it by saturating. Members with logits per symbol have their margin in place of 2 t_n z_n. A
    point is a success if the model misclassifies it, even if some bits are not the goal's. With a confidence above 0
    a point counts fully only if every member has its wanted bit by that margin too. Their program takes 1000 steps, 10
    search steps and the initial constant 0.01; the paper's row 2000, 10 and 0.1.

    Attributes:
        lr: learning rate of Adam; their 0.005.
        targets: how many wrong classes each image tries in turn, those with the highest linear scores of the clean
            image; the nearest result is kept. The other settings are those of `CarliniWagnerL2`.

    Departs: from their program as `CarliniWagnerL2` does from its authors'.
    """

    #: The view, which also decides what the attack needs of a model: members and a code.
    on: ClassVar[View] = WeakestBit()

    lr: float = 0.005
    targets: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("targets", self.targets)

    def cost(self, num_classes: int) -> Cost:
        return super().cost(num_classes) * min(self.targets, num_classes - 1)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        with torch.no_grad(), target.autocast():
            scores = decode_linearly(*members_of(target.model, images)).scatter(1, labels[:, None], -math.inf)
        target.count(1)
        goals = scores.topk(min(self.targets, scores.shape[1] - 1), dim=1).indices
        demanded = self.confidence if self.confidence > 0 else -math.inf
        descent = _Descent(self, target, self.on, demanded)
        best: _State | None = None
        for goal in goals.unbind(dim=1):
            state = descent.run(images, labels, goal)
            best = state if best is None else _nearer(best, state)
        assert best is not None  # two classes at least
        return best.found


@dataclass(kw_only=True)
class _State(Rows):
    """State of the search of each image, (batch,) or image-shaped; `broken` means that the search is over.

    Attributes:
        rows: positions of the images in the whole batch.
        place, mean, square: w, and Adam's running averages of the gradient and of its square.
        constant, low, high: the current c, the largest that failed and the smallest that succeeded.
        age, tried: steps taken with this constant, and how many constants are finished.
        lowest, checked: the lowest loss with this constant, now and at the last check.
        won: True once a step since the last check gave a point that is misclassified by the required margin.
        idle: True when the last point was so far over the border that the loss had no weight.
        found, nearest: the best point so far and its squared distance.
        sure: True once `found` is misclassified by the required margin.
    """

    results: ClassVar[tuple[str, ...]] = ("broken", "found", "nearest", "sure")
    rows: Tensor
    images: Tensor
    labels: Tensor
    goals: Tensor | None
    place: Tensor
    mean: Tensor
    square: Tensor
    constant: Tensor
    low: Tensor
    high: Tensor
    age: Tensor
    tried: Tensor
    lowest: Tensor
    checked: Tensor
    won: Tensor
    idle: Tensor
    found: Tensor
    nearest: Tensor
    sure: Tensor


def _nearer(one: _State, other: _State) -> _State:
    """The better of two searches for the same images, row by row: the one that is sure, otherwise the nearer one.

    Changes and returns `one`.
    """
    wins = torch.where(one.sure == other.sure, other.nearest < one.nearest, other.sure)
    one.found = torch.where(per_image(wins, one.found), other.found, one.found)
    one.nearest, one.sure = torch.where(wins, other.nearest, one.nearest), one.sure | other.sure
    return one


class _Descent:
    """Adam on all images at once, each with its own constant.

    An image gets its next constant without waiting for the others, so that the batch stays full. The CPU reads the
    state, and so waits for the GPU, only at the checks.

    Args:
        view: the view whose loss is raised, up to the attack's confidence.
        demanded: the required margin: besides being misclassified, a point is `sure` if its loss reaches this.
    """

    def __init__(self, attack: _TanhAttack, target: Target, view: View, demanded: float) -> None:
        self.attack, self.whole, self.view, self.demanded = attack, target, view, demanded
        self.every = max(_LEAST_BETWEEN_CHECKS, attack.steps // _CHECKS)

    def run(self, images: Tensor, labels: Tensor, goals: Tensor | None = None) -> _State:
        self.target, self.steps_taken = self.whole, 0
        whole = self.state = self._start(images, labels, goals)
        while len(self.state.rows):
            age = self.state.age
            until = torch.minimum(self.every - age % self.every, self.attack.steps - age)
            for _ in range(int(until.min())):
                self._step()
            self._check()
            whole = self._drop(whole)
        self._pull(whole)
        return whole

    def _start(self, images: Tensor, labels: Tensor, goals: Tensor | None) -> _State:
        def full(value: float) -> Tensor:
            return torch.full(images.shape[:1], value, dtype=images.dtype, device=images.device)

        zeros, no = torch.zeros_like(labels), torch.zeros_like(labels, dtype=torch.bool)
        return _State(
            rows=torch.arange(len(images), device=images.device),
            images=images,
            labels=labels,
            goals=goals,
            place=torch.atanh((2 * images - 1) * _STRETCH),
            mean=torch.zeros_like(images),
            square=torch.zeros_like(images),
            constant=full(float(self.attack.initial_constant)),
            low=full(0),
            high=full(math.inf),
            age=zeros,
            tried=zeros,
            lowest=full(math.inf),
            checked=full(math.inf),
            won=no,
            idle=no,
            found=images,
            nearest=full(math.inf),
            sure=no,
            broken=no,
        )

    def _step(self) -> None:
        state, attack = self.state, self.attack
        points = torch.tanh(state.place).mul_(0.5 / _STRETCH).add_(0.5).clamp_(0, 1)
        look, gradient = self._ascend(points)
        losses = look.losses.to(points.dtype)
        broken = misclassified(self.target, look.scores, points, state.labels)
        moves = points - state.images
        distances = moves.square().flatten(1).sum(dim=1)
        self._note(points, distances, broken, broken & (losses >= self.demanded))
        # The loss alone must not decide when to stop pushing: the loss of another view may reach its goal too early.
        state.idle = broken & (losses >= attack.confidence)
        weight = state.constant * ~state.idle
        total = distances + weight * (attack.confidence - losses)
        state.lowest = torch.minimum(state.lowest, total)
        state.age = state.age + 1
        # d tanh(w) = 1 - tanh(w)^2; Adam is not affected by constant factors that all pixels share.
        inner = (2 * points - 1).mul_(_STRETCH)
        self._adam(moves.mul_(2).sub_(gradient * per_image(weight, points)).mul_(1 - inner.square_()))

    def _ascend(self, points: Tensor) -> tuple[Look, Tensor]:
        """The view's look at the points, and its gradient; zeros for idle images, whose loss has no weight.

        On a CPU, images that were idle one step ago first get a forward pass only: most of them are idle again. On
        CUDA a new batch size costs more than this saves, so every image gets a gradient.
        """
        state = self.state
        if points.is_cuda or not state.idle.any():
            return self.target.ascend(self.view, points, Aim(state.labels, state.goals))

        def about(rows: Tensor) -> tuple[Tensor, Aim]:
            goals = None if state.goals is None else state.goals[rows]
            return points[rows], Aim(state.labels[rows], goals)

        idle = torch.nonzero(state.idle).squeeze(1)
        target = self.target.narrow(idle)
        seen = target.look(self.view, *about(idle))
        stays = misclassified(target, seen.scores, points[idle], state.labels[idle])
        stays &= seen.losses >= self.attack.confidence
        quiet = idle[stays]
        if len(quiet) == len(points):
            return seen, torch.zeros_like(points)
        rest = torch.nonzero(torch.ones_like(state.idle).index_fill(0, quiet, False)).squeeze(1)
        look, gradient = self.target.narrow(rest).ascend(self.view, *about(rest))
        order = torch.cat([quiet, rest]).argsort()
        losses, scores = torch.cat([seen.losses[stays], look.losses])[order], None
        if seen.scores is not None and look.scores is not None:
            scores = torch.cat([seen.scores[stays], look.scores])[order]
        return Look(losses, scores), torch.cat([torch.zeros_like(points[quiet]), gradient])[order]

    def _note(self, points: Tensor, distances: Tensor, broken: Tensor, sure: Tensor) -> None:
        """Keeps the nearest point; a point that is sure replaces any that is only misclassified."""
        state = self.state
        better = torch.where(sure == state.sure, broken & (distances < state.nearest), sure)
        state.found = torch.where(per_image(better, points), points, state.found)
        state.nearest = torch.where(better, distances, state.nearest)
        state.sure, state.won = state.sure | sure, state.won | sure

    def _adam(self, slope: Tensor) -> None:
        state, (first, second) = self.state, _BETAS
        self.steps_taken += 1
        state.mean.lerp_(slope, 1 - first)
        state.square.mul_(second).addcmul_(slope, slope, value=1 - second)
        size = state.square.sqrt().div_(math.sqrt(1 - second**self.steps_taken)).add_(_TINY)
        length = self.attack.lr / (1 - first**self.steps_taken)
        edge = math.atanh(_STRETCH)
        state.place.addcdiv_(state.mean, size, value=-length).clamp_(-edge, edge)

    def _check(self) -> None:
        """Gives the next constant to the images that are done with theirs."""
        state, attack = self.state, self.attack
        due, done = state.age % self.every == 0, state.age >= attack.steps
        if attack.abort_early:
            done = done | (due & (state.lowest > _NO_PROGRESS * state.checked))
        state.checked = torch.where(due, state.lowest, state.checked).masked_fill(done, math.inf)
        state.high = torch.where(done & state.won, torch.minimum(state.high, state.constant), state.high)
        state.low = torch.where(done & ~state.won, state.constant, state.low)
        larger = (10 * state.constant).clamp(max=_LARGEST_CONSTANT)
        following = torch.where(torch.isinf(state.high), larger, (state.low + state.high) / 2)
        state.constant = torch.where(done, following, state.constant)
        state.won = state.won & ~(due | done)
        state.lowest = state.lowest.masked_fill(done, math.inf)
        state.age, state.tried = state.age * ~done, state.tried + done.long()
        state.broken = state.tried >= attack.search_steps

    def _drop(self, whole: _State) -> _State:
        """Drops the images whose search is over from the batch, and stores their results in `whole`."""
        state = self.state
        kept = torch.nonzero(~state.broken).squeeze(1)
        if len(kept) < len(state.rows):
            if whole is not state:
                whole.put(state.rows, state)
            self.state, self.target = state.take(kept), self.target.narrow(kept)
        return whole

    def _pull(self, whole: _State) -> None:
        """Moves the points found towards their images by bisection, while they stay misclassified (and sure)."""
        found = torch.nonzero(torch.isfinite(whole.nearest)).squeeze(1)
        if not (len(found) and self.attack.pull_steps):
            return
        part, target = whole.take(found), self.whole.narrow(found)
        low, high = torch.zeros_like(part.nearest), torch.ones_like(part.nearest)
        moves = part.found - part.images
        for _ in range(self.attack.pull_steps):
            middle = (low + high) / 2
            points = (part.images + per_image(middle, moves) * moves).clamp(0, 1)
            look = target.look(self.view, points, Aim(part.labels, part.goals))
            holds = misclassified(target, look.scores, points, part.labels)
            holds &= (look.losses >= self.demanded) | ~part.sure
            low, high = torch.where(holds, low, middle), torch.where(holds, middle, high)
            part.found = torch.where(per_image(holds, points), points, part.found)
        part.nearest = part.nearest * high.square()
        whole.put(found, part)
