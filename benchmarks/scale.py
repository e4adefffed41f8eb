"""Larger networks: compares the audit with AutoAttack on a ResNet-18 and a WRN-28-10 for CIFAR-10.

Run: python benchmarks/scale.py [--device cuda] [--networks resnet18_published resnet18 wrn28_10] [--minutes 5]
[--steps 7] [--eps 8/255] [--images 1000] [--budget fast standard] [--weights FOLDER] [--root data] [--out FOLDER]
[--quick: tiny widths, random images, seconds, to out/quick]
resnet18_published is the ResNet-18 that AutoAttack's authors ship as their example, in the package pyautoattack (make
peers). It is not trained here, and was not trained against attacks, so that images remain right only at a small --eps
such as 1/255. The others are first trained adversarially (PGD of --steps at --eps, bfloat16 on CUDA) for --minutes on
the training images, or read from --weights/NAME.safetensors, which an earlier training has written. A few minutes do
not make them as accurate as published networks, and the page prints their clean accuracy: tools are compared on the
same network. The accuracies of an untrained network mean nothing: with --minutes 0 and no weights only times are
measured, and the row is marked. For each network it reports the seconds (of processor time, on a CPU), the images
forwarded, the images still right and the peak memory of AutoAttack, of the audit at each budget, and of pyautoattack if
it is installed. Writes scale.json and scale.md beside this file, or into --out. Rows of networks that are not named
stay. Each row is written as soon as it is measured, so that a killed run can go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from fast import Count
from pages import page_by_device, table
from torch import Tensor, nn

import ecnn
from ecnn import files, runs
from ecnn.asking import without_tf32
from ecnn.attacks import AutoAttack
from ecnn.auditing import audit
from ecnn.backbones import Normalized
from ecnn.checks import eps_text, parse_eps
from ecnn.data import Dataset, Split

HERE = Path(__file__).parent
PUBLISHED = "resnet18_published"
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)
Row = dict[str, Any]


class Block(nn.Module):
    """Two convolutions beside a shortcut, with batch norm and ReLU before each (He et al. 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(before), nn.BatchNorm2d(after)
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = None
        if stride != 1 or before != after:
            self.shortcut = nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        active = F.relu(self.norm1(maps))
        kept = maps if self.shortcut is None else self.shortcut(active)
        change = self.conv2(F.relu(self.norm2(self.conv1(active))))
        result: Tensor = kept + change
        return result


class Residual(nn.Module):
    """A residual network for ten classes, from stacks of blocks; each stack but the first halves the size of the maps.

    Args:
        widths: channels of each stack.
        blocks: how many blocks each stack has.
        stem: channels of the first convolution.
    """

    def __init__(self, widths: list[int], blocks: int, stem: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, stem, 3, padding=1, bias=False)]
        before = stem
        for number, width in enumerate(widths):
            for block in range(blocks):
                layers.append(Block(before, width, 2 if number and not block else 1))
                before = width
        self.body = nn.Sequential(*layers, nn.BatchNorm2d(before), nn.ReLU())
        self.head = nn.Linear(before, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(images).mean(dim=(2, 3)))
        return scores


def build(name: str, *, tiny: bool) -> nn.Module:
    """An untrained ResNet-18 (11.2 million parameters) or WRN-28-10 (36.5 million) that normalises pixels itself.

    With `tiny` it has few channels and one block per stack.
    """
    widths, blocks, stem = {
        "resnet18": ([64, 128, 256, 512], 2, 64),
        "wrn28_10": ([160, 320, 640], 4, 16),
    }[name]
    if tiny:
        widths, blocks, stem = [4 * (number + 1) for number in range(len(widths))], 1, 4
    return Normalized(Residual(widths, blocks, stem), MEAN, STD)


