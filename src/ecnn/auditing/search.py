"""A search for the best views to attack a model through: many are tried for a few steps, the best get full attacks.

Yao et al. (2021) search over attack, loss, network transformation and randomness for each defence. The space here is
smaller and made for the model: layers that predict its answers, with or without straight-through gradients, behind a
preprocessor, or with fitted networks for opaque parts. Views are tried on images that the usual attacks left. If these
leave none, nothing is searched. If no view breaks any of them, the audit pays for the search and no more.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecnn import files
from ecnn.asking import copy_model
from ecnn.attacks import Draws
from ecnn.attacks.norms import NORMS
from ecnn.attacks.views import View
from ecnn.auditing.adaptive import MeanAround, gradient_lengths
from ecnn.auditing.bpda import Passing, can_pass_through
from ecnn.auditing.layers import Layer, LayerScores, LayerVotes, survey_layers
from ecnn.auditing.opaque import (
    Bridge,
    Bridged,
    ImageBridge,
    ImageInput,
    Skipping,
    SkippingBy,
    find_dead_modules,
    find_image_inputs,
    fit_bridges,
    fit_image_bridge,
)
from ecnn.auditing.subject import Subject
from ecnn.auditing.trials import STEPS, TRIAL_PASSES, Found, Scene, or_else, set_scene, try_views, walk
from ecnn.errors import InputError

_DIRECT, _READ = 4, 3  # most layers with scores per class, and most linear probes of others
_PAIRS = 4
_INPUTS = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Known:
    """What `find_out` has found out about a model, and `views_of` makes views from.

    Attributes:
        layers: those that predict the model's answers.
        bridges: by key, networks fitted to its opaque parts.
        dead: names of modules that block the gradient.
        inputs: inner modules whose input is a transformed form of the images.
        fitted: by name of such a module, a network fitted to what comes before it.
        can_pass: whether `straight_through` gives gradients that the model hides.
    """

    layers: list[Layer]
    bridges: dict[str, Bridge]
    dead: tuple[str, ...]
    inputs: list[ImageInput]
    fitted: dict[str, ImageBridge]
    can_pass: bool

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, for a resumed audit; `settings` has the rest."""
        kept: dict[str, Tensor] = {}
        for layer in self.layers:
            kept[f"{layer.key}|about"] = torch.tensor(
                [layer.explains, layer.sign], dtype=torch.float64, device="cpu"
            )
            if layer.weight is not None and layer.bias is not None:
                kept[f"{layer.key}|weight"], kept[f"{layer.key}|bias"] = layer.weight, layer.bias
        for key, bridge in self.bridges.items():
            kept |= {f"{key}|{name}": value for name, value in bridge.state_dict().items()}
        for module, fitted in self.fitted.items():
            kept |= {f"before {module}|{name}": value for name, value in fitted.state_dict().items()}
        return {name: value.contiguous() for name, value in kept.items()}

    def settings(self) -> dict[str, Any]:
        """All but the tensors, as plain JSON values."""
        return {
            "layers": [layer.key for layer in self.layers],
            "bridges": list(self.bridges),
            "dead": list(self.dead),
            "inputs": [[place.module, place.call] for place in self.inputs],
            "fitted": {module: list(bridge.size) for module, bridge in self.fitted.items()},
            "can_pass": self.can_pass,
        }

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Known:
        """The object that gave these `tensors` and `settings`."""
        layers = []
        for key in settings["layers"]:
            explains, sign = tensors[f"{key}|about"].tolist()
            layers.append(
                Layer(key, explains, sign, tensors.get(f"{key}|weight"), tensors.get(f"{key}|bias"))
            )

        def own(key: str) -> dict[str, Tensor]:
            return {name.split("|")[1]: value for name, value in tensors.items() if name.split("|")[0] == key}

        return cls(
            layers=layers,
            bridges={key: Bridge.restore(key, own(key)) for key in settings["bridges"]},
            fitted={
                module: ImageBridge.restore(tuple(size), own(f"before {module}"))
                for module, size in settings["fitted"].items()
            },
            dead=tuple(settings["dead"]),
            inputs=[ImageInput(*place) for place in settings["inputs"]],
            can_pass=settings["can_pass"],
        )


