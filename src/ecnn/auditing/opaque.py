"""Opaque parts of a model, which block gradients: how they are found, and what replaces them in the backward pass.

A part that turns images into images, such as a filter, is replaced by the identity or by a small network fitted to
it. Any other part is replaced by a fitted network. The forward pass keeps the values of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.attacks.base import raw_gradient
from ecnn.attacks.images import at_once
from ecnn.attacks.views import Aim, Look, WrappedView, find_view
from ecnn.auditing.bpda import straight_through
from ecnn.auditing.soft_values import pass_gradient
from ecnn.auditing.surrogates import step_down

_STEPS, _LR, _BATCH, _WIDTH, _CHANNELS = 400, 3e-3, 64, 128, 16
#: Training stops when `_LESSON` steps lower the error by less than the share `_LEARNT`, or when it is below the share
#: `_LEARNT_ALL` of the targets' variance.
_LESSON, _LEARNT, _LEARNT_ALL = 50, 0.1, 1e-3
_MOST_NUMBERS = 20_000  # in a row on either side of a bridge
_PIXELS = 8192  # numbers in a training batch, which has fewer rows if these are large
_PROBED = 8
_ALIKE = 0.5  # a module's input counts as a form of the images above this median cosine between the two


@dataclass(frozen=True)
class ImageInput:
    """An inner module whose input is a transformed form of the images, such as the network behind a preprocessor.

    Attributes:
        module: its name.
        call: number of its last call with such an input, from 1.
    """

    module: str
    call: int


def find_image_inputs(model: nn.Module, images: Tensor) -> list[ImageInput]:
    """The inner modules whose input resembles the images but differs from them, such as the output of a preprocessor.

    Of several modules with equal inputs only the first is returned.
    """
    heard: dict[str, tuple[int, Tensor]] = {}
    handles = []

    def listen(name: str) -> Any:
        def hear(module: nn.Module, given: tuple[Any, ...]) -> None:
            if given and isinstance(given[0], Tensor) and _is_like(given[0], images):
                heard[name] = (heard[name][0] + 1 if name in heard else 1, given[0].detach())

        return hear

    for name, module in model.named_modules():
        if name and not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_pre_hook(listen(name)))
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    found: list[ImageInput] = []
    seen: list[Tensor] = [images.flatten(1)]
    for name, (call, value) in heard.items():
        rows = value.flatten(1)
        if any(rows.shape == other.shape and torch.equal(rows, other) for other in seen):
            continue
        seen.append(rows)
        if F.cosine_similarity(_in_form(images, value).flatten(1), rows).median() > _ALIKE:
            found.append(ImageInput(name, call))
    return found


def _is_like(value: Tensor, images: Tensor) -> bool:
    """Whether a tensor may be a form of the images: floating, as many rows, and as many channels or numbers in each."""
    if not value.is_floating_point() or len(value) != len(images):
        return False
    return (value.ndim == 4 and value.shape[1] == images.shape[1] and value.shape[2] > 1) or (
        value[0].numel() == images[0].numel()
    )


@dataclass(frozen=True, kw_only=True)
class Skipping(WrappedView):
    """Another view, with a backward pass that skips what comes before an inner module, as if it were the identity.

    Attributes:
        module: name of the inner module.
        call: which of its calls with an input that resembles the images, from 1.
    """

    name: str = "skipping"
    module: str
    call: int

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        view = find_view(self.view)
        calls = 0

        def replace(module: nn.Module, given: tuple[Any, ...]) -> Any:
            nonlocal calls
            if not given or not isinstance(given[0], Tensor) or not _is_like(given[0], images):
                return None
            calls += 1
            if calls != self.call:
                return None
            return (self._connect(images, given[0]), *given[1:])

        handle = model.get_submodule(self.module).register_forward_pre_hook(replace)
        try:
            look = view.look(model, images, aim)
        finally:
            handle.remove()
        return look

    def _connect(self, images: Tensor, made: Tensor) -> Tensor:
        """The values of the module's input, with a gradient that leads to the images."""
        with torch._C.DisableTorchFunction():
            return pass_gradient(made, self._stand_in(images, made))

    def _stand_in(self, images: Tensor, made: Tensor) -> Tensor:
        return _in_form(images, made)


