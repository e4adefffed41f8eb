"""Attacks: immutable objects called as attack(model, images, labels) -> images in the same ball, still in [0, 1]."""

from ecnn.attacks.ball import project, random_start
from ecnn.attacks.base import Attack, Attacked
from ecnn.attacks.draws import Draws
from ecnn.attacks.gradient import BIM, FGSM, PGD
from ecnn.attacks.views import VIEWS

__all__ = ["Attack", "Attacked", "BIM", "Draws", "FGSM", "PGD", "VIEWS", "project", "random_start"]