def published() -> nn.Module:
    """The trained ResNet-18 (11.2 million parameters) from the examples of pyautoattack; takes pixels in [0, 1]."""
    package = importlib.util.find_spec("pyautoattack")
    if package is None or package.origin is None:
        raise SystemExit(
            f"{PUBLISHED} comes with the package pyautoattack: run this in the environment of `make peers`"
        )
    folder = Path(package.origin).parent / "examples"
    source = importlib.util.spec_from_file_location("autoattack_resnet", folder / "resnet.py")
    assert source is not None
    assert source.loader is not None
    architecture = importlib.util.module_from_spec(source)
    source.loader.exec_module(architecture)
    model: nn.Module = architecture.ResNet18()
    model.load_state_dict(torch.load(folder / "model_test.pt", map_location="cpu", weights_only=True))
    return model


def train(model: nn.Module, split: Split, options: argparse.Namespace) -> int:
    """Trains adversarially for --minutes, with a learning rate that rises and falls once; returns how many batches."""
    device, minutes, eps = options.device, options.minutes, options.eps
    images, labels = split.images.to(device), split.labels.to(device)
    half = device.startswith("cuda")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4, nesterov=True)
    noise = torch.Generator(device).manual_seed(0)
    started, batches, size = time.perf_counter(), 0, min(512, len(labels))
    while (share := (time.perf_counter() - started) / (60 * minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = 0.2 * min(share / 0.2, (1 - share) / 0.8)
        rows = torch.randint(0, len(labels), (size,), device=device, generator=noise)
        batch = shift(images[rows].float() / 255, noise)
        with torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=half):
            crafted = craft(model, batch, labels[rows], eps, options.steps, noise)
            model.train()
            loss = F.cross_entropy(model(crafted), labels[rows])
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        # Gradients are clipped because a deep network can diverge: WRN-28-10 did, within 200 batches.
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimiser.step()
        batches += 1
        if batches % 100 == 0:
            sys.stderr.write(
                f"batch {batches}, {100 * share:.0f} % of the time, loss {float(loss.detach()):.3f}\n"
            )
    if not all(value.isfinite().all() for value in model.state_dict().values()):
        raise SystemExit("the training diverged: its weights are no numbers")
    return batches


def craft(
    model: nn.Module, images: Tensor, labels: Tensor, eps: float, steps: int, noise: torch.Generator
) -> Tensor:
    """The last iterate of PGD on cross-entropy from a random start, in the caller's precision.

    Why not `ecnn.attacks.PGD`: it judges its points in float32, which would be most of the cost of so few steps on such
    wide networks.
    """
    model.eval()
    step = max(eps / 4, 1.25 * eps / steps)
    points = images + eps * (2 * torch.rand(images.shape, device=images.device, generator=noise) - 1)
    for _ in range(steps):
        points = points.clamp(0, 1).requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(points), labels, reduction="sum"), points)
        # Early in training the running statistics do not fit the weights, and scores overflow. NaN in the images would
        # then enter the running statistics and stay there.
        points = points.detach() + step * gradient.nan_to_num().sign()
        points = torch.minimum(torch.maximum(points, images - eps), images + eps)
    return points.clamp(0, 1)


def shift(images: Tensor, noise: torch.Generator) -> Tensor:
    """The batch, moved by up to four pixels and possibly mirrored, the same way for all of its images."""
    across, down, mirrored = (
        int(number) for number in torch.randint(0, 9, (3,), device=images.device, generator=noise)
    )
    padded = F.pad(images, (4, 4, 4, 4))[
        :, :, down : down + images.shape[2], across : across + images.shape[3]
    ]
    return padded.flip(3) if mirrored % 2 else padded