@dataclass(frozen=True, eq=False, kw_only=True)
class SkippingBy(Skipping):
    """`Skipping` with the gradient of a network that was fitted to what comes before the inner module.

    Attributes:
        bridge: that network, from images to the module's input.
    """

    name: str = "skipping, fitted"
    bridge: nn.Module

    def _stand_in(self, images: Tensor, made: Tensor) -> Tensor:
        soft: Tensor = self.bridge(images)
        return soft.view(made.shape)


def _in_form(images: Tensor, made: Tensor) -> Tensor:
    """The images, reshaped or resized to the shape of a tensor made from them."""
    if made.numel() == images.numel():
        return images.reshape(made.shape)
    return F.interpolate(images, size=made.shape[2:], mode="bilinear", align_corners=False)


def find_dead_modules(model: nn.Module, images: Tensor, moved: Tensor) -> tuple[str, ...]:
    """Names of the innermost modules that block the gradient.

    The output of such a module changes with its input. But for most of the images whose output changes, the gradient
    is zero even under `straight_through`.

    Args:
        images, moved: a few images, and the same a little changed; the first eight are used.
    """
    images, moved = images[:_PROBED], moved[:_PROBED]
    first, second = (_hear_modules(model, part) for part in (images, moved))
    dead = []
    for name, (given, said) in first.items():
        if name not in second or second[name][1].shape != said.shape:
            continue
        changes = (second[name][1] != said).flatten(1).any(dim=1)
        if bool(changes.any()) and not _is_followed(given, said)[changes].double().mean() >= 0.5:
            dead.append(name)
    return tuple(name for name in dead if name and not any(other.startswith(f"{name}.") for other in dead))


def _is_followed(given: Tensor, said: Tensor) -> Tensor:
    """(batch,) whether the gradient of a module's output with respect to its input is nonzero."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(said.shape, generator=generator, device="cpu").to(said)
    gradient = raw_gradient((weights * said).sum(), given, again=True)
    return (gradient != 0).flatten(1).any(dim=1)


def _hear_modules(model: nn.Module, images: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By name, input and output of each module in its last call in which both require a gradient."""
    names = {module: name for name, module in model.named_modules()}
    heard: dict[str, tuple[Tensor, Tensor]] = {}

    def hear(module: nn.Module, given: tuple[Any, ...], said: Any) -> None:
        inputs = [value for value in given if isinstance(value, Tensor) and value.requires_grad]
        if module in names and inputs and isinstance(said, Tensor) and said.requires_grad and said.ndim > 1:
            heard[names[module]] = (inputs[0], said)

    points = images.detach().clone().requires_grad_(True)
    handle = nn.modules.module.register_module_forward_hook(hear)
    try:
        with torch.enable_grad(), straight_through(model, batch=len(images)):
            model(points)
    finally:
        handle.remove()
    return heard


