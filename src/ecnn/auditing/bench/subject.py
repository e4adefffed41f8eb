"""One model of the benchmark, and what is said about it."""

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
#: Changes when a network, its training or a trick does, so that weights of an older one are not loaded.
VERSION = "2"

Half = Literal["first", "second"]
Make = Callable[[Dataset], nn.Module]
Train = Callable[[nn.Module, Dataset], None]
#: (model, images, labels, eps) -> the accuracy that is claimed.
Protocol = Callable[[nn.Module, Tensor, Tensor, float], float]
#: (model, images, labels, eps) -> points that somebody finds who knows the model, or its secret.
Key = Callable[[nn.Module, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and what is said about it.

    Attributes:
        name: of the model, and of its file of weights.
        family: what kind of trick it uses; "honest" of those that use none.
        half: "first" for models that were built before the attacks of the audit were changed for this benchmark,
            "second" for those drawn from the literature afterwards.
        honest: whether its claim comes from a strong evaluation.
        why: one sentence: what makes it look robust, or why it may be believed.
        make: the untrained network, for a dataset.
        train: trains it where it is.
        claim: what its authors would report.
        protocol: the same in words.
        eps: the Linf radius that the claim is about.
        knows: an attack made for this model, where opening its tricks is not enough.
        key: of a planted secret, which no audit can be expected to find: such models are counted apart.
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
        """Whether somebody who does not know the key can find out."""
        return self.key is None

    def build(self, data: Dataset, folder: Path | None = None) -> nn.Module:
        """The trained model in eval mode; weights found in the folder are read, others are left there."""
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
        """The accuracy that attackers leave who know how the model hides (`informed_accuracy`)."""
        made = [find for find in (self.knows, self.key) if find is not None]
        points = [find(model, images, labels, self.eps) for find in made]
        with seeded(1):
            return informed_accuracy(model, images, labels, self.eps, points=points)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Every generator that a model here draws from, seeded; afterwards all go on as before."""
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
