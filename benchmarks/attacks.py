"""Compares attacks with those of other libraries: same model, same images, same settings, in one run.

Run: python benchmarks/attacks.py [--device cuda] [--images 1000] [--seeds 3] [--rounds 1] [--parts cw]
[--only ecnn foolbox] [--entry NAME] [--json JSON] with the libraries of peers.txt installed (`make peers`). It writes
attacks.json and attacks.md beside this file, with one entry per type of device unless --entry names another. Images are
the first of the CIFAR-10 test set, from --root or from an .npz (--npz) with uint8 images and labels. With --quick it
makes few steps on random images, in seconds, and writes to out/quick: this only shows that everything runs.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pages import page_by_device, table
from peer_carlini import art_carlini, art_classifier, cleverhans_carlini, foolbox_carlini
from torch import Tensor, nn

import ecnn
from ecnn import files, runs
from ecnn.asking import without_tf32
from ecnn.attacks import PGD, Attack, AutoAttack, CarliniWagnerL2, Square

HERE = Path(__file__).parent
EPS, STEP = 8 / 255, 2 / 255
QUICK = "--quick" in sys.argv
PGD_STEPS, WARM_UP_STEPS = (4, 1) if QUICK else (200, 6)
CW: dict[str, Any] = {
    "steps": 4 if QUICK else 100,
    "search_steps": 5,
    "initial_constant": 0.01,
    "lr": 0.01,
}
SQUARE_EPS, SQUARE_QUERIES = 0.5, 20 if QUICK else 5000
ROBUST, STANDARD = "cifar10-resnet20-at", "cifar10-ecnn30"

#: Crafts images from (model, images, labels).
Craft = Attack | Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """An attack of one library to measure: one row of a table.

    Attributes:
        warm_up: the same attack with few steps, run before the clock starts, because libraries choose their kernels
            when they first get images of a new shape.
        limit: on the number of images, if all of them would take too long.
    """

    name: str
    craft: Craft
    warm_up: Craft | None = None
    seed: int = 0
    limit: int | None = None


Cases = Iterator[Case]


class Counted(nn.Module):
    """The model, with a count of the images that were passed through it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.images = model, 0

    def forward(self, images: Tensor) -> Tensor:
        self.images += len(images)
        scores: Tensor = self.model(images)
        return scores


def import_peers() -> None:
    """Imports the other libraries before anything is timed; a missing one causes an error in its own rows only."""
    for name in (
        "foolbox",
        "torchattacks",
        "cleverhans.torch.attacks.carlini_wagner_l2",
        "art.attacks.evasion",
        "pyautoattack",
    ):
        with suppress(ImportError):
            importlib.import_module(name)