def prepare(name: str, data: Dataset, options: argparse.Namespace) -> tuple[nn.Module, str]:
    """The network in eval mode, trained if need be, and a few words on where its weights come from."""
    torch.manual_seed(0)
    model = (published() if name == PUBLISHED else build(name, tiny=options.quick)).to(options.device)
    if options.device.startswith("cuda"):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if name == PUBLISHED:
        return model.eval(), "as AutoAttack's authors ship it"
    path = options.weights / f"{name}.safetensors"
    if path.exists():
        tensors, header = files.read_tensors(path)
        model.load_state_dict(tensors)
        return model.eval(), str(header.get("training", "given weights"))
    if options.minutes <= 0:
        return model.eval(), "untrained: only its times mean something"
    batches = train(model, data.train, options)
    words = f"{batches} batches against PGD-{options.steps} in {options.minutes:g} minutes"
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    files.write_tensors(path, tensors, {"training": words})
    return model.eval(), words


def examine(name: str, data: Dataset, known: list[Row], options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yields all rows of one network so far, after each tool; the first, AutoAttack's, is the reference of the others.

    Args:
        known: rows of this network from an earlier run; their tools are not run again if the settings are the same.
    """
    model, training = prepare(name, data, options)
    images, labels = (part.to(options.device) for part in data.test[: options.images])
    with torch.no_grad(), without_tf32():
        clean = torch.cat([model(part).argmax(dim=1) for part in torch.split(images, 250)]) == labels
    same = {
        "training": training,
        "eps": eps_text(options.eps),
        "images": len(labels),
        "clean": int(clean.sum()),
    }
    rows = [row for row in known if all(row[key] == value for key, value in same.items())]
    for tool, ask in tools(data, options).items():
        if any(row["tool"] == tool for row in rows):
            continue
        if images.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        clock = time.perf_counter if images.is_cuda else time.process_time
        started = clock()
        own, forwarded, verdict = ask(model, images, labels)
        own &= clean.cpu().numpy()
        stands = np.array([mark == "1" for mark in rows[0]["stands"]]) if rows else own
        row = {
            "network": name,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            **same,
            "tool": tool,
            "robust": int(own.sum()),
            "missed": int((own & ~stands).sum()),
            "gained": int((~own & stands).sum()),
            "verdict": verdict,
            "forwarded": forwarded,
            "seconds": clock() - started,
            "gigabytes": torch.cuda.max_memory_allocated() / 2**30 if images.is_cuda else None,
            "stands": "".join("1" if value else "0" for value in own),
        }
        sys.stderr.write(f"{ {key: value for key, value in row.items() if key != 'stands'} }\n")
        rows.append(row)
        yield rows


#: From a network, images and labels to (image,) whether each is still right, how many images were forwarded, and the
#: verdict, "" if the tool gives none.
Ask = Callable[[nn.Module, Tensor, Tensor], tuple[np.ndarray, int, str]]


def tools(data: Dataset, options: argparse.Namespace) -> dict[str, Ask]:
    """The tools by name: our AutoAttack, the audit at each budget, and the original AutoAttack if it is installed."""

    def attack(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[np.ndarray, int, str]:
        version: Any = "apgd-ce" if options.quick else "standard"
        ours = AutoAttack(norm="linf", eps=options.eps, version=version, quick=True)
        parts = [ours.run(model, *part, index=place) for place, part in batches(images, labels)]
        stands = np.concatenate([(~part.success).cpu().numpy() for part in parts])
        # The attack counts its passes itself, because replayed passes call no hook.
        return stands, sum(int(part.forwards.sum()) for part in parts), ""

    def examined(budget: str) -> Ask:
        def ask(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[np.ndarray, int, str]:
            with Count(model, images) as counted:
                settings = {"norm": "linf", "eps": options.eps, "limit": len(labels), "budget": budget}
                found = audit(model, data.test, **settings)
            return np.array(found.broken_by) == -1, counted.images, found.verdict

        return ask

    def original(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[np.ndarray, int, str]:
        program = importlib.import_module("pyautoattack")
        suite = program.AutoAttack(
            model, norm="Linf", eps=options.eps, seed=0, version="standard", device=options.device
        )
        with Count(model, images) as counted:
            points, _ = suite.run_standard_evaluation(images, labels, batch_size=min(500, len(labels)))
        with torch.no_grad(), without_tf32():
            right = [model(part).argmax(dim=1) for part in torch.split(points, 250)]
        return (torch.cat(right) == labels).cpu().numpy(), counted.images, ""

    found: dict[str, Ask] = {"AutoAttack": attack}
    found |= {f"audit, {budget}": examined(budget) for budget in options.budget}
    if importlib.util.find_spec("pyautoattack") and not options.quick:
        found["AutoAttack (original)"] = original
    return found


def batches(images: Tensor, labels: Tensor) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
    places = torch.arange(len(labels), device=labels.device)
    return [(place, (images[place], labels[place])) for place in torch.split(places, 500)]


def read_data(options: argparse.Namespace) -> Dataset:
    if options.quick:
        noise = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=noise)
        split = Split(images, torch.arange(40) % 10)
        return Dataset(name="random", train=split, val=split, test=split, class_names=tuple("abcdefghij"))
    return ecnn.load_data("cifar10", root=options.root)


ABOUT = """
`python benchmarks/scale.py`: ResNet-18 and WRN-28-10 on the first test images of CIFAR-10, Linf, all tools on the same
network. resnet18_published comes with AutoAttack and was trained without attacks; the others are trained against
attacks for a few minutes on the machine that audits them. missed: images that our AutoAttack breaks and this tool does
not; gained: the reverse; forwarded: images that went through the network; seconds: on a CPU those of all its
threads together, without what other processes took. On a GPU the original AutoAttack computes convolutions in TF32, as
torch does unless told otherwise; ours computes them in float32, so that the seconds there are not of equal precision.
"""


def markdown(everything: dict[str, Any]) -> str:
    return page_by_device("Larger networks", ABOUT, everything, _section)


def _section(device: str, result: Row) -> list[str]:
    plain = ("tool", "images", "clean", "robust", "missed", "gained")
    cells: list[list[Any]] = []
    about: dict[str, None] = {}
    has_memory = all(row["gigabytes"] is not None for row in result["rows"])  # of a CPU it is not measured
    for row in result["rows"]:
        size = f"{row['parameters'] / 1e6:.1f} million parameters"
        about[f"- {row['network']}: {size}; {row['training']}; eps {row['eps']}."] = None
        numbers = [f"{row['forwarded']:,}", f"{row['seconds']:,.0f}"]
        if has_memory:
            numbers.append(f"{row['gigabytes']:.1f}")
        cells.append([row["network"], *(row[name] for name in plain), *numbers])
    head = "network | tool | images | clean | robust | missed | gained | forwarded | seconds"
    return [*about, "", *table(head + " | GiB" * has_memory, cells, words=2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=[PUBLISHED, "resnet18", "wrn28_10"],
        default=["resnet18", "wrn28_10"],
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, each network; 0 trains none")
    parser.add_argument("--steps", type=int, default=7, help="of the attack that training resists")
    parser.add_argument("--eps", type=parse_eps, default=8 / 255, help="of training and of all tools")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--budget", nargs="+", default=["fast"], help="of the audits")
    parser.add_argument("--weights", type=Path, default=Path("out/scale"))
    parser.add_argument("--root", default="data")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--quick", action="store_true", help="tiny, to out/quick: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.images, options.networks = 0.02, 6, ["resnet18"]
        options.weights = options.out = Path("out/quick")
        options.budget = []
    path = options.out / "scale.json"
    everything = files.read_json(path) if path.exists() else {}
    result = everything.setdefault(torch.device(options.device).type, {})
    result["environment"] = runs.environment()
    data = read_data(options)
    for name in options.networks:
        own = [row for row in result.get("rows", []) if row["network"] == name]
        others = [row for row in result.get("rows", []) if row["network"] != name]
        for rows in examine(name, data, own, options):
            result["rows"] = others + rows
            files.write_json(path, everything)
            files.write_text(path.with_suffix(".md"), markdown(everything))


if __name__ == "__main__":
    main()
