"""The usual settings of every attack, by attack and norm, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ecnn.attacks.norms import NORMS
from ecnn.checks import check_choice, parse_eps

#: For each norm the radius that most papers on small colour images use.
USUAL_EPS: dict[str, str] = {"linf": "8/255", "l2": "0.5", "l1": "12"}
_STEP = 4  # a step is the radius divided by this
_CW = {"steps": 1000, "search_steps": 9, "initial_constant": 0.001, "lr": 0.01}
#: Settings other than norm, eps and step size, and their source.
_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "fgsm": ({}, "Goodfellow et al. 2015"),
    "bim": ({"steps": 10}, "Kurakin et al. 2017"),
    "pgd": ({"steps": 100}, "Madry et al. 2018, with more steps"),
    "apgd": ({"steps": 100, "loss": "cross_entropy"}, "Croce & Hein 2020"),
    "fab": ({"steps": 100}, "Croce & Hein 2020"),
    "square": ({"queries": 5000}, "Andriushchenko et al. 2020, in AutoAttack"),
    "autoattack": ({"version": "standard"}, "Croce & Hein 2020"),
    "cw": (_CW, "Carlini & Wagner 2017, with a tenth of the steps"),
    "member_cw": (_CW, "as cw"),
    "blindspot": ({**_CW, "shrink": 0.8}, "as cw, on images of less contrast"),
    "jsma": ({"max_pixel_fraction": 0.145}, "Papernot et al. 2016"),
    "sparse_pgd": (
        {"max_pixel_fraction": 0.145, "steps": 100, "step_size": 10, "schedule": "cosine"},
        "Croce & Hein 2019, with JSMA's share of the pixels",
    ),
    "deepfool": ({"steps": 50}, "Moosavi-Dezfooli et al. 2016"),
    "fmn": ({"steps": 1000}, "Pintor et al. 2021"),
    "hopskipjump": ({"steps": 64, "samples": 100}, "Chen et al. 2020"),
    "race": ({"effort": 1}, "after Liu et al. 2022"),
    "rays": ({"queries": 10_000}, "Chen & Gu 2020"),
    "noise": ({"samples": 100}, "our choice"),
    "transformed_pgd": ({"steps": 40, "transformations": 8}, "Athalye et al. 2018"),
    "estimated_pgd": (
        {"steps": 100, "pairs": 50, "schedule": "cosine"},
        "Ilyas et al. 2018, with memory",
    ),
    "none": ({}, "nothing to set"),
}
_WITHOUT_NORM = ("cw", "member_cw", "blindspot", "jsma", "sparse_pgd", "none")
_WITHOUT_EPS = (*_WITHOUT_NORM, "deepfool", "fmn", "hopskipjump")
_WITH_STEP_SIZE = ("bim", "pgd", "transformed_pgd", "estimated_pgd")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Named settings of an attack.

    Attributes:
        name: such as "pgd-linf".
        attack: a name of `ecnn.attacks.ATTACKS`.
        options: keyword arguments of that attack, including all that have no default.
        source: where the settings come from.
    """

    name: str
    attack: str
    options: Mapping[str, Any]
    source: str

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.options.items()) or "no settings"
        return f"{self.attack}: preset {self.name}: {settings} ({self.source})"


def find_preset(attack: str, norm: str = "linf", eps: float | str | None = None) -> Preset:
    """The usual settings of an attack.

    Args:
        attack: a name of `ecnn.attacks.ATTACKS`.
        norm: of the ball or distance; ignored by attacks that have none.
        eps: radius; None takes the usual one of the norm. Ignored by attacks that have none.
    """
    check_choice("attack", attack, _SETTINGS)
    settings, source = _SETTINGS[attack]
    if attack in _WITHOUT_NORM:
        return Preset(name=attack, attack=attack, options=settings, source=source)
    check_choice("norm", norm, NORMS)
    radius: float | str = USUAL_EPS.get(norm, USUAL_EPS["linf"]) if eps is None else eps
    options: dict[str, Any] = {
        "norm": norm,
        **({} if attack in _WITHOUT_EPS else {"eps": radius}),
        **settings,
    }
    if attack in _WITH_STEP_SIZE:
        options["step_size"] = _part(radius)
    return Preset(name=f"{attack}-{norm}", attack=attack, options=options, source=source)


def _part(radius: float | str) -> str:
    """A quarter of the radius, as a fraction such as "2/255" if the radius is one and divides evenly."""
    length = parse_eps(radius)
    above, slash, below = str(radius).partition("/")
    if slash and above.strip().isdecimal() and int(above) % _STEP == 0:
        return f"{Fraction(int(above), _STEP)}/{below.strip()}"
    return f"{length / _STEP:.6g}"