class Bridge(nn.Module):
    """A small network that imitates an opaque part of a model: input rows to output rows.

    Args:
        before, after: shapes of an input row and of an output row.
    """

    shift: Tensor
    scale: Tensor
    level: Tensor
    spread: Tensor

    def __init__(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        super().__init__()
        self.after = after
        inputs, outputs = torch.Size(before).numel(), torch.Size(after).numel()
        self.register_buffer("shift", torch.zeros(inputs))
        self.register_buffer("scale", torch.ones(inputs))
        self.register_buffer("level", torch.zeros(outputs))
        self.register_buffer("spread", torch.ones(outputs))
        self.straight = nn.Linear(inputs, outputs)
        self.body = nn.Sequential(
            nn.Linear(inputs, _WIDTH),
            nn.SiLU(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.SiLU(),
            nn.Linear(_WIDTH, outputs),
        )

    @classmethod
    def restore(cls, key: str, state: dict[str, Tensor]) -> Bridge:
        """The bridge with these weights, frozen; the key (`bridge_key`) has the shapes of its rows."""
        before, after = (tuple(int(size) for size in side.split("x") if size) for side in key.split("-to-"))
        # Drawing initial weights, which are replaced below, must not change torch's random state.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            bridge = cls(before, after)
        weight = state["straight.weight"]
        bridge.to(weight.device, weight.dtype).load_state_dict(state)
        return bridge.requires_grad_(False).eval()

    def standard(self, rows: Tensor) -> Tensor:
        """(row, number) the output, standardised by the mean and the standard deviation of the training targets."""
        given = (rows.flatten(1) - self.shift) / self.scale
        said: Tensor = self.straight(given) + self.body(given)
        return said

    def forward(self, rows: Tensor) -> Tensor:
        return (self.standard(rows) * self.spread + self.level).view(len(rows), *self.after)


class ImageBridge(nn.Module):
    """A small convolutional network that imitates an opaque part from images to images, such as a filter or a codec.

    Args:
        channels: of the images.
        size: height and width of the output.
    """

    def __init__(self, channels: int, size: tuple[int, ...]) -> None:
        super().__init__()
        self.size = tuple(size)
        self.straight = nn.Conv2d(channels, channels, 5, padding=2)
        self.body = nn.Sequential(
            nn.Conv2d(channels, _CHANNELS, 5, padding=2),
            nn.SiLU(),
            nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(_CHANNELS, channels, 3, padding=1),
        )

    @classmethod
    def restore(cls, size: tuple[int, ...], state: dict[str, Tensor]) -> ImageBridge:
        """The bridge with these weights and this output size, frozen."""
        weight = state["straight.weight"]
        # Drawing initial weights, which are replaced below, must not change torch's random state.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            bridge = cls(weight.shape[1], size)
        bridge.to(weight.device, weight.dtype).load_state_dict(state)
        return bridge.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[2:]) != self.size:
            images = F.interpolate(images, size=self.size, mode="bilinear", align_corners=False)
        made: Tensor = images + self.straight(images) + self.body(images)
        return made


def fit_image_bridge(model: nn.Module, place: ImageInput, points: Tensor, seed: int) -> ImageBridge | None:
    """A network fitted to what comes before an inner module; None if the module's input has not the shape of images.

    Args:
        place: the module, and which of its calls.
        points: (image, channel, height, width) clean, noisy and attacked images.
        seed: of the initial weights and of the batches.
    """
    made = torch.cat([_given_to(model, place, part) for part in torch.split(points, _BATCH)])
    if made.ndim != 4 and made[0].numel() == points[0].numel():
        made = made.view(points.shape)
    if made.ndim != 4 or made.shape[1] != points.shape[1]:
        return None
    with torch.random.fork_rng(devices=[points.device] if points.is_cuda else []), torch.device("cpu"):
        torch.manual_seed(seed)
        bridge = ImageBridge(points.shape[1], tuple(made.shape[2:])).to(points.device, points.dtype)
    _train(bridge, bridge, points, made, seed)
    return bridge


def _given_to(model: nn.Module, place: ImageInput, images: Tensor) -> Tensor:
    """The input of an inner module in the call that `place` names."""
    heard: list[Tensor] = []

    def hear(module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor) and _is_like(given[0], images):
            heard.append(given[0].detach())

    handle = model.get_submodule(place.module).register_forward_pre_hook(hear)
    try:
        with torch.no_grad():
            model(images)
    finally:
        handle.remove()
    return heard[place.call - 1]


def _train(
    network: nn.Module, ask: Callable[[Tensor], Tensor], rows: Tensor, goal: Tensor, seed: int
) -> None:
    """Trains a network so that `ask` maps the rows to the goal, by least squares; it ends in eval mode, frozen."""
    parameters = list(network.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=_LR)
    generator = torch.Generator().manual_seed(seed)
    # A large image contains many examples of what a filter does, so that few images make a batch.
    batch = max(2, min(_BATCH, _PIXELS // rows[0].numel()))
    total, before = torch.zeros((), dtype=rows.dtype, device=rows.device), math.inf
    enough = _LEARNT_ALL * _LESSON * float(goal.var(correction=0))
    with torch.enable_grad():
        for step in range(1, _STEPS + 1):
            chosen = torch.randint(len(rows), (batch,), generator=generator, device="cpu").to(rows.device)
            loss = F.mse_loss(ask(rows[chosen]), goal[chosen])
            step_down(loss, parameters, optimiser)
            total += loss.detach()
            if step % _LESSON == 0:
                if float(total) > (1 - _LEARNT) * before or float(total) < enough:
                    break
                before = float(total)
                total.zero_()
    for parameter in parameters:
        parameter.grad = None
    network.requires_grad_(False).eval()


def fit_bridges(model: nn.Module, points: Tensor, seed: int, dead: tuple[str, ...] = ()) -> dict[str, Bridge]:
    """By key, a `Bridge` for each opaque part that the images go through, fitted to its inputs and outputs there.

    Parts with more than `_MOST_NUMBERS` numbers in a row, or with a single row, get no bridge.

    Args:
        points: (image, channel, height, width) clean, noisy and attacked images.
        seed: of the initial weights and of the batches.
        dead: names of modules that count as opaque.
    """
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for part in torch.split(points, at_once(_BATCH)):
        asked = part.detach().clone().requires_grad_(True)
        with torch.enable_grad(), straight_through(model, batch=len(part), dead=dead) as mode:
            model(asked)
        for key, before, after in mode.crossings:
            pairs.setdefault(key, []).append((before, after))
    bridges = {}
    for key, crossed in pairs.items():
        before, after = (torch.cat(side) for side in zip(*crossed, strict=True))
        if max(before[0].numel(), after[0].numel()) <= _MOST_NUMBERS and len(before) >= 2:
            bridges[key] = _fit(before, after, seed)
    return bridges


def _fit(before: Tensor, after: Tensor, seed: int) -> Bridge:
    with torch.random.fork_rng(devices=[before.device] if before.is_cuda else []), torch.device("cpu"):
        torch.manual_seed(seed)
        bridge = Bridge(tuple(before.shape[1:]), tuple(after.shape[1:])).to(before.device, before.dtype)
    rows, wanted = before.flatten(1), after.flatten(1)
    bridge.shift.copy_(rows.mean(dim=0))
    bridge.scale.copy_(rows.std(dim=0, correction=0).clamp_min(1e-3 * float(rows.abs().max()) + 1e-12))
    bridge.level.copy_(wanted.mean(dim=0))
    bridge.spread.copy_(wanted.std(dim=0, correction=0).clamp_min(1e-3 * float(wanted.abs().max()) + 1e-12))
    _train(bridge, bridge.standard, rows, (wanted - bridge.level) / bridge.spread, seed)
    return bridge


@dataclass(frozen=True, eq=False, kw_only=True)
class Bridged(WrappedView):
    """Another view under `straight_through`, with the gradient of a fitted network for every opaque part.

    Attributes:
        bridges: these networks by key, as `fit_bridges` returns them.
        dead: names of modules that count as opaque.
    """

    name: str = "bridged"
    bridges: Mapping[str, nn.Module]
    dead: tuple[str, ...] = ()

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        view = find_view(self.view)
        if not torch.is_grad_enabled():
            return view.look(model, images, aim)
        with straight_through(model, batch=len(images), bridges=self.bridges, dead=self.dead):
            look = view.look(model, images, aim)
        return Look(look.losses, None if look.scores is None else look.scores.detach())