def search(
    subject: Subject,
    examples: Tensor,
    num_classes: int,
    *,
    is_random: bool,
    folder: Path | None = None,
    resume: bool = True,
) -> Found:
    """The views that break images which the usual attacks leave; an empty result if these leave none.

    Args:
        subject: what is audited.
        examples: (image, channel, height, width) more images, on which layers and bridges are fitted.
        num_classes: of the model.
        is_random: whether two passes of the model differ.
        folder: where the result is saved, so that a resumed audit attacks through the same views; None for nowhere.
        resume: reads a saved result from the folder.
    """
    kept = None if folder is None else (folder / "search.safetensors", folder / "search.json")
    if kept is not None and resume and all(files.exists(path) for path in kept):
        return _kept(kept, num_classes, subject.eps, subject.images.device)
    known = Known(layers=[], bridges={}, dead=(), inputs=[], fitted={}, can_pass=False)
    found = Found(views={}, broken={}, ways={}, standing=0, asked=0)
    if not len(subject.images):
        return found
    # A model that remembers its inputs must not remember these: a copy is searched if one can be made.
    subject = dataclasses.replace(subject, model=or_else(lambda: copy_model(subject.model), subject.model))
    scene = set_scene(subject, examples, num_classes, is_random=is_random)
    if len(scene.labels):
        known = find_out(scene)
        found = try_views(scene, views_of(known, num_classes, subject.eps))
    if kept is not None:
        files.write_tensors(kept[0], known.tensors(), {"format": "ecnn-search"})
        counts = {
            "broken": found.broken,
            "ways": found.ways,
            "standing": found.standing,
            "asked": found.asked,
        }
        files.write_json(kept[1], {**counts, "known": known.settings()})
    return found


