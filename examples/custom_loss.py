"""An attack with a loss of your own, and training against it. Run: python examples/custom_loss.py

`on=` takes any function (model, images, labels) -> (batch,) to be raised. This one asks for the members' mean doubt
about the right bit; attacks, evaluation and adversarial training need not know more.
"""

from typing import Any

import torch
from torch import Tensor

import ecnn
from ecnn.attacks import PGD

CODE = ecnn.load_code("10x30")


def doubt(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    """(batch,) how unsure the members are of their right bits, on average."""
    signs = torch.tensor(CODE.signed, dtype=torch.float32)[labels]
    right: Tensor = (signs * model.member_logits(images)).tanh()
    return -right.mean(dim=1)


def main(*, epochs: int = 10, limit: int = 100) -> None:
    """Trains two networks for so many epochs, one against the attack, and attacks so many test images of each."""
    data = ecnn.load_data("digits")
    attack = PGD(norm="linf", eps=0.1, steps=5, step_size=0.04, on=doubt, keep="last")
    stronger = PGD(norm="linf", eps=0.1, steps=40, step_size=0.02, on=doubt)
    for name, facing in (("plain", None), ("adversarial", attack)):
        torch.manual_seed(0)
        model = ecnn.ECNN(CODE, in_channels=1, depth=8, width=6, mean=data.mean_image)
        ecnn.fit(model, data.train, val=data.val, recipe="small", attack=facing, epochs=epochs, seed=0)
        result = ecnn.evaluate(model, data.test, {"doubt": stronger}, limit=limit)
        print(f"{name}: {result.clean_accuracy:.0%} clean, {result.accuracy['doubt']:.0%} under the attack")


if __name__ == "__main__":
    main()
