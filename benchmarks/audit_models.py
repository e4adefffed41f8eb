"""Models to audit: falsely robust ones with the claim that a careless evaluation makes for them, and honest ones.

All are small networks on the embedded 8x8 digits, each trained in seconds on one core and the same every time. A claim
is computed, never typed: a false model's by the weak protocol it names, an honest one's by AutoAttack or by proof.
`SUBJECTS` lists them; `group` says which half a threshold may be chosen on.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

import ecnn
from ecnn import files
from ecnn.attacks import APGD, BIM, FGSM, PGD, Attack, AutoAttack, Square
from ecnn.attacks.views import Loss
from ecnn.backbones import ResNet
from ecnn.baselines import EMPIR, ADPObjective, EMPIRObjective, Ensemble, TRADESObjective
from ecnn.codes import load_code
from ecnn.data import Dataset
from ecnn.model import ECNN
from ecnn.objectives import MemberObjective, score_cross_entropy
from ecnn.training import RECIPES

EPS = 0.1
CERTIFIED_EPS = 0.03
#: Changes when a network, its training or a trick does, so that weights of an older one are not loaded.
VERSION = "1"
PLAIN = dataclasses.replace(RECIPES["small"], shift=0, diversity_weight=0.0)

#: (model, images, labels, eps) -> the accuracy that is claimed.
Protocol = Callable[[nn.Module, Tensor, Tensor, float], float]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and what is said about it.

    Attributes:
        name: of the model, and of its file of weights.
        honest: whether its claim comes from a strong evaluation.
        why: one sentence: what makes it look robust, or why it may be believed.
        make: the untrained network, for a dataset.
        train: trains it where it is.
        claim: what its authors would report.
        protocol: the same in words.
        eps: the Linf radius that the claim is about.
    """

    name: str
    honest: bool
    why: str
    make: Callable[[Dataset], nn.Module]
    train: Callable[[nn.Module, Dataset], None]
    claim: Protocol
    protocol: str
    eps: float = EPS

    def build(self, data: Dataset, folder: Path | None = None) -> nn.Module:
        """The trained model in eval mode; weights found in the folder are read, others are left there."""
        path = None if folder is None else folder / f"{self.name}.safetensors"
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make(data)
            if path is not None and path.exists():
                tensors, header = files.read_tensors(path)
                if header.get("version") == VERSION:
                    model.load_state_dict(tensors)
                    return model.eval()
            self.train(model, data)
        if path is not None:
            tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            files.write_tensors(path, tensors, {"version": VERSION, "name": self.name})
        return model.eval()

    def claimed(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        """The accuracy that its authors would report on these images."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.claim(model, images, labels, self.eps)


# What hides a gradient -----------------------------------------------------------------------------------------------


class Trick(nn.Module):
    """A piece of a network whose gradient is missing, tiny or misleading.

    Attributes:
        opened: True gives a useful gradient at nearly the same outputs, as in training: for an attacker who knows.
    """

    opened: bool = False

    @property
    def is_open(self) -> bool:
        return self.training or self.opened

    def hide(self, value: Tensor, stand_in: Tensor) -> Tensor:
        """The value, without a gradient or with that of what stands in for it (Athalye et al. 2018)."""
        return stand_in + (value - stand_in).detach() if self.is_open else value.detach()


class RoundedPixels(Trick):
    """Pixels rounded to equally spaced levels."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.steps = levels - 1

    def forward(self, images: Tensor) -> Tensor:
        return self.hide((images * self.steps).round() / self.steps, images)


class Thermometer(Trick):
    """One channel per level: whether the pixel reaches it (Buckman et al. 2018)."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, images: Tensor) -> Tensor:
        limits = (torch.arange(self.levels) + 0.5).view(-1, 1, 1) / self.levels
        above = images - limits.to(images)
        return self.hide((above > 0).to(images.dtype), torch.sigmoid(4 * self.levels * above))


class OneHotPixels(Trick):
    """One channel per level: whether the pixel is nearest to it."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, images: Tensor) -> Tensor:
        centres = torch.linspace(0, 1, self.levels).view(-1, 1, 1).to(images)
        nearness = -((self.levels * (images - centres)) ** 2)
        nearest = torch.zeros_like(nearness).scatter(1, nearness.argmax(dim=1, keepdim=True), 1.0)
        return self.hide(nearest, torch.softmax(nearness, dim=1))


class BlockCodec(Trick):
    """The cosine transform of each 8x8 block, rounded more coarsely at higher frequencies, and back, as JPEG does."""

    transform: Tensor
    quanta: Tensor

    def __init__(self, coarseness: float) -> None:
        super().__init__()
        places = torch.arange(8, dtype=torch.float64)
        waves = torch.cos(math.pi / 8 * (places + 0.5) * places[:, None]) / 2
        waves[0] /= math.sqrt(2)
        self.register_buffer("transform", waves.float(), persistent=False)
        quanta = coarseness * (1 + places[:, None] + places)
        self.register_buffer("quanta", quanta.float(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        blocks = images.unfold(2, 8, 8).unfold(3, 8, 8)
        coefficients = self.transform @ blocks @ self.transform.T
        rounded = (coefficients / self.quanta).round() * self.quanta
        restored = (self.transform.T @ rounded @ self.transform).clamp(0, 1)
        return self.hide(restored.transpose(3, 4).reshape(images.shape), images)


class MedianFilter(Trick):
    """Each pixel becomes the median of its surroundings, by a routine that autograd cannot follow."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, images: Tensor) -> Tensor:
        margin = self.window // 2
        padded = F.pad(images, (margin,) * 4, mode="reflect")
        around = padded.unfold(2, self.window, 1).unfold(3, self.window, 1).flatten(4)
        return self.hide(around.median(dim=4).values, around.mean(dim=4))


class SteepFront(Trick):
    """Pixels up a staircase of sigmoids so steep that their float32 derivative is zero nearly everywhere."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, images: Tensor) -> Tensor:
        above = images[..., None] - torch.tensor([0.1, 0.35, 0.6, 0.85]).to(images)
        stairs = torch.sigmoid(self.slope * above).mean(dim=-1)
        return self.hide(stairs, images) if self.is_open else stairs


class Detached(Trick):
    """What it is given, cut off from the graph."""

    def forward(self, images: Tensor) -> Tensor:
        return self.hide(images, images)


class Noise(Trick):
    """Gaussian noise in every pass, drawn from torch's generator; opened it is the mean."""

    def __init__(self, deviation: float) -> None:
        super().__init__()
        self.deviation = deviation

    def forward(self, images: Tensor) -> Tensor:
        if self.opened:
            return images
        return images + self.deviation * torch.randn_like(images)


class RandomResize(Trick):
    """Another size and place in a frame of zeros in every pass (Xie et al. 2018); opened always the same."""

    def __init__(self, smallest: int, frame: int) -> None:
        super().__init__()
        self.smallest, self.frame = smallest, frame

    def forward(self, images: Tensor) -> Tensor:
        if self.opened:
            size, left, top = (self.smallest + self.frame) // 2, 1, 1
        else:
            size = int(torch.randint(self.smallest, self.frame + 1, ()))
            left, top = torch.randint(self.frame - size + 1, (2,)).tolist()
        resized = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
        return F.pad(resized, (left, self.frame - size - left, top, self.frame - size - top))


class TestTimeDropout(Trick):
    """Dropout that is never switched off; opened it is its mean."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, features: Tensor) -> Tensor:
        return features if self.opened else F.dropout(features, self.share, training=True)


class RoundedActivation(Trick):
    """ReLU, then rounding to multiples of a step."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def forward(self, features: Tensor) -> Tensor:
        active = F.relu(features)
        return self.hide((active / self.step).round() * self.step, active)


class WinnersTakeAll(Trick):
    """The largest share of the features; the others become zero (Xiao et al. 2020): scores jump everywhere."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, features: Tensor) -> Tensor:
        count = max(1, round(self.share * features.shape[1]))
        least = features.topk(count, dim=1).values[:, -1:]
        return features * (features >= least)


class Scaled(Trick):
    """Scores multiplied by a number; opened or in training as they were."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, scores: Tensor) -> Tensor:
        return scores if self.is_open else self.factor * scores


class Probabilities(Trick):
    """The softmax of sharpened scores in their place."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = sharpness

    def forward(self, scores: Tensor) -> Tensor:
        return scores if self.is_open else torch.softmax(self.sharpness * scores, dim=1)


class Decoy(Trick):
    """Scores of one network with the gradient of another, untrained one."""

    def __init__(self, network: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.network, self.other = network, other

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        return scores if self.is_open else self.hide(scores, scores) + self._silent(images)

    def _silent(self, images: Tensor) -> Tensor:
        """Zeros whose gradient is the other network's."""
        misleading: Tensor = self.other(images)
        return misleading - misleading.detach()


def open_tricks(model: nn.Module) -> nn.Module:
    """A copy in which every trick shows a useful gradient; the model itself if there is none."""
    if not any(isinstance(module, Trick) for module in model.modules()):
        return model
    opened = copy.deepcopy(model)
    for module in opened.modules():
        if isinstance(module, Trick):
            module.opened = True
    return opened


def informed_accuracy(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> float:
    """Share of images right when clean and under attackers who know how the model hides.

    An upper bound of the true robust accuracy that does not depend on the audit: attacks on the model with its tricks
    opened, on its members where it has some, and on nothing but scores, all verified on the model as it is. Of a random
    model it is the mean over new passes at the point of each image where earlier passes were wrong most often.
    """
    opened = open_tricks(model)
    common: dict[str, Any] = {"norm": "linf", "eps": eps}
    climb: dict[str, Any] = {"steps": 40, "step_size": eps / 8, "keep": "last", **common}
    attacks: list[tuple[Attack, nn.Module]] = [
        (PGD(loss="margin", **climb), opened),
        (PGD(loss="cross_entropy", **climb), opened),
        (APGD(steps=50, loss="dlr", targets=9, **common), opened),
        (PGD(steps=40, step_size=eps / 8, restarts=3, **common), model),
        (Square(queries=1000, **common), model),
    ]
    if hasattr(opened, "member_logits"):
        attacks += [
            (PGD(on="members", targets=targets, steps=40, step_size=eps / 8, **common), opened)
            for targets in (0, 9)
        ]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        points = [images, *(attack.run(shown, images, labels).images for attack, shown in attacks)]
        worst = torch.stack([_share_right(model, part, labels) for part in points]).argmin(dim=0)
        chosen = torch.stack(points)[worst, torch.arange(len(images))]
        return float(_share_right(model, chosen, labels).mean())


def _share_right(model: nn.Module, images: Tensor, labels: Tensor, draws: int = 20) -> Tensor:
    """(batch,) how often the model is right in so many passes."""
    with torch.no_grad():
        passes = [model(images).argmax(dim=1) == labels for _ in range(draws)]
    return torch.stack(passes).double().mean(dim=0)


# Networks ------------------------------------------------------------------------------------------------------------


def dense(inputs: int = 64, width: int = 64, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, width),
        activation(),
        nn.Linear(width, width),
        activation(),
        nn.Linear(width, 10),
    )


def convolutional(in_channels: int = 1, width: int = 8) -> nn.Sequential:
    """Two convolutions, the second strided, an average over the image, and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(18 * width, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def resnet(data: Dataset) -> nn.Module:
    return ResNet(10, 1, depth=8, width=6, mean=data.mean_image)


def coded(data: Dataset, *, code: str = "10x15", **options: Any) -> nn.Module:
    return ECNN(load_code(code), 1, depth=8, width=6, feature_dim=16, mean=data.mean_image, **options)


def two_symbols(data: Dataset) -> nn.Module:
    """Members with one output per symbol. Training by margin sees differences of outputs alone, so that what the head
    adds to both stays as it was drawn, here 20 times larger than usual.
    """
    model: Any = coded(data, member_output="symbols")
    with torch.no_grad():
        model.head.weight += 19 * model.head.weight.mean(dim=0, keepdim=True)
    return model  # type: ignore[no-any-return]


def voting(data: Dataset) -> nn.Module:
    return Ensemble(10, 1, num_members=3, depth=8, width=4, mean=data.mean_image)


def low_precision(data: Dataset) -> nn.Module:
    return EMPIR(10, 1, depth=8, width=4, mean=data.mean_image)


def always(make: Callable[[], nn.Module]) -> Callable[[Dataset], nn.Module]:
    """A network that needs nothing from the dataset."""
    return lambda data: make()


# Training ------------------------------------------------------------------------------------------------------------


def training(
    objective: Any = "cross_entropy", *, epochs: int, attack: Attack | None = None, lr: float | None = None
) -> Callable[[nn.Module, Dataset], None]:
    def train(model: nn.Module, data: Dataset) -> None:
        ecnn.fit(
            model,
            data.train,
            val=None,
            recipe=PLAIN,
            objective=objective,
            epochs=epochs,
            lr=lr,
            attack=attack,
            seed=0,
        )

    return train


def first(train: Callable[[nn.Module, Dataset], None]) -> Callable[[nn.Module, Dataset], None]:
    """Trains the first part of a stack alone, so that the attack of its training sees its scores as they are."""

    def train_first(model: Any, data: Dataset) -> None:
        train(model[0], data)

    return train_first


def facing(eps: float = EPS, steps: int = 5, **options: Any) -> PGD:
    """The attack of adversarial training."""
    settings: dict[str, Any] = {"loss": "cross_entropy", "keep": "last", **options}
    return PGD(norm="linf", eps=eps, steps=steps, step_size=2.5 * eps / steps, **settings)


def distilled(temperature: float, epochs: int) -> Callable[[nn.Module, Dataset], None]:
    """Defensive distillation (Papernot et al. 2016): a pupil learns a teacher's probabilities, both warm."""

    def warm_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return score_cross_entropy(model(images) / temperature, labels).mean()

    def train(model: nn.Module, data: Dataset) -> None:
        teacher = copy.deepcopy(model)
        training(warm_loss, epochs=epochs, lr=0.02)(teacher, data)

        def pupil_loss(pupil: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = torch.softmax(teacher(images) / temperature, dim=1)
            logs = torch.log_softmax(pupil(images) / temperature, dim=1)
            return -(wanted * logs).sum(dim=1).mean()

        training(pupil_loss, epochs=epochs, lr=0.02)(model, data)

    return train


def interval_margins(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """(batch, class) proven lower bounds of true score minus each score, by intervals (Gowal et al. 2018)."""
    low, high = (images - eps).clamp(min=0).flatten(1), (images + eps).clamp(max=1).flatten(1)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    for layer in layers[:-1]:
        low, high = (F.relu(bound) for bound in _through(layer.weight, layer.bias, low, high))
    last = layers[-1]
    apart = last.weight[labels][:, None] - last.weight  # (batch, class, feature)
    shift = last.bias[labels][:, None] - last.bias
    middle, radius = (low + high) / 2, (high - low) / 2
    return (apart * middle[:, None]).sum(2) + shift - (apart.abs() * radius[:, None]).sum(2)


def _through(weight: Tensor, bias: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    middle, radius = F.linear((low + high) / 2, weight, bias), F.linear((high - low) / 2, weight.abs())
    return middle - radius, middle + radius


def interval_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the worst scores that intervals allow, beside the usual one."""
    proven = score_cross_entropy(-interval_margins(model, images, labels, CERTIFIED_EPS), labels).mean()
    return proven + score_cross_entropy(model(images), labels).mean()


# Claims --------------------------------------------------------------------------------------------------------------


def reports(make: Callable[[float], Attack], count: Literal["robust", "after"] = "robust") -> Protocol:
    """The accuracy under one attack: images right before and after it, or as in the paper's tables only after."""

    def claim(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> float:
        attacked = make(eps).run(model, images, labels)
        right = attacked.predictions == labels
        if count == "robust":
            with torch.no_grad():
                right &= model(images).argmax(dim=1) == labels
        return float(right.double().mean())

    return claim


def proven_by_intervals(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> float:
    with torch.no_grad():
        margins = interval_margins(model, images, labels, eps)
    margins.scatter_(1, labels[:, None], math.inf)
    return float((margins.amin(dim=1) > 0).double().mean())


def known_exactly(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> float:
    """Of a linear model, for which intervals are exact: against each wrong class a corner of the box is worst."""
    return proven_by_intervals(model, images, labels, eps)


def fgsm(eps: float) -> Attack:
    return FGSM(norm="linf", eps=eps)


def bim(eps: float) -> Attack:
    return BIM(norm="linf", eps=eps, steps=10, step_size=eps / 4)


def pgd(eps: float) -> Attack:
    return PGD(norm="linf", eps=eps, steps=10, step_size=eps / 4, loss="cross_entropy")


def large_steps(loss: Loss) -> Callable[[float], Attack]:
    """As the paper's authors attack: 200 steps of half the radius, and the last iterate."""

    def make(eps: float) -> Attack:
        return PGD(norm="linf", eps=eps, steps=200, step_size=eps / 2, loss=loss, loss_slack=50, keep="last")

    return make


def own_label(eps: float) -> Attack:
    """Given no labels, it attacks what the model says; steps as long as the ball is wide, the last iterate."""
    return PGD(
        norm="linf",
        eps=eps,
        steps=7,
        step_size=2 * eps,
        loss="cross_entropy",
        keep="last",
        labels="predicted",
    )


def short_walk(eps: float) -> Attack:
    """Ten steps that together cover a tenth of the radius, from the image."""
    return BIM(norm="linf", eps=eps, steps=10, step_size=eps / 100)


def autoattack(eps: float) -> Attack:
    return AutoAttack(norm="linf", eps=eps)


# The list ------------------------------------------------------------------------------------------------------------


def false(name: str, why: str, make: Any, train: Any, claim: Protocol, protocol: str) -> Subject:
    return Subject(name=name, honest=False, why=why, make=make, train=train, claim=claim, protocol=protocol)


def honest(
    name: str,
    why: str,
    make: Any,
    train: Any,
    claim: Protocol | None = None,
    protocol: str = "AutoAttack",
    eps: float = EPS,
) -> Subject:
    claim = reports(autoattack) if claim is None else claim
    return Subject(
        name=name, honest=True, why=why, make=make, train=train, claim=claim, protocol=protocol, eps=eps
    )


def _stack(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts)


_FGSM, _BIM, _PGD = "FGSM", "BIM, 10 steps", "PGD on cross-entropy, 10 steps"
_FALSE = [
    false(
        "q2_hinge",
        "members of two symbols trained by margin: attacks on scores raise their free common level instead",
        two_symbols,
        training(MemberObjective(kind="hinge", diversity_weight=0.1), epochs=15),
        reports(large_steps("margin"), "after"),
        "the paper's PGD on scores, last iterate",
    ),
    false(
        "binary_cross_entropy",
        "cross-entropy drives members into the flat parts of tanh",
        coded,
        training(MemberObjective(kind="cross_entropy", diversity_weight=0.1), epochs=30, lr=0.01),
        reports(large_steps("cross_entropy"), "after"),
        "the paper's PGD on scores with cross-entropy, last iterate",
    ),
    false(
        "scaled_logits",
        "scores times 10,000: the gradient of cross-entropy is exactly zero",
        always(lambda: _stack(convolutional(), Scaled(1e4))),
        training(epochs=15, lr=0.01),
        reports(pgd),
        _PGD,
    ),
    false(
        "rounded_pixels",
        "pixels rounded to four levels: no gradient",
        always(lambda: _stack(RoundedPixels(4), dense())),
        training(epochs=15),
        reports(pgd),
        _PGD,
    ),
    false(
        "thermometer",
        "thermometer-coded pixels: no gradient",
        always(lambda: _stack(Thermometer(10), dense(640))),
        training(epochs=10),
        reports(bim),
        _BIM,
    ),
    false(
        "one_hot_pixels",
        "one-hot coded pixels: no gradient",
        always(lambda: _stack(OneHotPixels(8), dense(512))),
        training(epochs=10),
        reports(bim),
        _BIM,
    ),
    false(
        "noisy_input",
        "fresh noise in every pass spoils a single gradient, and the best iterate was only lucky",
        always(lambda: _stack(Noise(0.1), dense())),
        training(epochs=20),
        reports(pgd),
        _PGD,
    ),
    false(
        "random_resize",
        "another size and place in every pass",
        always(lambda: _stack(RandomResize(8, 12), convolutional())),
        training(epochs=20, lr=0.01),
        reports(fgsm),
        _FGSM,
    ),
    false(
        "random_dropout",
        "dropout stays on at test time",
        always(lambda: dense(activation=lambda: _stack(nn.ReLU(), TestTimeDropout(0.5)))),
        training(epochs=20),
        reports(fgsm),
        _FGSM,
    ),
    false(
        "probabilities",
        "a second softmax on saturated probabilities has no gradient",
        always(lambda: _stack(convolutional(), Probabilities(200))),
        training(epochs=15, lr=0.01),
        reports(pgd),
        _PGD,
    ),
    false(
        "detached",
        "the input is cut off from the graph",
        always(lambda: _stack(Detached(), dense())),
        training(epochs=10),
        reports(pgd),
        _PGD,
    ),
    false(
        "decoy",
        "the gradient is that of another network",
        always(lambda: Decoy(dense(), dense())),
        training(epochs=10),
        reports(pgd),
        _PGD,
    ),
    false(
        "rounded_activation",
        "activations are rounded: no gradient",
        always(lambda: dense(activation=lambda: RoundedActivation(0.5))),
        training(epochs=15),
        reports(pgd),
        _PGD,
    ),
    false(
        "tiny_scores",
        "scores times 1e-43: their order stays, their gradients underflow",
        always(lambda: _stack(convolutional(), Scaled(1e-43))),
        training(epochs=15, lr=0.01),
        reports(pgd),
        _PGD,
    ),
    false(
        "winners_take_all",
        "only the largest activations pass, so that scores jump at every step",
        always(lambda: dense(width=256, activation=lambda: WinnersTakeAll(0.1))),
        training(epochs=15),
        reports(fgsm),
        _FGSM,
    ),
    false(
        "steep_front",
        "pixels through a sigmoid that is flat nearly everywhere",
        always(lambda: _stack(SteepFront(3000), dense())),
        training(epochs=15),
        reports(bim),
        _BIM,
    ),
    false(
        "block_codec",
        "blocks are compressed and restored first: no gradient",
        always(lambda: _stack(BlockCodec(0.15), dense())),
        training(epochs=15),
        reports(pgd),
        _PGD,
    ),
    false(
        "median_filter",
        "a median filter without a gradient stands before the network",
        always(lambda: _stack(MedianFilter(3), dense())),
        training(epochs=20),
        reports(pgd),
        _PGD,
    ),
    false(
        "adp_one_step",
        "diverse members that vote, attacked by one step only",
        voting,
        training(ADPObjective(), epochs=12),
        reports(fgsm),
        _FGSM,
    ),
    false(
        "empir_one_step",
        "members of low precision that vote, attacked by one step only",
        low_precision,
        training(EMPIRObjective(), epochs=15),
        reports(fgsm),
        _FGSM,
    ),
    false(
        "distilled",
        "defensive distillation at temperature 100: cross-entropy saturates",
        always(dense),
        distilled(100, epochs=15),
        reports(pgd),
        _PGD,
    ),
    false(
        "trained_on_one_step",
        "trained on FGSM until it has learnt FGSM and nothing else",
        resnet,
        training(epochs=30, attack=FGSM(norm="linf", eps=2 * EPS, keep="last")),
        reports(fgsm),
        _FGSM,
    ),
    false(
        "own_label_last_iterate",
        "an ordinary network; the attack has no labels, strides across the ball and reports its last iterate",
        resnet,
        training(epochs=10),
        reports(own_label, "after"),
        "PGD without labels, 7 steps of twice the radius, last iterate",
    ),
    false(
        "short_walk",
        "an ordinary network; the attack covers a tenth of the ball",
        always(convolutional),
        training(epochs=15, lr=0.01),
        reports(short_walk),
        "BIM, 10 steps of a hundredth of the radius",
    ),
]
_HONEST = [
    honest("adversarial_resnet", "trained on PGD", resnet, training(epochs=20, attack=facing())),
    honest(
        "adversarial_ecnn",
        "members trained on PGD against members",
        lambda data: coded(data, batch_norm=True),
        training(MemberObjective(kind="cross_entropy"), epochs=20, attack=facing(on="members")),
    ),
    honest(
        "adversarial_linear_ecnn",
        "linear members, linear decoder, trained on PGD",
        lambda data: coded(data, branch="linear", decoder="linear", batch_norm=True),
        training(MemberObjective(kind="cross_entropy"), epochs=20, attack=facing()),
    ),
    honest(
        "adversarial_adp",
        "diverse members trained on PGD",
        voting,
        training(ADPObjective(), epochs=20, attack=facing()),
    ),
    honest(
        "trades",
        "trained by TRADES",
        always(convolutional),
        training(TRADESObjective(eps=EPS, steps=5, step_size=EPS / 3), epochs=20),
    ),
    honest(
        "adversarial_dense",
        "trained on PGD",
        always(lambda: dense(width=128)),
        training(epochs=30, attack=facing()),
    ),
    honest("undefended_resnet", "claims what AutoAttack leaves", resnet, training(epochs=10)),
    honest("undefended_ecnn", "claims what AutoAttack leaves", coded, training(MemberObjective(), epochs=15)),
    honest(
        "linear",
        "linear: the worst point is known",
        always(lambda: _stack(nn.Flatten(), nn.Linear(64, 10))),
        training(epochs=15),
        known_exactly,
        "closed form",
        EPS / 2,
    ),
    honest(
        "small_radius",
        "an ordinary network and a small radius",
        always(convolutional),
        training(epochs=15, lr=0.01),
        eps=0.02,
    ),
    honest(
        "certified",
        "trained by interval bounds, claims what they prove",
        always(dense),
        training(interval_loss, epochs=30, lr=0.005),
        proven_by_intervals,
        "interval bounds",
        CERTIFIED_EPS,
    ),
    honest(
        "with_probabilities",
        "trained on PGD, and gives probabilities",
        always(lambda: _stack(dense(width=128), Probabilities(1))),
        first(training(epochs=30, attack=facing())),
    ),
    honest(
        "with_saturated_cross_entropy",
        "an ordinary network with large scores, which claims what AutoAttack leaves",
        always(lambda: _stack(dense(), Scaled(1e4))),
        training(epochs=10),
    ),
    honest(
        "with_scaled_logits",
        "trained on PGD, and its scores happen to be large",
        always(lambda: _stack(dense(width=128), Scaled(1e4))),
        first(training(epochs=30, attack=facing())),
    ),
]

SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in (*_FALSE, *_HONEST)}


def group(subject: Subject) -> Literal["tuning", "held-out"]:
    """Which half it belongs to: by name order among its own kind, every other one. Thresholds never see the second."""
    names = sorted(other.name for other in SUBJECTS.values() if other.honest == subject.honest)
    return "tuning" if names.index(subject.name) % 2 == 0 else "held-out"
