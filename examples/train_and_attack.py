"""Train an ECNN on small digits and attack it in two places. Run: python examples/train_and_attack.py

One attack looks at the scores that the decoder makes, the other at the members' own answers. An image is robust only if
neither breaks it: the last row of the table.
"""

import torch

import ecnn
from ecnn.attacks import PGD


def main(*, epochs: int = 10, limit: int = 100) -> None:
    """Trains for so many epochs and attacks so many test images."""
    data = ecnn.load_data("digits")  # 8x8 pixels, nothing to download
    torch.manual_seed(0)
    model = ecnn.ECNN(ecnn.load_code("10x30"), in_channels=1, depth=8, width=6, mean=data.mean_image)
    history = ecnn.fit(model, data.train, val=data.val, recipe="small", epochs=epochs, seed=0)
    print(f"the best of {epochs} epochs was number {history.best_epoch + 1}")

    attacks = {
        "scores": PGD(norm="linf", eps=0.12, steps=40, step_size=0.02),
        "members": PGD(norm="linf", eps=0.12, steps=40, step_size=0.02, on="members"),
    }
    print(ecnn.evaluate(model, data.test, attacks, limit=limit).table())


if __name__ == "__main__":
    main()