def measure(case: Case, model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """One row: seconds, images forwarded, and images broken, as judged by a forward pass of our own."""
    images, labels = images[: case.limit], labels[: case.limit]
    counted = Counted(model)
    if case.warm_up is not None:
        with suppress(Exception):
            case.warm_up(model, images, labels)
    torch.manual_seed(0)
    wait(images)
    started = time.perf_counter()
    try:
        if isinstance(case.craft, Attack):
            # Our attacks count by themselves: a pass that is replayed on CUDA never calls `Counted.forward`.
            attacked = case.craft.run(model, images, labels, seed=case.seed)
            crafted, counted.images = attacked.images, int(attacked.forwards.sum())
        else:
            crafted = case.craft(counted, images, labels).detach().to(images)
    except Exception as error:  # the row of a library that fails holds the error
        if QUICK and isinstance(case.craft, Attack):
            raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return report({"name": case.name, "seed": case.seed, "error": reason})
    wait(images)
    seconds = time.perf_counter() - started
    with torch.no_grad(), without_tf32():
        clean, after = (model(batch).argmax(1) == labels for batch in (images, crafted))
    black = crafted.flatten(1).abs().amax(1) == 0
    broken = clean & ~after & ~black
    moves = (crafted - images).flatten(1)
    lengths = moves.norm(dim=1)
    of_all = torch.where(broken, lengths, math.inf)[clean].median()
    row = {
        "name": case.name,
        "seed": case.seed,
        "images": len(images),
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "forwarded": counted.images,
        "clean": int(clean.sum()),
        "broken": int(broken.sum()),
        "black": int(black.sum()),
        "median_l2": float(lengths[broken].median()) if broken.any() else None,
        "median_l2_of_all": float(of_all) if of_all < math.inf else None,
        "largest_linf": float(moves.abs().max()),
    }
    return report(row)


def report(row: dict[str, Any]) -> dict[str, Any]:
    sys.stderr.write(f"{row}\n")
    return row


def wait(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize()


def pgd_cases(*, on_cuda: bool) -> Cases:
    """Linf PGD on cross-entropy: one random start, last iterate; ours also with early exit, as a row of its own."""

    def crafts(steps: int) -> dict[str, Craft]:
        settings: dict[str, Any] = {
            "norm": "linf",
            "eps": EPS,
            "steps": steps,
            "step_size": STEP,
            "loss": "cross_entropy",
            "quick": True,
        }
        found: dict[str, Craft] = {"ecnn": PGD(keep="last", **settings), "ecnn, early exit": PGD(**settings)}
        found |= peer_pgd(steps)
        if on_cuda:
            found["ecnn, bfloat16"] = PGD(keep="last", precision="bfloat16", **settings)
            found["torchattacks, bfloat16"] = in_half(peer_pgd(steps)["torchattacks"])  # the fastest peer
        return found

    short = crafts(WARM_UP_STEPS)
    for name, craft in crafts(PGD_STEPS).items():
        yield Case(name, craft, warm_up=short[name])


def in_half(craft: Any) -> Craft:
    """Another library's attack under autocast to bfloat16, for comparison with our precision="bfloat16"."""

    def run(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(images.device.type, dtype=torch.bfloat16):
            crafted: Tensor = craft(model, images, labels)
        return crafted.float()

    return run


def peer_pgd(steps: int) -> dict[str, Craft]:
    def with_foolbox(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        import foolbox

        wrapped = foolbox.PyTorchModel(model.eval(), bounds=(0, 1), device=x.device)
        attack = foolbox.attacks.LinfPGD(abs_stepsize=STEP, steps=steps, random_start=True)
        crafted: Tensor = attack(wrapped, x, y, epsilons=EPS)[1]
        return crafted

    def with_torchattacks(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        import torchattacks

        crafted: Tensor = torchattacks.PGD(model.eval(), eps=EPS, alpha=STEP, steps=steps)(x, y)
        return crafted

    def with_cleverhans(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        from cleverhans.torch.attacks.projected_gradient_descent import projected_gradient_descent

        crafted: Tensor = projected_gradient_descent(
            model.eval(), x, EPS, STEP, steps, np.inf, clip_min=0, clip_max=1, y=y, sanity_checks=False
        )
        return crafted

    def with_art(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        from art.attacks.evasion import ProjectedGradientDescentPyTorch

        attack = ProjectedGradientDescentPyTorch(
            art_classifier(model, x),
            eps=EPS,
            eps_step=STEP,
            max_iter=steps,
            num_random_init=1,
            batch_size=len(x),
            verbose=False,
        )
        return torch.from_numpy(attack.generate(x.cpu().numpy(), y.cpu().numpy()))

    return {
        "foolbox": with_foolbox,
        "torchattacks": with_torchattacks,
        "cleverhans": with_cleverhans,
        "art": with_art,
    }


def cw_cases() -> Cases:
    """C&W L2, untargeted, confidence 0; one row of ours has a fixed constant, since torchattacks searches for none."""
    whole: dict[str, Any] = {**CW, "abort_early": False, "early_exit": False, "quick": True}
    single: dict[str, Any] = {**whole, "search_steps": 1, "initial_constant": 1.0}
    crafts: dict[str, Craft] = {
        "ecnn": CarliniWagnerL2(**whole),
        **peer_cw(),
        "ecnn, one constant": CarliniWagnerL2(**single),
        "ecnn, early exit": CarliniWagnerL2(**{**CW, "quick": True}),
    }
    for name, craft in crafts.items():
        yield Case(name, craft)


def art_cases() -> Cases:
    """ART's C&W: a part of its own on few images, because its line search takes many times more passes."""
    yield Case("art", partial(art_carlini, **CW), limit=20)


def peer_cw() -> dict[str, Craft]:
    def with_torchattacks(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        import torchattacks

        crafted: Tensor = torchattacks.CW(model.eval(), c=1, kappa=0, steps=CW["steps"], lr=CW["lr"])(x, y)
        return crafted

    return {
        "foolbox": partial(foolbox_carlini, **CW, abort_early=False),
        "cleverhans": partial(cleverhans_carlini, **CW),
        "torchattacks, one constant": with_torchattacks,
    }


def auto_cases(seeds: int) -> Cases:
    """AutoAttack, standard version, ours and the original, for each seed."""
    ours = AutoAttack(norm="linf", eps=EPS, quick=True)
    for seed in range(seeds):

        def with_peer(model: nn.Module, x: Tensor, y: Tensor, seed: int = seed) -> Tensor:
            from pyautoattack import AutoAttack as Peer

            suite = Peer(model.eval(), norm="Linf", eps=EPS, seed=seed, version="standard", device=x.device)
            crafted: Tensor = suite.run_standard_evaluation(x, y, batch_size=len(x))[0]
            return crafted

        for title, craft in (("ecnn", ours), ("pyautoattack", with_peer)):
            yield Case(title, craft, seed=seed)


def square_cases(seeds: int) -> Cases:
    """Square in L2 with AutoAttack's settings, of all libraries that have it; ours also with other moves."""

    def with_pyautoattack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        from pyautoattack.square import SquareAttack

        attack = SquareAttack(model, "L2", SQUARE_QUERIES, SQUARE_EPS, resc_schedule=False, device=x.device)
        crafted: Tensor = attack.perturb(x, y)
        return crafted

    def with_torchattacks(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        import torchattacks

        crafted: Tensor = torchattacks.Square(
            model.eval(), norm="L2", eps=SQUARE_EPS, n_queries=SQUARE_QUERIES, resc_schedule=False
        )(x, y)
        return crafted

    settings: tuple[tuple[str, Literal["bumps", "turns"], bool], ...] = (
        ("ecnn", "bumps", False),
        ("ecnn, turns", "turns", False),
        ("ecnn, rescaled", "bumps", True),
        ("ecnn, turns, rescaled", "turns", True),
    )
    for seed in range(seeds):
        for name, l2_moves, rescale in settings:
            attack = Square(
                norm="l2",
                eps=SQUARE_EPS,
                queries=SQUARE_QUERIES,
                l2_moves=l2_moves,
                rescale=rescale,
                quick=True,
            )
            yield Case(name, attack, seed=seed)
    yield Case("pyautoattack", with_pyautoattack)
    yield Case("torchattacks", with_torchattacks)


def load_images(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    if QUICK:
        images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        return images, ecnn.load_model(ROBUST)(images).argmax(dim=1)
    if options.npz:
        arrays = np.load(options.npz)
        images, labels = (torch.from_numpy(arrays[key][: options.images]) for key in ("images", "labels"))
        return images.float().div(255), labels.long()
    return ecnn.load_data("cifar10", root=options.root).test[: options.images]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="all libraries in turns so often; medians")
    parser.add_argument("--root", default="data")
    parser.add_argument("--npz", default=None)
    parser.add_argument("--json", type=Path, default=HERE / "attacks.json")
    parser.add_argument("--parts", default="pgd,cw,cw_art,auto,auto_standard,square", help="in this order")
    parser.add_argument("--only", nargs="+", help="rows of these names, such as ecnn torchattacks")
    parser.add_argument("--entry", default=None, help="of the JSON to write to; the device's type")
    parser.add_argument(
        "--quick", action="store_true", help="little of everything, to out/quick: does it run?"
    )
    options = parser.parse_args()
    if QUICK:
        options.seeds, options.json = 1, Path("out/quick/attacks.json")
        # The model of "auto_standard" breaks at once; that of "auto" takes long.
        options.parts = options.parts.replace("auto,", "")
    everything = files.read_json(options.json) if options.json.exists() else {}
    if options.parts:
        import_peers()
        measure_parts(options, everything)
    files.write_text(options.json.with_suffix(".md"), markdown(everything))


def measure_parts(options: argparse.Namespace, everything: dict[str, Any]) -> None:
    """Measures the parts named in the options, and writes the JSON after every row."""
    images, labels = (tensor.to(options.device) for tensor in load_images(options))
    robust, standard = (ecnn.load_model(name, device=options.device) for name in (ROBUST, STANDARD))
    for model in (robust, standard):  # warm-up: libraries initialise themselves, and kernels are compiled
        PGD(norm="linf", eps=EPS, steps=3, step_size=STEP, quick=True)(model, images[:64], labels[:64])
    parts: dict[str, tuple[nn.Module, Callable[[], Cases]]] = {
        "pgd": (robust, lambda: pgd_cases(on_cuda=images.is_cuda)),
        "cw": (robust, cw_cases),
        "cw_art": (robust, art_cases),
        "auto": (robust, lambda: auto_cases(options.seeds)),
        "auto_standard": (standard, lambda: auto_cases(options.seeds)),
        "square": (robust, lambda: square_cases(options.seeds)),
    }
    result = everything.setdefault(options.entry or images.device.type, {})
    result["environment"] = runs.environment()
    for part in options.parts.split(","):
        model, make_cases = parts[part]
        result[part] = rows = []
        for turn in range(options.rounds):
            cases = [case for case in make_cases() if not options.only or case.name in options.only]
            for place, case in enumerate(cases):
                with without_tf32():
                    row = measure(case, model, images, labels)
                rows.append(row) if turn == 0 else add_round(rows[place], row)
                files.write_json(options.json, everything)


def add_round(row: dict[str, Any], again: dict[str, Any]) -> None:
    """Adds the time of another round to a row: `rounds` keeps all times, and `seconds` becomes their median."""
    if "error" in row or "error" in again:
        return
    row["rounds"] = [*row.get("rounds", [row["seconds"]]), again["seconds"]]
    row["seconds"] = statistics.median(row["rounds"])


ABOUT = """
`python benchmarks/attacks.py` with the libraries of peers.txt: same model, images and settings in one run,
float32 without TF32. broken: right when clean and misclassified after, by a pass of our own; a black image
is a failure. median L2: of the broken images, and of all that were right when clean, failures being
infinitely far, so that rows are compared on the same images. forwarded: images that went through the model.
seconds: the median, where libraries took turns in several rounds (`--rounds`; all of them are in the JSON).
"""


def markdown(everything: dict[str, Any]) -> str:
    """The page of all tables, with a section per device."""
    return page_by_device("Attacks beside other libraries", ABOUT, everything, _section)


def _section(device: str, result: dict[str, Any]) -> list[str]:
    titles = {
        "pgd": f"PGD, Linf 8/255, {PGD_STEPS} steps of 2/255, cross-entropy, last iterate",
        "cw": "Carlini-Wagner L2: " + ", ".join(f"{key} {value}" for key, value in CW.items()),
        "cw_art": "The same by ART",
        "auto": f"AutoAttack standard, Linf 8/255, {ROBUST}",
        "auto_standard": f"AutoAttack standard, Linf 8/255, {STANDARD}",
        "square": f"Square, L2 {SQUARE_EPS}, {SQUARE_QUERIES} queries, {ROBUST}",
    }
    head = (
        "library | seed | images | broken | robust | black | median L2 | of all | seconds | images forwarded"
    )
    lines: list[str] = []
    for part, title in titles.items():
        if part in result:
            threads = result[part][0].get("threads")
            suffix = "" if device == "cuda" or threads is None else f", threads: {threads}"
            lines += ["", f"### {title}{suffix}", "", *table(head, map(_cells, result[part]))]
    return lines[1:]


def _cells(row: dict[str, Any]) -> list[object]:
    start = [row["name"], row.get("seed", 0)]
    if "error" in row:
        return [*start, row["error"], *[""] * 7]
    distances = [row["median_l2"], row.get("median_l2_of_all")]
    robust = 100 * (row["clean"] - row["broken"]) / row["images"]
    counts = [row["images"], f"{row['broken']} of {row['clean']}", f"{robust:.1f} %", row["black"]]
    shown = ["-" if distance is None else f"{distance:.4f}" for distance in distances]
    return [*start, *counts, *shown, f"{row['seconds']:.2f}", f"{row['forwarded']:,}"]


if __name__ == "__main__":
    main()
