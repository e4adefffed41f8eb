"""Error-correcting neural networks: design codes, train on them, attack them, and audit the result.

Names are loaded when they are first used, so that `import ecnn.codes` and `ecnn --help` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecnn.annealing import design_code as design_code
    from ecnn.annealing import exhaustive_code as exhaustive_code
    from ecnn.codes import CodeMatrix as CodeMatrix
    from ecnn.codes import codebook as codebook
    from ecnn.codes import load_code as load_code
    from ecnn.errors import InputError as InputError
    from ecnn.plots import plot_code as plot_code
    from ecnn.progress import progress_bar as progress_bar

__version__ = "0.1.0"

_ROOM_OF = {
    "CodeMatrix": "codes",
    "InputError": "errors",
    "codebook": "codes",
    "design_code": "annealing",
    "exhaustive_code": "annealing",
    "load_code": "codes",
    "plot_code": "plots",
    "progress_bar": "progress",
}

__all__ = ["__version__", *_ROOM_OF]


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        return getattr(importlib.import_module(f"ecnn.{_ROOM_OF[name]}"), name)
    raise AttributeError(f"module 'ecnn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})
