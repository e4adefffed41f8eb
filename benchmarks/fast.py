"""Compares the fast audit with AutoAttack: images still right, images forwarded, and seconds, cold and warm.

Run: python benchmarks/fast.py [--device cuda] [--images 1000] [--models NAME ...] [--tools NAME ...] [--cold]
[--root data | --npz FILE] [--cache FOLDER] [--json FILE] [--remark TEXT]
[--quick: a few images of one small network, to out/quick, to see that everything runs]
Models are shipped ones (cifar10-...) or honest ones of `ecnn.auditing.bench` (digits:NAME). The original AutoAttack is
included if `autoattack` or `pyautoattack` can be imported. Outcomes of the reference, our AutoAttack, are kept in the
cache folder. With --cold every tool also runs in fresh processes on the first model: in one with an empty cache of
compiled kernels on disk, then in one that finds the cache of the first. Seconds are given for the whole process, for
the first call in it and for a second call. Writes fast.json and fast.md beside this file, one entry per type of device.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import page_by_device, table
from torch import Tensor, nn

import ecnn
from ecnn import files, runs
from ecnn.asking import without_tf32
from ecnn.attacks import AutoAttack, Race
from ecnn.auditing import audit, bench
from ecnn.data import Split

HERE = Path(__file__).parent
CIFAR_EPS = 8 / 255
MODELS = ["cifar10-resnet20-at", "cifar10-ecnn30-at", "digits:adversarial_resnet", "digits:trades"]
REFERENCE, ORIGINAL = "AutoAttack (ours)", "AutoAttack (original)"
Row = dict[str, Any]


class Count:
    """Counts the images that pass through a model while the context is open, by whichever method of the model.

    It counts with a hook on the layer that runs first in `model(images)`.
    """

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.images, self._order = 0, list[nn.Module]()
        layers = [module for module in model.modules() if not list(module.children())]
        hooks = [layer.register_forward_pre_hook(self._note) for layer in layers]
        with torch.no_grad():
            model(images[:1])
        for hook in hooks:
            hook.remove()

    def __enter__(self) -> Count:
        # A function and not a method, so that copies of the model count here too.
        def add(module: nn.Module, given: Any) -> None:
            self.images += len(given[0])

        self._hook = self._order[0].register_forward_pre_hook(add)
        return self

    def _note(self, module: nn.Module, given: Any) -> None:
        self._order.append(module)

    def __exit__(self, *error: object) -> None:
        self._hook.remove()


class Case:
    """A model with its test images, labels and radius, on a device."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.device = name, options.device
        if name.startswith("digits:"):
            data, key = ecnn.load_data("digits"), name.removeprefix("digits:")
            self.model = bench.build(key, data=data, folder=options.cache)
            self.split, self.eps = data.test, bench.SUBJECTS[key].eps
        else:
            self.model, self.eps = ecnn.load_model(name), CIFAR_EPS
            self.split = read_cifar(options)
        self.model = self.model.to(options.device).eval()
        self.count = min(options.images, len(self.split.labels))
        self.images, self.labels = (part.to(options.device) for part in self.split[: self.count])

    def clean(self) -> np.ndarray:
        with torch.no_grad(), without_tf32():
            found: np.ndarray = (self.model(self.images).argmax(dim=1) == self.labels).cpu().numpy()
        return found


