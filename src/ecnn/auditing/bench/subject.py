"""One model of the benchmark, and the facts about it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ecnn import files
from ecnn.auditing.bench.informed import informed_accuracy
from ecnn.data import Dataset

EPS = 0.1
#: Raised whenever a network, its training or a trick changes, so that older weights and rows are not used.
VERSION = "2"

Half = Literal["first", "second"]
Make = Callable[[Dataset], nn.Module]
Train = Callable[[nn.Module, Dataset], None]
#: (model, images, labels, eps) -> the accuracy that is claimed.
Protocol = Callable[[nn.Module, Tensor, Tensor, float], float]
#: (model, images, labels, eps) -> points found by an attacker who knows the model or its secret.
Key = Callable[[nn.Module, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model of the benchmark: how it is made and trained, and what is claimed of it.

    Attributes:
        name: of the model, and of its file of weights.
        family: what kind of trick it uses; "honest" for all models with honest claims.
        half: "first" for models that were built before the attacks of the audit were changed for this benchmark,
            "second" for those drawn from the literature afterwards.
        honest: whether its claim comes from a strong evaluation or a proof.
        why: one sentence: what makes it look robust, or why it may be believed.
        make: makes the untrained network for a dataset.
        train: trains the network in place.
        claim: computes the accuracy that its authors would report.
        protocol: how the claim is computed, in words.
        eps: the Linf radius that the claim is about.
        knows: an attack made for this model, for models on which opening the tricks is not enough.
        key: an attack that uses a planted secret. No audit can be expected to find the secret, so models with a key
            are counted apart.
    """

    name: str
    family: str
    half: Half
    honest: bool
    why: str
    make: Make
    train: Train
    claim: Protocol
    protocol: str
    eps: float = EPS
    knows: Key | None = None
    key: Key | None = None

    @property
    def is_detectable(self) -> bool:
        """Whether the truth can be found without a secret key."""
        return self.key is None

    def build(self, data: Dataset, folder: Path | None = None) -> nn.Module:
        """The trained model in eval mode; weights are loaded from the folder, or trained and saved there."""
        path = None if folder is None else folder / f"{self.name}.safetensors"
        with seeded(0):
            model = self.make(data)
            if path is not None and files.exists(path):
                tensors, header = files.read_tensors(path)
                if header.get("version") == VERSION:
                    model.load_state_dict(tensors)
                    return model.eval()
            self.train(model, data)
        if path is not None:
            tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
            files.write_tensors(path, tensors, {"version": VERSION, "name": self.name})
        return model.eval()

    def claimed(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        """The accuracy that its authors would report on these images."""
        with seeded(0):
            return self.claim(copy.deepcopy(model), images, labels, self.eps)

    def informed(self, model: nn.Module, images: Tensor, labels: Tensor) -> float:
        """The accuracy under attackers who know how the model hides (`informed_accuracy`, with `knows` and `key`)."""
        made = [find for find in (self.knows, self.key) if find is not None]
        points = [find(model, images, labels, self.eps) for find in made]
        with seeded(1):
            return informed_accuracy(model, images, labels, self.eps, points=points)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators of torch, Python and NumPy; afterwards they continue from their earlier states."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
