"""What batching members saves: compares each baseline ensemble with the same networks run one after the other.

Run: python benchmarks/baselines.py --device cuda. Everything is measured in turns in one process. It writes the figures
and a table to baselines.json and baselines.md beside this file, or to --out. A run on a CPU only shows that everything
runs; with --quick this takes seconds, and writes to out/quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from training import as_graph, images_per_second

from ecnn import files, runs
from ecnn.backbones import Centre, ConvUnit, ResNet
from ecnn.baselines import ADPObjective, Ensemble, TanhEnsemble, TanhEnsembleObjective, independent_ecoc
from ecnn.baselines.adp import log_mean_probs
from ecnn.codes import CodeMatrix, load_code
from ecnn.data import Split
from ecnn.decoders import make_decoder
from ecnn.models import RECIPES
from ecnn.objectives import MemberObjective
from ecnn.training.engine import Engine

HERE = Path(__file__).parent
PLAIN = dataclasses.replace(RECIPES["paper"], diversity_weight=0.0)


class LoopedEnsemble(nn.Module):
    """Three ResNet-20, run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(ResNet(10) for _ in range(3))

    def member_scores(self, images: Tensor) -> Tensor:
        return torch.stack([member(images) for member in self.members], dim=1)

    def forward(self, images: Tensor) -> Tensor:
        return log_mean_probs(self.member_scores(images))


