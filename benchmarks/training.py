"""What members cost: throughput of ECNN, ResNet-20 and loops over members, and the cost of adversarial training.

Run on a machine with a CUDA device: python benchmarks/training.py [--compile] [--parts member_loops] [--json OUT.json].
Everything is measured in turns in one process. Writes training.json and training.md beside this file. With --quick it
runs on any machine, in seconds, and writes to out/quick: this only shows that everything runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecnn import files, runs
from ecnn.asking import full_precision
from ecnn.attacks import PGD
from ecnn.backbones import resnet20
from ecnn.codes import CodeMatrix, load_code
from ecnn.data import Split
from ecnn.model import ECNN
from ecnn.models import RECIPES
from ecnn.objectives import make_objective
from ecnn.training.engine import Engine

HERE = Path(__file__).parent
QUICK = "--quick" in sys.argv
DEVICE = "cpu" if QUICK else "cuda"
BATCHES = (4,) if QUICK else (128, 256, 2048)
COMPILED = ("resnet20", "ecnn30")  # each costs half a minute of compiling for every batch size
PLAIN = dataclasses.replace(RECIPES["paper"], diversity_weight=0.0, objective="member_cross_entropy")


class LoopedECNN(ECNN):
    """An ECNN, with the same parameters, that runs its members one after the other: branch, dense layer and head."""

    def member_logits(self, images: Tensor) -> Tensor:
        maps = self.trunk(self.centre(images))
        parts: Any = self.branches
        conv, dense = parts.body.conv, parts.dense
        width = conv.out_channels // self.code.code_length
        members = []
        for member in range(self.code.code_length):
            rows = slice(member * width, (member + 1) * width)
            hidden = torch.relu(nn.functional.conv2d(maps, conv.weight[rows], conv.bias[rows], padding=1))
            pooled = hidden.mean(dim=(2, 3))
            weight, bias = (tensor[member].to(pooled.dtype) for tensor in (dense.weight, dense.bias))
            members.append(self.head(torch.relu(pooled @ weight + bias)))
        return full_precision(torch.cat(members, dim=1))


class ModuleLoopECNN(ECNN):
    """A network with as many parameters as an ECNN, whose members are modules in a list, called one after the other."""

    def __init__(self, code: CodeMatrix) -> None:
        super().__init__(code)
        self.branches = nn.Identity()  # type: ignore[assignment]
        self.members = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(64, 16, 3, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(16, 32),
                nn.ReLU(),
            )
            for _ in range(code.code_length)
        )

    def member_logits(self, images: Tensor) -> Tensor:
        maps = self.trunk(self.centre(images))
        return full_precision(torch.cat([self.head(member(maps)) for member in self.members], dim=1))


def models() -> dict[str, Callable[[], nn.Module]]:
    code = load_code("10x30")
    return {
        "resnet20": lambda: resnet20(10, batch_norm=False),
        "resnet20_bn": lambda: resnet20(10),
        "ecnn30": lambda: ECNN(code),
        "ecnn30_bn": lambda: ECNN(code, batch_norm=True),
        "ecnn30_loop": lambda: LoopedECNN(code),
    }


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def synthetic(count: int = 64 if QUICK else 20_480) -> Split:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Split(images, torch.arange(count) % 10)


def images_per_second(
    call: Callable[[], Any], images: int, *, seconds: float = 0.6, timings: int = 9, least: int = 3
) -> float:
    """Images per second of a call that handles `images` images: the best of several timings, as disturbances only slow.

    Args:
        call: is timed.
        images: how many it handles.
        seconds: about how long all timings take.
        timings: how many.
        least: calls of each timing, at least, and calls before the first.
    """
    timings, least = (1, 1) if QUICK else (timings, least)
    for _ in range(least):
        call()
    wait()
    started = time.perf_counter()
    call()
    wait()
    repeats = (
        least if QUICK else max(least, int(seconds / timings / max(1e-5, time.perf_counter() - started)))
    )
    rates = []
    for _ in range(timings):
        wait()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        rates.append(repeats * images / (time.perf_counter() - started))
    return max(rates)


def make_engine(model: nn.Module, data: Split, batch: int, mode: str, attack: Any = None) -> Engine:
    name = "member_cross_entropy" if isinstance(model, ECNN) else "cross_entropy"
    recipe = dataclasses.replace(PLAIN, batch_size=batch)
    options = {"use_graph": mode != "eager", "compile_parts": mode == "compile"}
    engine = Engine(model.to(DEVICE), data, recipe, make_objective(name), attack, 0, **options)
    model.train()
    engine.lr.fill_(1e-4)
    engine.index.copy_(torch.randperm(len(data), device=DEVICE)[:batch])
    if mode != "eager":
        engine._capture(engine.index.clone())
        if engine.graph is None:
            raise RuntimeError(engine.note)
    return engine


def training_rate(
    build: Callable[[], nn.Module], data: Split, batch: int, mode: str, attack: Any = None
) -> float:
    engine = make_engine(build(), data, batch, mode, attack)
    return images_per_second(engine._step if engine.graph is None else engine.graph.replay, batch)


def eager_calls(model: nn.Module, data: Split, batch: int) -> dict[str, Callable[[], Any]]:
    """Functions to time without a CUDA graph, by name: inference, forward and backward pass, whole training step."""
    engine = make_engine(model, data, batch, "eager")
    images = torch.rand(batch, 3, 32, 32, device=DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=DEVICE) % 10

    def infer() -> Any:
        with torch.no_grad(), engine.autocast():
            return engine.worker(images)

    def run_pass() -> None:
        engine._forget_gradients()
        with engine.autocast():
            loss = engine.objective(engine.worker, images, labels)
        torch.autograd.backward(loss)

    return {"inference": infer, "pass": run_pass, "step": engine._step}


def member_loops(batch: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of every round, for all members at once and for two loops over them, in eager mode.

    They are timed in turns: in eager mode the CPU is the bottleneck, and a disturbance of it affects neighbouring
    timings alike.
    """
    data, code = synthetic(), load_code("10x30")
    calls = {
        name: eager_calls(build(code), data, batch)
        for name, build in (("ecnn30", ECNN), ("slices", LoopedECNN), ("modules", ModuleLoopECNN))
    }
    times: dict[str, Any] = {}
    gc.collect()
    gc.freeze()
    for kind in ("inference", "pass", "step"):
        times[kind] = {name: [] for name in calls}
        for trial in range(rounds + 1):
            for name, call in calls.items():
                wait()
                started = time.perf_counter()
                for _ in range(repeats):
                    call[kind]()
                wait()
                if trial:  # the first round is a warm-up, in which libraries initialise themselves
                    times[kind][name].append(1e3 * (time.perf_counter() - started) / repeats)
    gc.unfreeze()
    return {"batch": batch, **times}


