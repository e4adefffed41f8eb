"""The whole story on the embedded 8x8 digits, in two minutes on a laptop: design, train, attack, audit.

Three networks are attacked as papers often do it, and audited. Run: python examples/demo.py [folder]; pictures and
reports go to the folder, out/ if not given.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ecnn
from ecnn.attacks import PGD
from ecnn.objectives import MemberObjective
from ecnn.training import RECIPES

EPS = 0.12
RECIPE = dataclasses.replace(RECIPES["small"], shift=0)  # these digits are centred
# The paper's settings, relative to its radius: 200 large steps, and only the last point counts.
PAPER = PGD(norm="linf", eps=EPS, steps=200, step_size=EPS / 2, loss="cross_entropy", keep="last")
# What the third network is trained against: an attack on its members' logits, which no decoder can hide.
FACING = PGD(
    norm="linf", eps=EPS, steps=5, step_size=EPS / 3, on="members", loss="cross_entropy", keep="last"
)


def main(folder: Path, *, limit: int = 360, most_epochs: int = 30) -> None:
    """Everything, on the first `limit` test images; there are 360."""
    data = ecnn.load_data("digits")
    torch.manual_seed(0)

    code = ecnn.design_code(num_classes=10, code_length=30, objective="distance", seed=0)
    code.save(folder / "code.json")
    ecnn.plot_code(code, folder / "code.png")
    print(code.report(), flush=True)

    def train(model: nn.Module, **options: Any) -> nn.Module:
        options["epochs"] = min(most_epochs, options["epochs"])
        ecnn.fit(model, data.train, val=data.val, recipe=RECIPE, seed=0, **options)
        return model.eval()

    small: dict[str, Any] = {"in_channels": 1, "depth": 8, "width": 6, "mean": data.mean_image}
    networks: dict[str, Callable[[], nn.Module]] = {
        "plain": lambda: train(ecnn.ResNet(10, **small), objective="cross_entropy", epochs=15),
        "ecnn": lambda: train(
            ecnn.ECNN(code, **small),
            objective=MemberObjective(kind="cross_entropy", diversity_weight=0.1),
            epochs=30,
            lr=0.01,
        ),
        "ecnn-at": lambda: train(
            ecnn.ECNN(code, **small), objective="member_cross_entropy", epochs=25, attack=FACING
        ),
    }
    rows = [f"{'network':<10}{'clean':>8}{'as papers attack':>19}{'audited':>10}   95 % interval   verdict"]
    for name, make in networks.items():
        started = time.monotonic()
        model = make()
        found = ecnn.evaluate(model, data.test, {"paper": PAPER}, limit=limit)
        claim = round(found.accuracy_after["paper"], 2)  # as a paper would print it
        shutil.rmtree(folder / name, ignore_errors=True)
        audit = ecnn.audit(
            model,
            data.test,
            norm="linf",
            eps=EPS,
            claim=claim,
            limit=limit,
            budget="quick",
            run_dir=folder / name,
        )
        ecnn.plot_audit(audit, folder / name / "audit.png")
        low, high = (100 * bound for bound in audit.interval)
        rows.append(
            f"{name:<10}{100 * audit.clean_accuracy:>6.1f} %{100 * claim:>17.0f} %{100 * audit.accuracy:>8.1f} %   "
            f"{low:>4.1f} to {high:>4.1f} %   {audit.verdict}"
        )
        print(f"trained, attacked and audited {name}: {time.monotonic() - started:.0f} s", flush=True)
    print(f"\n{limit} test images, Linf {EPS}", *rows, sep="\n")
    print(f"\nwrote {folder}/code.png and, of each network, {folder}/NETWORK/audit.md, .png and .json")


if __name__ == "__main__":
    torch.set_num_threads(1)  # for networks this small a second thread costs more than it brings
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out"))