def _kept(kept: tuple[Path, Path], num_classes: int, eps: float, device: torch.device) -> Found:
    try:
        tensors, _ = files.read_tensors(kept[0])
        values = files.read_json(kept[1])
        on_device = {name: value.to(device) for name, value in tensors.items()}
        views = views_of(Known.restore(on_device, values["known"]), num_classes, eps)
        broken = {name: int(count) for name, count in values["broken"].items()}
        ways = {
            name: tuple((int(site), bool(said)) for site, said in forced)
            for name, forced in values["ways"].items()
        }
        return Found(
            views={name: views[name] for name in broken if name not in ways},
            broken=broken,
            ways=ways,
            standing=int(values["standing"]),
            asked=int(values["asked"]),
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{kept[1]} is damaged ({error}): delete it.") from error


def find_out(scene: Scene) -> Known:
    """Surveys the layers of a model and finds parts that block or hide gradients; what raises an error is left out."""
    model, points, seed = scene.model, scene.points, scene.subject.seed
    few = scene.images[:8]
    moved = NORMS[scene.subject.norm].random(
        few, scene.subject.eps, Draws.of(scene.subject.seed, torch.arange(len(few), device=few.device))
    )
    layers = or_else(lambda: survey_layers(model, points, scene.num_classes), [])
    dead = or_else(lambda: find_dead_modules(model, few, moved), ())
    bridges = or_else(lambda: _fit_twice(scene, dead), {})
    inputs = or_else(lambda: find_image_inputs(model, few), [])[:_INPUTS]
    can_pass = can_pass_through(model, few[:4])
    # A preprocessor needs a fitted network only if its own gradient may be hidden.
    needed = inputs if can_pass or bridges or not or_else(lambda: _has_gradient(model, few), False) else []
    fitted = {
        place.module: or_else(partial(fit_image_bridge, model, place, points, seed), None) for place in needed
    }
    return Known(
        layers=layers,
        bridges=bridges,
        dead=dead,
        inputs=inputs,
        fitted={module: bridge for module, bridge in fitted.items() if bridge is not None},
        can_pass=can_pass,
    )


def _has_gradient(model: nn.Module, images: Tensor) -> bool:
    """Whether the model's own gradient of the margin is finite and nonzero for all these images."""
    lengths = gradient_lengths(model, images)
    return bool((torch.isfinite(lengths) & (lengths > 0)).all())


def _fit_twice(scene: Scene, dead: tuple[str, ...]) -> dict[str, Bridge]:
    """Bridges, fitted a second time with the points that an attack through the first ones leads to."""
    seed = scene.subject.seed
    bridges = fit_bridges(scene.model, scene.points, seed, dead)
    if not bridges:
        return {}
    view = Bridged(view="scores", bridges=bridges, dead=dead)
    attack = walk(scene.subject, view, STEPS, passes=TRIAL_PASSES if scene.is_random else 1, ends=True)
    made = attack.run(scene.model, scene.images, scene.labels, seed=seed).images
    return fit_bridges(scene.model, torch.cat([scene.points, made, (made + scene.images) / 2]), seed, dead)


def views_of(known: Known, num_classes: int, eps: float) -> dict[str, View]:
    """Every view to try, by name: a place in the model combined with a way to get gradients from there."""
    places = _places(known.layers, num_classes)
    views: dict[str, View] = dict(places)
    views["smoothed"] = MeanAround(view="scores", pairs=_PAIRS, deviation=eps / 2)
    if known.can_pass:
        everything: dict[str, str | View] = {"scores": "scores", **places}
        views |= {f"{name}-straight": Passing(view=view) for name, view in everything.items()}
        views["scores-straight-mod"] = Passing(view="scores", cuts_remainders=False)
        views["smoothed-straight"] = MeanAround(view=Passing(view="scores"), pairs=_PAIRS, deviation=eps / 2)
    views["scores-leaky"] = Passing(view="scores", leaks=True)
    if known.dead:
        views["scores-dead"] = Passing(view="scores", dead=known.dead)
    if known.bridges:
        views["scores-bridged"] = Bridged(view="scores", bridges=known.bridges, dead=known.dead)
        best = next(iter(places.items()), None)
        if best is not None:
            views[f"{best[0]}-bridged"] = Bridged(view=best[1], bridges=known.bridges, dead=known.dead)
    for place in known.inputs:
        around: dict[str, Any] = {"module": place.module, "call": place.call}
        views[f"scores-from-{place.module}"] = Skipping(view="scores", **around)
        inner: View = Passing(view="scores", dead=known.dead)
        views[f"scores-straight-from-{place.module}"] = Skipping(view=inner, **around)
        if place.module in known.fitted:
            around["bridge"] = known.fitted[place.module]
            views[f"scores-fitted-from-{place.module}"] = SkippingBy(view="scores", **around)
            views[f"scores-straight-fitted-from-{place.module}"] = SkippingBy(view=inner, **around)
            del around["bridge"]
        for name, view in itertools.islice(places.items(), 2):
            views[f"{name}-from-{place.module}"] = Skipping(view=view, **around)
    return views


def _places(layers: list[Layer], num_classes: int) -> dict[str, View]:
    """Views of the layers that predict best, by their scores or a linear probe, and of votes of layers of one kind."""
    ranked = sorted(layers, key=lambda layer: -round(layer.explains, 2))  # of equal ones the first to run
    direct = [layer for layer in ranked if layer.sign][:_DIRECT]
    read = [layer for layer in ranked if not layer.sign]
    nearly = [layer for layer in layers if not layer.sign and layer.explains >= read[0].explains - 0.05]
    read = list({layer.key: layer for layer in (*read[: _READ - 1], *nearly[:1])}.values())
    places: dict[str, View] = {layer.key: layer.view(num_classes) for layer in (*direct, *read)}
    kinds: dict[tuple[str, float], list[str]] = {}
    for layer in layers:
        if layer.sign:
            kinds.setdefault((layer.kind, layer.sign), []).append(layer.key)
    for (kind, sign), keys in kinds.items():
        scores = LayerScores(layers=tuple(keys), num_classes=num_classes, sign=sign)
        if len(keys) > 1:
            places[f"{kind}-all"] = scores
        if len(keys) > 1 or f"x{num_classes}" in kind:
            places[f"{kind}-votes"] = LayerVotes(scores=scores)
    return places