class LoopedCode(nn.Module):
    """Base of coded models whose members run one after the other."""

    code_symbols: Tensor

    def __init__(self, code: CodeMatrix, decoder: str) -> None:
        super().__init__()
        self.code = code
        self.register_buffer("code_symbols", torch.from_numpy(code.symbols.astype("int64")), persistent=False)
        self.decoder = make_decoder(code, "logit", decoder)

    def member_logits(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.decoder(self.member_logits(images))
        return scores


class LoopedECOC(LoopedCode):
    """One network per task, run one after the other."""

    def __init__(self, code: CodeMatrix) -> None:
        super().__init__(code, "tanh")
        columns = (CodeMatrix(code.symbols[:, [n]], allow_equal_rows=True) for n in range(code.code_length))
        self.members = nn.ModuleList(independent_ecoc(column) for column in columns)

    def member_logits(self, images: Tensor) -> Tensor:
        members: Any = self.members
        return torch.cat([member.member_logits(images) for member in members], dim=1)


class LoopedTanhEnsemble(LoopedCode):
    """TanhEns16 for CIFAR-10, with a separate network for each chunk and each bit, run one after the other."""

    def __init__(self) -> None:
        whole = TanhEnsemble()
        super().__init__(whole.code, "p_nu")
        self.centre = Centre(0.5)
        self.chunks = nn.ModuleList(_chunk() for _ in range(4))
        self.grey = nn.ModuleList(_grey() for _ in range(16))
        self.bits = nn.ModuleList(_bit() for _ in range(16))

    def member_logits(self, images: Tensor) -> Tensor:
        centred = self.centre(images)
        grey = centred.mean(dim=1, keepdim=True)
        maps = [chunk(centred) for chunk in self.chunks]
        logits = [
            bit(torch.cat([maps[index // 4], own(grey)], dim=1))
            for index, (own, bit) in enumerate(zip(self.grey, self.bits, strict=True))
        ]
        return torch.cat(logits, dim=1).float()


def _chunk() -> nn.Sequential:
    layers: list[nn.Module] = []
    before = 3
    for stack, width in enumerate((32, 64, 128)):
        for stride in (1, 1, 2):
            size = 5 if stack == 0 and stride == 1 else 3
            layers.append(ConvUnit(before, width, kernel_size=size, stride=stride, activation="elu"))
            if not (stack == 2 and stride == 2):
                layers.append(nn.BatchNorm2d(width))
            before = width
    return nn.Sequential(*layers)


def _grey() -> nn.Sequential:
    first = ConvUnit(1, 16, kernel_size=5, stride=2, activation="elu")
    return nn.Sequential(first, *(ConvUnit(16, 16, stride=2, activation="elu") for _ in range(2)))


def _bit() -> nn.Sequential:
    pad = nn.ZeroPad2d((0, 1, 0, 1))
    layers: list[nn.Module] = [pad, nn.Conv2d(144, 16, 2), nn.ELU(), pad, nn.Conv2d(16, 16, 2), nn.ELU()]
    layers += [
        nn.Flatten(),
        nn.Linear(256, 16),
        nn.ELU(),
        nn.Linear(16, 8),
        nn.ELU(),
        nn.Linear(8, 4),
        nn.ELU(),
    ]
    return nn.Sequential(*layers, nn.Linear(4, 2), nn.Linear(2, 1))


def pairs() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Any]]:
    """Name of the model -> (builds the batched one, builds the looped one, objective)."""
    code = load_code("10x30")
    return {
        "adp": (lambda: Ensemble(10), LoopedEnsemble, ADPObjective()),
        "tanh_ensemble": (TanhEnsemble, LoopedTanhEnsemble, TanhEnsembleObjective(noise=0.032, blend=0.032)),
        "independent_ecoc": (lambda: independent_ecoc(code), lambda: LoopedECOC(code), MemberObjective()),
    }


def training_step(model: nn.Module, objective: Any, batch: int, mode: str) -> tuple[Callable[[], Any], Any]:
    """A function that makes a whole step of `fit` (augmentation, forward, backward, optimizer), and its engine.

    The caller must keep the engine as long as it uses the function.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4 * batch, 3, 32, 32), generator=generator, dtype=torch.uint8)
    data = Split(images, torch.arange(4 * batch) % 10)
    recipe = dataclasses.replace(PLAIN, batch_size=batch)
    engine = Engine(model, data, recipe, objective, None, 0, use_graph=mode == "graph")
    model.train()
    engine.worker.train()
    engine.lr.fill_(1e-4)
    engine.index.copy_(torch.arange(batch))
    if mode == "graph":
        engine._capture(engine.index.clone())
        if engine.graph is None:
            raise RuntimeError(engine.note)
        return engine.graph.replay, engine
    return engine._step, engine


def forward_pass(model: nn.Module, batch: int, device: str, mode: str) -> Callable[[], Any]:
    """A function that makes a forward pass without gradients, in bfloat16 on CUDA."""
    model.eval()
    images = torch.rand(batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)

    def forward() -> Any:
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            return model(images)

    return forward if mode == "eager" else as_graph(forward)


def measure(device: str, batch: int, **effort: Any) -> list[dict[str, Any]]:
    table, kept = [], []
    for name, (batched, looped, objective) in pairs().items():
        for mode in ("eager", "graph") if device == "cuda" else ("eager",):
            row: dict[str, Any] = {"model": name, "mode": mode, "batch": batch}
            for way, build in (("batched", batched), ("looped", looped)):
                model = build().to(device)
                step, engine = training_step(model, objective, batch, mode)
                row[f"training_{way}"] = images_per_second(step, batch, **effort)
                forward = forward_pass(model, batch, device, mode)
                row[f"inference_{way}"] = images_per_second(forward, batch, **effort)
                # A graph can be replayed only as long as the optimizer that it captured exists.
                kept.append(engine)
            for kind in ("training", "inference"):
                row[f"{kind}_ratio"] = row[f"{kind}_batched"] / row[f"{kind}_looped"]
            table.append(row)
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
    return table


def markdown(result: dict[str, Any]) -> str:
    device, version = result["environment"]["device"], result["environment"]["torch"]
    lines = [
        "# Baselines: members at once, and one after the other",
        "",
        f"`python benchmarks/baselines.py` on one {device}, torch {version}. Thousands of CIFAR-10 images per second,",
        f"batch {result['rows'][0]['batch']}; training is the whole step of `fit`.",
        "",
        "| model | mode | training: batched | looped | ratio | inference: batched | looped | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        cells = [
            f"{row[f'{kind}_batched'] / 1e3:.2f} | {row[f'{kind}_looped'] / 1e3:.2f} | {row[f'{kind}_ratio']:.2f}"
            for kind in ("training", "inference")
        ]
        lines.append(f"| {row['model']} | {row['mode']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--timings", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement, about")
    parser.add_argument("--out", type=Path, default=HERE / "baselines.json")
    parser.add_argument("--quick", action="store_true", help="little, on the CPU, to out/quick: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.device, options.batch, options.timings, options.seconds = "cpu", 2, 1, 0.0
        options.out = Path("out/quick/baselines.json")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --device cpu only shows that it runs")
    torch.backends.cudnn.benchmark = True
    rows = measure(options.device, options.batch, timings=options.timings, seconds=options.seconds)
    files.write_json(options.out, {"environment": runs.environment(), "rows": rows})
    files.write_text(options.out.with_suffix(".md"), markdown(files.read_json(options.out)))


if __name__ == "__main__":
    main()