def as_graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """A function that replays the call, which is recorded once as a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], Any] = graph.replay
    return replay


def inference_rate(build: Callable[[], nn.Module], batch: int, mode: str) -> float:
    model = build().to(DEVICE).eval()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if mode == "compile":
        for part in model.children():
            part.compile()
    images = torch.rand(batch, 3, 32, 32, device=DEVICE).contiguous(memory_format=torch.channels_last)

    def forward() -> Any:
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            return model(images)

    return images_per_second(forward if mode == "eager" else as_graph(forward), batch)


def throughput(modes: tuple[str, ...]) -> list[dict[str, Any]]:
    data = synthetic()
    table = []
    for batch in BATCHES:
        for name, build in models().items():
            for mode in modes:
                if mode == "compile" and name not in COMPILED:
                    continue
                row: dict[str, Any] = {"batch": batch, "model": name, "mode": mode}
                # Otherwise the tenth network would exceed torch's limit of recompilations and run eagerly.
                torch.compiler.reset()
                started = time.perf_counter()
                row["training"] = training_rate(build, data, batch, mode)
                row["inference"] = inference_rate(build, batch, mode)
                row["measured_in"] = time.perf_counter() - started
                table.append(row)
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
    return table


def adversarial(mode: str) -> list[dict[str, Any]]:
    """Rates of plain and of PGD-10 training, and the cost of a PGD-10 step in plain steps, by batch size and model."""
    data, table = synthetic(), []
    attack = PGD(norm="linf", eps="8/255", steps=10, step_size="2/255", loss="cross_entropy", keep="last")
    for batch in (4,) if QUICK else (256, 512):
        for name in ("ecnn30_bn", "resnet20_bn"):
            plain = training_rate(models()[name], data, batch, mode)
            robust = training_rate(models()[name], data, batch, mode, attack)
            row = {"batch": batch, "model": name, "mode": mode, "plain": plain, "pgd10": robust}
            row["cost_in_plain_steps"] = plain / robust
            table.append(row)
            sys.stdout.write(f"{row}\n")
    return table


RATIOS = (
    ("ecnn30 over resnet20", "ecnn30", "resnet20", "graph"),
    ("ecnn30_bn over resnet20_bn", "ecnn30_bn", "resnet20_bn", "graph"),
    ("ecnn30 over resnet20", "ecnn30", "resnet20", "compile"),
    ("ecnn30 over a loop over members", "ecnn30", "ecnn30_loop", "eager"),
    ("ecnn30 over a loop over members", "ecnn30", "ecnn30_loop", "graph"),
)


def _ratio(above: Any, below: Any, keys: tuple[str, str]) -> str:
    return " / ".join(f"{above[key] / below[key]:.2f}" for key in keys)


def loop_lines(loops: dict[str, Any]) -> list[str]:
    """Markdown of the time of each loop over members, relative to all members at once: median and quartiles."""
    rounds = len(loops["pass"]["ecnn30"])
    lines = [
        f"Eager, batch {loops['batch']}, {rounds} rounds in turns: how many times as long a loop over members takes,",
        "median of all rounds and the middle half of them. slices: of the same parameters; modules: members in a list.",
        "",
        "| what | loop | median | from | to | its milliseconds | those of ecnn30 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for kind, title in (
        ("inference", "inference"),
        ("pass", "forward and backward"),
        ("step", "training step"),
    ):
        times = loops[kind]
        for name in ("slices", "modules"):
            ratios = [loop / whole for loop, whole in zip(times[name], times["ecnn30"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            own, whole = (statistics.median(times[key]) for key in (name, "ecnn30"))
            lines.append(
                f"| {title} | {name} | {middle:.2f} | {low:.2f} | {high:.2f} | {own:.2f} | {whole:.2f} |"
            )
    return lines


def markdown(result: dict[str, Any]) -> str:
    """The page with all tables."""
    rates = {(row["batch"], row["model"], row["mode"]): row for row in result["throughput"]}
    modes = sorted({row["mode"] for row in result["throughput"]}, key=["eager", "graph", "compile"].index)
    device, version = result["environment"]["device"], result["environment"]["torch"]
    lines = [
        "# Training: what members cost",
        "",
        f"`python benchmarks/training.py` on one {device}, torch {version}, bfloat16, channels last. Thousands of",
        "images per second; training is the whole step (augmentation, forward, backward, optimizer), all in one run.",
        "",
        "| batch | model | " + " | ".join(f"training, {mode} | inference, {mode}" for mode in modes) + " |",
        "|---:|---|" + "---:|---:|" * len(modes),
    ]
    for batch in BATCHES:
        for name in models():
            cells = [rates.get((batch, name, mode)) for mode in modes]
            shown = [
                f"{row['training'] / 1e3:.1f} | {row['inference'] / 1e3:.1f}" if row else "- | -"
                for row in cells
            ]
            lines.append(f"| {batch} | {name} | " + " | ".join(shown) + " |")
    lines += [
        "",
        "| ratio, training / inference | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |",
    ]
    lines.append("|---|" + "---:|" * len(BATCHES))
    for title, above, below, mode in RATIOS:
        pairs = [(rates.get((batch, above, mode)), rates.get((batch, below, mode))) for batch in BATCHES]
        if all(a and b for a, b in pairs):
            shown = [_ratio(a, b, ("training", "inference")) for a, b in pairs]
            lines.append(f"| {title}, {mode} | " + " | ".join(shown) + " |")
    lines += ["", *loop_lines(result["member_loops"])]
    lines += [
        "",
        "A PGD-10 adversarial training step, in plain training steps of the same batch (eleven passes would be 11):",
        "",
        "| batch | model | cost |",
        "|---:|---|---:|",
    ]
    lines += [
        f"| {row['batch']} | {row['model']} | {row['cost_in_plain_steps']:.2f} |"
        for row in result["adversarial"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures the parts in --parts and writes them into the JSON, then the page; with --parts "" only the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=HERE / "training.json")
    parser.add_argument("--parts", default="throughput,member_loops,adversarial")
    parser.add_argument(
        "--compile", action="store_true", help="measure compiled networks too: half a minute each"
    )
    parser.add_argument(
        "--quick", action="store_true", help="little of everything, to out/quick: does it run?"
    )
    options = parser.parse_args()
    if QUICK:
        options.json = Path("out/quick/training.json")
    result = files.read_json(options.json) if options.json.exists() else {}
    if options.parts:
        if not QUICK and not torch.cuda.is_available():
            raise SystemExit("this benchmark needs a CUDA device; --quick shows that it runs")
        torch.backends.cudnn.benchmark = True
        modes = (
            ("eager",) if QUICK else ("eager", "graph", "compile") if options.compile else ("eager", "graph")
        )
        parts: dict[str, Callable[[], Any]] = {
            "throughput": lambda: throughput(modes),
            "member_loops": lambda: member_loops(*((4, 2, 1) if QUICK else (256, 25, 6))),
            "adversarial": lambda: adversarial("eager" if QUICK else "graph"),
        }
        result["environment"] = runs.environment()
        for part in options.parts.split(","):
            result[part] = parts[part]()
            files.write_json(options.json, result)
    files.write_text(options.json.with_suffix(".md"), markdown(result))


if __name__ == "__main__":
    main()
