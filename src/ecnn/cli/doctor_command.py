"""`ecnn doctor`: prints versions, devices and threads, and which packages are missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
from typing import Any

import typer

import ecnn
from ecnn.cli.options import JsonFlag
from ecnn.cli.statuses import FAULT

#: Packages that ecnn does not work without.
REQUIRED = ("torch", "numpy", "safetensors", "scikit-learn", "pillow", "pooch", "typer", "rich", "matplotlib")
#: Optional packages, and what they are for.
OPTIONAL = {
    "numba": "designs codes 100 times faster",
    "onnx": "ecnn export to .onnx: pip install 'ecnn[export]'",
    "onnxruntime": "compares an exported .onnx with the model: pip install 'ecnn[export]'",
    "huggingface-hub": "sends models to the Hugging Face hub and fetches them: pip install 'ecnn[hub]'",
    "timm": "its networks as trunks: pip install 'ecnn[vision]'",
    "fastapi": "ecnn serve: pip install 'ecnn[serve]'",
    "uvicorn": "ecnn serve: pip install 'ecnn[serve]'",
    "python-multipart": "ecnn serve: pip install 'ecnn[serve]'",
    "ray": "ecnn reproduce on several machines: pip install 'ecnn[cluster]'",
    "tensorboard": "curves of training in TensorBoard",
}


def doctor(as_json: JsonFlag = False) -> int:
    """Print versions, devices and threads, and say what is missing; exit status 4 if ecnn cannot work here."""
    facts: dict[str, Any] = {
        "ecnn": ecnn.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in (*REQUIRED, *OPTIONAL)},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": None,
        "devices": [],
        "problems": [],
    }
    for name in REQUIRED:
        if facts["packages"][name] is None:
            facts["problems"].append(f"{name} is not installed: pip install {name}.")
    try:
        torch = importlib.import_module("torch")
        facts["threads"] = torch.get_num_threads()
        facts["devices"] = _devices(torch)
    except Exception as error:  # a broken installation fails in many ways
        facts["problems"].append(f"torch cannot be used: {type(error).__name__}: {error}")
    typer.echo(json.dumps(facts) if as_json else _as_text(facts))
    return FAULT if facts["problems"] else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(torch: Any) -> list[str]:
    """The values that --device takes on this machine, with names of GPUs; each device was tried with an addition."""
    names = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    found = []
    for name in names:
        assert float(torch.ones(2, device=name).sum()) == 2
        title = torch.cuda.get_device_name(name) if name.startswith("cuda") else ""
        found.append(f"{name} {title}".strip())
    return found


def _as_text(facts: dict[str, Any]) -> str:
    packages = facts["packages"]
    settings = [
        f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "ECNN_DATA") if name in os.environ
    ]
    lines = [
        f"ecnn {facts['ecnn']}, Python {facts['python']}, {facts['platform']}",
        "packages  " + ", ".join(f"{name} {version}" for name, version in packages.items() if version),
        f"devices   {', '.join(facts['devices']) or 'none'}",
        f"threads   {facts['threads']} on {facts['cores']} cores"
        + "".join(f", {entry}" for entry in settings),
        *(f"absent    {name}: {OPTIONAL[name]}" for name in OPTIONAL if packages[name] is None),
        *(f"PROBLEM   {problem}" for problem in facts["problems"]),
    ]
    return "\n".join([*lines, *([] if facts["problems"] else ["nothing that is needed is missing"])])
