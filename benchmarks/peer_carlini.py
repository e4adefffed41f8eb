"""Carlini & Wagner's L2 attack from other libraries, with our names for its settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def foolbox_carlini(
    model: nn.Module, images: Tensor, labels: Tensor, *, abort_early: bool = True, **settings: Any
) -> Tensor:
    import foolbox

    attack = foolbox.attacks.L2CarliniWagnerAttack(
        binary_search_steps=settings["search_steps"],
        steps=settings["steps"],
        stepsize=settings["lr"],
        confidence=0,
        initial_const=settings["initial_constant"],
        abort_early=abort_early,
    )
    wrapped = foolbox.PyTorchModel(model.eval(), bounds=(0, 1), device=images.device)
    crafted: Tensor = attack(wrapped, images, labels, epsilons=None)[1]
    return crafted


def cleverhans_carlini(
    model: nn.Module, images: Tensor, labels: Tensor, *, num_classes: int = 10, **settings: Any
) -> Tensor:
    from cleverhans.torch.attacks.carlini_wagner_l2 import carlini_wagner_l2

    crafted: Tensor = carlini_wagner_l2(
        model.eval(),
        images,
        num_classes,
        y=labels,
        lr=settings["lr"],
        initial_const=settings["initial_constant"],
        binary_search_steps=settings["search_steps"],
        max_iterations=settings["steps"],
    )
    return crafted


def art_classifier(model: nn.Module, images: Tensor, num_classes: int = 10) -> Any:
    """The model wrapped as a classifier of ART."""
    from art.estimators.classification import PyTorchClassifier

    return PyTorchClassifier(
        model.eval(),
        loss=nn.CrossEntropyLoss(),
        input_shape=tuple(images.shape[1:]),
        nb_classes=num_classes,
        clip_values=(0, 1),
        device_type="gpu" if images.is_cuda else "cpu",
    )


def art_carlini(
    model: nn.Module, images: Tensor, labels: Tensor, *, num_classes: int = 10, **settings: Any
) -> Tensor:
    """ART's attack. Instead of Adam it has a line search, which takes up to ten passes in each step."""
    from art.attacks.evasion import CarliniL2Method

    attack = CarliniL2Method(
        art_classifier(model, images, num_classes),
        learning_rate=settings["lr"],
        binary_search_steps=settings["search_steps"],
        max_iter=settings["steps"],
        initial_const=settings["initial_constant"],
        batch_size=len(images),
        verbose=False,
    )
    return torch.from_numpy(attack.generate(images.cpu().numpy(), labels.cpu().numpy()))
