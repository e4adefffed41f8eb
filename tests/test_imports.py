"""The house: rooms import only rooms above them, light ones stay light, public names change only on purpose."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ecnn

HOUSE = Path(ecnn.__file__).parent

# From the front door to the street; CONTRIBUTING.md explains them.
ROOMS = [
    "errors",
    "checks",
    "progress",
    "files",
    "bounds",
    "codes",
    "constructions",
    "annealing",
    "data",
    "comparing",
    "asking",
    "backbones",
    "cuda_graphs",
    "decoders",
    "objectives",
    "recipes",
    "kinds",
    "model",
    "baselines",
    "models",
    "attacks",
    "evaluation",
    "training",
    "auditing",
    "spec",
    "experiment",
    "runs",
    "predicting",
    "serving",
    "estimators",
    "exporting",
    "hub",
    "plots",
    "report",
    "pipeline",
    "cli",
]


def room_of(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            module = node.module or ""
            if module == "ecnn":
                found |= {alias.name for alias in node.names}
            elif module.startswith("ecnn."):
                found.add(module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ecnn.")}
    return found


def sources() -> list[Path]:
    return [
        path
        for path in sorted(HOUSE.rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py") or path.parent != HOUSE
    ]


def test_every_room_is_on_the_map() -> None:
    assert {room_of(path) for path in sources()} == set(ROOMS)
    contributing = (HOUSE.parents[1] / "CONTRIBUTING.md").read_text()
    assert [room for room in ROOMS if f"`{room}`" not in contributing] == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(HOUSE)))
def test_imports_point_up(path: Path) -> None:
    room = room_of(path)
    above = ROOMS[: ROOMS.index(room) + 1]
    assert imported_rooms(path) <= set(above), f"{room} may import only {above}"


#: Questions to the disk that raise where a path may not be looked at, or pass over what may not be read.
BARE = {"exists", "is_file", "is_dir", "glob", "rglob", "iterdir"}
ALLOWED = {
    "codes.py: iterdir": "files of the package",
    "runs.py: iterdir": "files of the package",
    "runs.py: is_dir": "files of the package",
    "runs.py: is_file": "files of the package",
    "runs.py: glob": "a guess which run was meant: what may not be read is none",
    "pipeline/adopting.py: glob": "a search for runs that can be copied: what may not be read cannot",
    "data/downloads.py: is_dir": "an entry of an archive",
}


def test_the_disk_is_asked_through_files() -> None:
    """`Path.exists` and its kin raise PermissionError and OSError: `files.exists` says which path, and why."""
    found = {
        f"{path.relative_to(HOUSE)}: {node.func.attr}"
        for path in sources()
        if room_of(path) != "files"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BARE
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "files")
    }
    assert found == {*ALLOWED}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import ecnn", ["torch", "numpy", "numba", "matplotlib", "rich"]),
        (
            "import ecnn.codes, ecnn.constructions, ecnn.bounds",
            ["torch", "numba", "matplotlib", "sklearn", "scipy"],
        ),
        ("import ecnn.annealing", ["torch", "matplotlib", "sklearn"]),
        ("import ecnn.plots", ["torch", "matplotlib", "numba"]),
        (
            "import sys\nsys.argv = ['ecnn', '--help']\nfrom ecnn.cli import app\n"
            "try:\n    app()\nexcept SystemExit as stop:\n    assert not stop.code",
            ["torch", "numpy", "numba", "matplotlib"],
        ),
    ],
)
def test_what_an_import_does_not_load(statement: str, absent: list[str]) -> None:
    program = f"{statement}\nimport sys\nprint([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_public_names_change_on_purpose() -> None:
    listed = json.loads((Path(__file__).parent / "api.json").read_text())
    assert sorted(ecnn.__all__) == listed
    for name in ecnn.__all__:
        assert getattr(ecnn, name) is not None
        assert name in dir(ecnn)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ecnn.nothing


def test_the_version_is_one() -> None:
    citation = (HOUSE.parents[1] / "CITATION.cff").read_text()
    assert f"version: {ecnn.__version__}\n" in citation
    assert f"## {ecnn.__version__}" in (HOUSE.parents[1] / "CHANGELOG.md").read_text()
