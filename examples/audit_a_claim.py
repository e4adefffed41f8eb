"""Audit a claim that is too good to be true. Run: python examples/audit_a_claim.py

The model rounds its pixels, so no gradient reaches them, and an attack that follows gradients finds little.
"""

import torch
from torch import Tensor, nn

import ecnn
from ecnn.attacks import PGD


class Rounding(nn.Module):
    """Sixteen shades of grey."""

    def forward(self, images: Tensor) -> Tensor:
        return (15 * images).round() / 15


def main(*, epochs: int = 10, limit: int = 100) -> None:
    """Trains for so many epochs, and attacks and audits so many test images."""
    data = ecnn.load_data("digits")
    torch.manual_seed(0)
    network = ecnn.ResNet(10, in_channels=1, depth=8, width=6, mean=data.mean_image)
    ecnn.fit(
        network, data.train, val=data.val, recipe="small", objective="cross_entropy", epochs=epochs, seed=0
    )
    model = nn.Sequential(Rounding(), network)
    plain = PGD(norm="linf", eps=0.12, steps=40, step_size=0.02)
    claim = ecnn.evaluate(model, data.test, {"pgd": plain}, limit=limit).accuracy["pgd"]
    audit = ecnn.audit(model, data.test, norm="linf", eps=0.12, claim=claim, limit=limit, budget="quick")
    print(f"claimed {claim:.0%}, audited {audit.accuracy:.0%}: {audit.verdict}")
    print(*(f"- {finding.claim}" for finding in audit.findings if finding.level == "alarm"), sep="\n")


if __name__ == "__main__":
    main()
