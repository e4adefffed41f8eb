"""Attack a model that knows nothing of this package. Run: python examples/attack_your_own_model.py

Any torch module that takes pixels in [0, 1] and returns one score per class will do. So will any attack: ours, or a
function (model, images, labels) -> images, such as a call of another library.
"""

from typing import Any

import torch
from torch import Tensor, nn

import ecnn
from ecnn.attacks import PGD


def brighten(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """An attack of our own: all pixels become brighter, whatever the model says."""
    return (images + 0.1).clamp(0, 1)


def main(*, epochs: int = 20, limit: int = 100) -> None:
    """Trains for so many epochs and attacks so many test images."""
    data = ecnn.load_data("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    # Train it as you like; `fit` takes any module too.
    ecnn.fit(
        model, data.train, val=data.val, recipe="small", objective="cross_entropy", epochs=epochs, seed=0
    )
    attacks: dict[str, Any] = {
        "brighten": brighten,
        "pgd": PGD(norm="linf", eps=0.1, steps=40, step_size=0.02),
    }
    print(ecnn.evaluate(model, data.test, attacks, limit=limit).table())


if __name__ == "__main__":
    main()
