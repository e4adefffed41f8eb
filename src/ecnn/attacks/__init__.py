"""Attacks: immutable objects called as attack(model, images, labels) -> images in the same ball, still in [0, 1]."""

from ecnn.attacks.apgd import APGD
from ecnn.attacks.auto import AutoAttack, Doubt
from ecnn.attacks.base import Attack, Attacked, Cost
from ecnn.attacks.blackbox import HopSkipJump, RandomNoise, Transfer, Unchanged
from ecnn.attacks.carlini import BlindSpot, CarliniWagnerL2, MemberCarliniWagner
from ecnn.attacks.estimated import EstimatedPGD
from ecnn.attacks.fab import FAB
from ecnn.attacks.gradient import BIM, FGSM, PGD
from ecnn.attacks.jsma import JSMA
from ecnn.attacks.minimal import FMN, DeepFool
from ecnn.attacks.norms import NORMS
from ecnn.attacks.race import Race
from ecnn.attacks.randomness import Draws
from ecnn.attacks.ray_directions import Neighbours
from ecnn.attacks.rays import RaySearch
from ecnn.attacks.sparse import SparsePGD
from ecnn.attacks.square import Square
from ecnn.attacks.transformed import TransformedPGD
from ecnn.attacks.views import VIEWS, Accepted, Aim, Averaged, Look, ScoreView, View, WeakestBit

#: The attacks by name. `Transfer` needs a source model, so it is built in Python only.
ATTACKS: dict[str, type[Attack]] = {
    "fgsm": FGSM,
    "bim": BIM,
    "pgd": PGD,
    "apgd": APGD,
    "fab": FAB,
    "square": Square,
    "autoattack": AutoAttack,
    "race": Race,
    "cw": CarliniWagnerL2,
    "member_cw": MemberCarliniWagner,
    "blindspot": BlindSpot,
    "jsma": JSMA,
    "sparse_pgd": SparsePGD,
    "deepfool": DeepFool,
    "fmn": FMN,
    "hopskipjump": HopSkipJump,
    "rays": RaySearch,
    "noise": RandomNoise,
    "transformed_pgd": TransformedPGD,
    "estimated_pgd": EstimatedPGD,
    "none": Unchanged,
}

__all__ = [
    "ATTACKS",
    "APGD",
    "Accepted",
    "Aim",
    "Attack",
    "Attacked",
    "AutoAttack",
    "Averaged",
    "BIM",
    "BlindSpot",
    "CarliniWagnerL2",
    "Cost",
    "DeepFool",
    "Doubt",
    "Draws",
    "EstimatedPGD",
    "FAB",
    "FGSM",
    "FMN",
    "HopSkipJump",
    "JSMA",
    "Look",
    "MemberCarliniWagner",
    "NORMS",
    "Neighbours",
    "PGD",
    "Race",
    "RandomNoise",
    "RaySearch",
    "ScoreView",
    "SparsePGD",
    "Square",
    "Transfer",
    "TransformedPGD",
    "Unchanged",
    "VIEWS",
    "View",
    "WeakestBit",
]