def read_cifar(options: argparse.Namespace) -> Split:
    if options.npz:
        arrays = np.load(options.npz)
        return Split(torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"]).long())
    return ecnn.load_data("cifar10", root=options.root).test


#: (image,) whether each image is right without and under the attack, and the number of images forwarded.
Found = tuple[np.ndarray, int]


def with_autoattack(case: Case) -> Found:
    version: Any = "apgd-ce" if "--quick" in sys.argv else "standard"
    return _with_attack(AutoAttack(norm="linf", eps=case.eps, version=version, quick=True), case)


def with_race(case: Case) -> Found:
    return _with_attack(Race(norm="linf", eps=case.eps, quick=True), case)


def _with_attack(attack: Any, case: Case) -> Found:
    attacked = attack.run(case.model, case.images, case.labels)
    return (~attacked.success).cpu().numpy(), int(attacked.forwards.sum())


def with_audit(case: Case) -> Found:
    """The whole audit with budget "fast": attacks, diagnostics, certificates."""
    with Count(case.model, case.images) as counted:
        found = audit(case.model, case.split, norm="linf", eps=case.eps, limit=case.count, budget="fast")
    return np.array(found.broken_by) == -1, counted.images


def with_original(case: Case) -> Found:
    """AutoAttack by its authors' program, or by its copy on PyPI."""
    name = next(name for name in ("autoattack", "pyautoattack") if importlib.util.find_spec(name))
    program = importlib.import_module(name)
    settings = {"norm": "Linf", "eps": case.eps, "seed": 0, "version": "standard", "device": case.device}
    quiet = {"verbose": False} if name == "autoattack" else {}
    suite = program.AutoAttack(case.model, **settings, **quiet)
    with Count(case.model, case.images) as counted:
        if name == "autoattack":
            points = suite.run_standard_evaluation(case.images, case.labels, bs=case.count)
        else:
            points = suite.run_standard_evaluation(case.images, case.labels, batch_size=case.count)[0]
    with torch.no_grad(), without_tf32():
        stands = (case.model(points).argmax(dim=1) == case.labels).cpu().numpy()
    return stands & case.clean(), counted.images


TOOLS: dict[str, Callable[[Case], Found]] = {
    REFERENCE: with_autoattack,
    "race": with_race,
    "fast audit": with_audit,
    ORIGINAL: with_original,
}


def chosen_tools(options: argparse.Namespace) -> list[str]:
    has_original = any(importlib.util.find_spec(name) for name in ("autoattack", "pyautoattack"))
    known = [name for name in TOOLS if has_original or name != ORIGINAL]
    return [name for name in known if not options.tools or name in options.tools]


def measure(tool: str, case: Case) -> tuple[Row, np.ndarray]:
    _wait(case)
    started = time.perf_counter()
    stands, forwarded = TOOLS[tool](case)
    _wait(case)
    seconds = time.perf_counter() - started
    return {"tool": tool, "robust": int(stands.sum()), "forwarded": forwarded, "seconds": seconds}, stands


def _wait(case: Case) -> None:
    if case.images.is_cuda:
        torch.cuda.synchronize()


def compare(case: Case, options: argparse.Namespace) -> list[Row]:
    """One row per tool, with the number of images on which it differs from the reference."""
    known = read_reference(case, options)
    rows = []
    for tool in chosen_tools(options):
        if tool == REFERENCE and known is not None:
            row, stands = known
        else:
            row, stands = measure(tool, case)
        if tool == REFERENCE:
            known = row, stands
            keep_reference(case, row, stands, options)
        assert known is not None, f"{REFERENCE} comes first"
        row = {
            **row,
            "model": case.name,
            "images": case.count,
            "clean": int(case.clean().sum()),
            "only_reference": int((stands & ~known[1]).sum()),
            "only_tool": int((~stands & known[1]).sum()),
            "share": row["forwarded"] / known[0]["forwarded"],
        }
        sys.stderr.write(f"{row}\n")
        rows.append(row)
    return rows


def _kept(case: Case, options: argparse.Namespace) -> Path:
    return Path(options.cache) / f"reference-{case.name.replace(':', '-')}-{case.count}-{case.device}.json"


def read_reference(case: Case, options: argparse.Namespace) -> tuple[Row, np.ndarray] | None:
    path = _kept(case, options)
    if not path.exists():
        return None
    values = files.read_json(path)
    return values["row"], np.array(values["stands"], dtype=bool)


def keep_reference(case: Case, row: Row, stands: np.ndarray, options: argparse.Namespace) -> None:
    files.write_json(_kept(case, options), {"row": row, "stands": stands.tolist()})


# Cold and warm -------------------------------------------------------------------------------------------------------


def time_alone(options: argparse.Namespace) -> None:
    """Runs one tool twice on the first model, and prints the seconds as JSON; for a process of its own."""
    started = time.perf_counter()
    case = Case(options.models[0], options)
    loaded = time.perf_counter() - started
    first, _ = measure(options.alone, case)
    second, _ = measure(options.alone, case)
    found = {
        "load": loaded,
        "first": first["seconds"],
        "second": second["seconds"],
        "robust": first["robust"],
    }
    sys.stdout.write(json.dumps(found) + "\n")


def measure_cold(options: argparse.Namespace) -> list[Row]:
    """One row per tool and fresh process: the first has an empty cache of compiled kernels, the second the first's.

    The original AutoAttack compiles no kernels and gets one process.
    """
    rows = []
    for tool in chosen_tools(options):
        ours = ("none compiled", "compiled by an earlier process")
        with tempfile.TemporaryDirectory() as cache:
            for kernels in ours if tool != ORIGINAL else ("it has none",):
                seconds, found = _run_alone(tool, options, cache)
                row = {
                    "tool": tool,
                    "model": options.models[0],
                    "kernels": kernels,
                    "process": seconds,
                    **found,
                }
                sys.stderr.write(f"{row}\n")
                rows.append(row)
    return rows


def _run_alone(tool: str, options: argparse.Namespace, cache: str) -> tuple[float, Row]:
    words = [sys.executable, __file__, "--alone", tool, "--models", options.models[0]]
    words += ["--device", options.device, "--images", str(options.images), "--root", options.root]
    words += ["--cache", str(options.cache), *(["--npz", options.npz] if options.npz else [])]
    caches = {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    caches["CUDA_CACHE_PATH"] = f"{cache}/cuda"
    started = time.perf_counter()
    done = subprocess.run(  # noqa: S603 our own script
        words, env={**os.environ, **caches}, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        return seconds, {"error": (done.stderr.strip().splitlines() or ["no reason given"])[-1][:200]}
    return seconds, json.loads(done.stdout.strip().splitlines()[-1])


# The page ------------------------------------------------------------------------------------------------------------


ABOUT = """
`python benchmarks/fast.py --cold`: the same models and images in one run, float32 without TF32. forwarded:
images that went through the model, for the audit with its diagnostics. share: of what our AutoAttack
forwarded. missed: images that stand, and do not under our AutoAttack; gained: the reverse.
"""


def markdown(everything: dict[str, Any]) -> str:
    return page_by_device("The fast audit beside AutoAttack", ABOUT, everything, _section)


def _section(device: str, result: Row) -> list[str]:
    head = "model | tool | images | clean | robust | missed | gained | forwarded | share | seconds"
    plain = ("model", "tool", "images", "clean", "robust", "only_reference", "only_tool")
    cells = []
    for row in result.get("rows", []):
        numbers = (f"{row['forwarded']:,}", f"{100 * row['share']:.1f} %", f"{row['seconds']:.1f}")
        cells.append([*(row[name] for name in plain), *numbers])
    cold = ["", *_cold_lines(result["cold"])] if result.get("cold") else []
    remark = ["", result["remark"]] if result.get("remark") else []
    return table(head, cells, words=2) + remark + cold


def _cold_lines(rows: list[Row]) -> list[str]:
    cells = []
    for row in rows:
        failed = "error" in row
        took = (
            [row["error"], "", ""] if failed else [f"{row[name]:.1f}" for name in ("load", "first", "second")]
        )
        cells.append([row["tool"], row["model"], row["kernels"], f"{row['process']:.1f}", *took])
    return [
        "Cold and warm, in seconds: of the whole process, to load model and data, of the first call, of a second one.",
        "",
        *table("tool | model | kernels | process | load | first call | second call", cells, words=3),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument(
        "--tools", nargs="+", choices=list(TOOLS), help="all if not given; the reference is always needed"
    )
    parser.add_argument("--cold", action="store_true", help="also time fresh processes, on the first model")
    parser.add_argument("--only-cold", action="store_true", help="only that")
    parser.add_argument("--root", default="data")
    parser.add_argument("--npz", default=None, help="CIFAR-10 test images and labels, uint8")
    parser.add_argument("--cache", type=Path, default=Path("out/fast"))
    parser.add_argument("--json", type=Path, default=HERE / "fast.json")
    parser.add_argument("--remark", help="a sentence to stand below the rows: what else the machine did")
    parser.add_argument("--alone", choices=list(TOOLS), help=argparse.SUPPRESS)
    parser.add_argument(
        "--quick", action="store_true", help="little of everything, to out/quick: does it run?"
    )
    options = parser.parse_args()
    if options.quick:
        options.images, options.models, options.tools = 6, ["digits:linear"], [REFERENCE, "race"]
        options.json, options.cache = Path("out/quick/fast.json"), Path("out/quick/fast")
    if options.alone:
        time_alone(options)
        return
    everything = files.read_json(options.json) if options.json.exists() else {}
    result = everything.setdefault(torch.device(options.device).type, {})
    result["environment"] = runs.environment()
    if options.cold or options.only_cold:
        result["cold"] = measure_cold(options)
        files.write_json(options.json, everything)
    if not options.only_cold:
        result["rows"], result["remark"] = [], options.remark
        for name in options.models:
            result["rows"] += compare(Case(name, options), options)
            files.write_json(options.json, everything)
    files.write_text(options.json.with_suffix(".md"), markdown(everything))


if __name__ == "__main__":
    main()
