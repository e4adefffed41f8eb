"""One epoch of training on one device: the step, eager or as one CUDA graph, and the state that it changes.

Random generators are seeded anew for every epoch, from (seed, epoch). So a run that resumes after an epoch does exactly
what the uninterrupted run would have done.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.asking import eval_mode
from ecnn.checks import check_array
from ecnn.cuda_graphs import recording, tuned
from ecnn.data import Augmentation, Split
from ecnn.errors import InputError
from ecnn.objectives import Objective
from ecnn.recipes import Recipe

#: An attack to train with: (model, images, labels) -> attacked images; every attack of `ecnn.attacks` is one.
Craft = Callable[..., Tensor]

_WARM_UP_STEPS = 3


def seed_of(seed: int, epoch: int, purpose: int) -> int:
    """A seed for a random generator, from the run's seed, the epoch and a number for its purpose."""
    return int(np.random.SeedSequence([seed, epoch, purpose]).generate_state(1, np.uint64)[0] >> 1)


class Engine:
    """Model, optimizer, running average of the weights, and the step that changes them."""

    def __init__(
        self,
        model: nn.Module,
        train: Split,
        recipe: Recipe,
        objective: Objective,
        attack: Craft | None,
        seed: int,
        *,
        use_graph: bool,
        compile_parts: bool = False,
    ) -> None:
        self.model, self.recipe, self.objective = model, recipe, objective
        self.attack, self.seed = attack, seed
        self.objective_draws = takes_generator(objective)
        self.device = next(model.parameters()).device
        self.rank, self.world = _rank_and_world()
        self._check(train)
        self.train = train.to(self.device)
        if self.device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.averaged = copy.deepcopy(model).requires_grad_(False) if recipe.ema else None
        self.worker = self._make_worker()
        # Kept in lists: collecting the parameters of a module takes longer than launching a kernel.
        self.parameters: list[Tensor] = [*model.parameters()]
        self.worker_parameters: list[Tensor] = [*self.worker.parameters()]
        if compile_parts:
            self._compile_parts()
        self.steps_per_epoch = len(train) // recipe.batch_size
        self.augment = Augmentation(shift=recipe.shift, flip=recipe.flip, fill=recipe.fill)  # type: ignore[arg-type]
        self.generator = torch.Generator(self.device)
        self.lr = torch.zeros((), device=self.device)
        self.ema_share = torch.zeros((), device=self.device)
        self.index = torch.zeros(recipe.batch_size, dtype=torch.int64, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        self.optimizer = self._make_optimizer()
        self.use_graph = use_graph
        self.graph: Any = None
        self.note = ""

    def _check(self, train: Split) -> None:
        if len(train) < self.recipe.batch_size:
            raise InputError(
                f"a batch of {self.recipe.batch_size} is larger than the training set of {len(train)} images: use a "
                "smaller batch_size."
            )
        if self.recipe.precision == "bfloat16" and self.device.type != "cuda":
            raise InputError(f"precision='bfloat16' needs a CUDA device, but the model is on {self.device}.")
        if self.recipe.batch_size % self.world:
            raise InputError(
                f"a batch of {self.recipe.batch_size} cannot be shared equally by {self.world} processes."
            )

    def _make_optimizer(self) -> torch.optim.Optimizer:
        groups = parameter_groups(self.model, self.recipe.weight_decay)
        on_cuda = self.device.type == "cuda"
        # A CUDA graph reads the learning rate from a tensor, so that it can change without a new graph.
        options: dict[str, Any] = {"lr": self.lr if on_cuda else 0.0, "fused": on_cuda or None}
        if self.recipe.optimizer == "sgd":
            return torch.optim.SGD(groups, momentum=0.9, nesterov=True, **options)
        if on_cuda:
            options["capturable"] = True
        kind = torch.optim.AdamW if self.recipe.optimizer == "adamw" else torch.optim.Adam
        return kind(groups, **options)

    @property
    def is_half(self) -> bool:
        """Whether steps compute in bfloat16, which only CUDA does."""
        return self.device.type == "cuda" and self.recipe.precision != "float32"

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.is_half)

    def _make_worker(self) -> nn.Module:
        """The network that steps run: the model itself or, in half precision, a copy with bfloat16 weights.

        Autocast alone would launch one kernel to cast each weight and each gradient, a tenth of the time of a small
        step. The copy's weights are refreshed all at once. Its buffers, such as batch statistics, are the model's own
        tensors.
        """
        if not self.is_half:
            return self.model
        worker = copy.deepcopy(self.model)
        for ours, theirs in zip(worker.modules(), self.model.modules(), strict=True):
            for name in ours._buffers:
                ours._buffers[name] = theirs._buffers[name]
            if not isinstance(ours, nn.modules.batchnorm._BatchNorm):
                for parameter in ours.parameters(recurse=False):
                    parameter.data = parameter.data.to(torch.bfloat16)
        return worker

    def _compile_parts(self) -> None:
        """Compiles the network's parts, which attacks run too, and the objective, to fuse its many small kernels.

        An objective that draws random numbers is not compiled: torch.compile splits a function at every draw from an
        explicit generator, which leaves little to fuse.
        """
        for part in self.worker.children():
            part.compile(dynamic=False)
        if self.objective_draws:
            return
        objective = self.objective

        def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            return objective(model, images, labels)

        self.objective = torch.compile(loss, dynamic=False)

    def _refresh_worker(self) -> None:
        if self.worker is not self.model:
            with torch.no_grad():
                torch._foreach_copy_(self.worker_parameters, self.parameters)

    def _forget_gradients(self) -> None:
        for parameter in self.worker_parameters:
            parameter.grad = None

    def _fetch_gradients(self) -> None:
        """Copies the worker's gradients to the model's parameters, in the precision of these."""
        targets, sources = [], []
        for ours, theirs in zip(self.parameters, self.worker_parameters, strict=True):
            if theirs.grad is not None:
                if ours.grad is None:
                    ours.grad = torch.empty_like(ours)
                targets.append(ours.grad)
                sources.append(theirs.grad)
        torch._foreach_copy_(targets, sources)

    def final_model(self) -> nn.Module:
        """The model to validate and to keep: the running average of the weights if there is one, else the model."""
        return self.averaged if self.averaged is not None else self.model

    def run_epoch(self, epoch: int, on_step: Callable[[int], None]) -> Tensor:
        """Trains for one epoch; returns the (step,) losses, still on the device."""
        order_generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, 0))
        order = torch.randperm(len(self.train), generator=order_generator, device="cpu")
        batches = order[: self.steps_per_epoch * self.recipe.batch_size].to(self.device)
        batches = batches.view(self.steps_per_epoch, self.recipe.batch_size)
        self.worker.train()
        self._refresh_worker()
        if self.use_graph and self.graph is None:
            self._capture(batches[0])
        self.generator.manual_seed(seed_of(self.seed, epoch, 1))
        losses = torch.zeros(self.steps_per_epoch, device=self.device)
        total = self.steps_per_epoch * self.recipe.epochs
        for step in range(self.steps_per_epoch):
            done = epoch * self.steps_per_epoch + step
            self._set_rates(done, total)
            self.index.copy_(batches[step])
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()
            losses[step].copy_(self.loss)
            on_step(step + 1)
        return losses

    def _set_rates(self, done: int, total: int) -> None:
        lr = self.recipe.lr_at(done / total)
        if self.device.type == "cuda":
            self.lr.fill_(lr)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        if self.recipe.ema:
            # At first the average forgets faster, so that it does not keep the random initial weights for long.
            self.ema_share.fill_(1 - min(self.recipe.ema, (1 + done) / (10 + done)))

    def _step(self) -> None:
        images = self.augment(self.train.images[self.index], self.generator)
        labels = self.train.labels[self.index]
        if self.world > 1:  # each process augments the whole batch, so that generators stay in step
            images, labels = images[self.rank :: self.world], labels[self.rank :: self.world]
        order = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        images = images.to(torch.float32, memory_format=order).div_(255)
        with self.autocast():
            if self.attack is not None:
                images = self._with_adversarial(images, labels)
            drawn_from = {"generator": self.generator} if self.objective_draws else {}
            loss = self.objective(self.worker, images, labels, **drawn_from)
        _check_loss(loss)
        self._forget_gradients()
        torch.autograd.backward(loss)
        if self.worker is not self.model:
            self._fetch_gradients()
        if self.world > 1:
            self._average_gradients()
        self.optimizer.step()
        self._refresh_worker()
        self.loss.copy_(loss.detach())
        if self.averaged is not None:
            self._update_average()

    def _with_adversarial(self, images: Tensor, labels: Tensor) -> Tensor:
        """The batch with its first images attacked, in eval mode so that the attack updates no batch statistics."""
        assert self.attack is not None
        count = max(1, round(self.recipe.adversarial_ratio * len(images)))
        with eval_mode(self.worker):
            crafted = craft(self.attack, self.worker, images[:count], labels[:count], self.generator).detach()
        return crafted if count == len(images) else torch.cat([crafted, images[count:]])

    def _average_gradients(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        torch.distributed.all_reduce(flat)
        flat /= self.world
        offset = 0
        for gradient in gradients:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()

    def _update_average(self) -> None:
        assert self.averaged is not None
        with torch.no_grad():
            ours, theirs = _float_state(self.averaged), _float_state(self.model)
            differences = torch._foreach_sub(theirs, ours)
            torch._foreach_mul_(differences, self.ema_share)
            torch._foreach_add_(ours, differences)

    def _capture(self, first_batch: Tensor) -> None:
        """Records the whole step as one CUDA graph; a failure is noted and the step stays eager."""
        before = [tensor.clone() for tensor in self._all_state()]
        try:
            with tuned():
                self.graph = self._record_step(first_batch)
        except (RuntimeError, AttributeError) as error:
            self.note = (
                f"the step runs eagerly, because it could not be captured: {str(error).splitlines()[0]}"
            )
            self.use_graph = False
            torch.cuda.synchronize()
        after = self._all_state()
        with torch.no_grad():
            for index, tensor in enumerate(after):  # what the optimizer made in its first step becomes zero
                tensor.copy_(before[index]) if index < len(before) else tensor.zero_()
        self._refresh_worker()

    def _record_step(self, batch: Tensor) -> Any:
        self.index.copy_(batch)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        self._forget_gradients()
        with recording(graph):
            self._step()
        return graph

    def _all_state(self) -> list[Tensor]:
        """Every tensor that a step changes; the optimizer's come last."""
        tensors = [*self.model.state_dict().values()]
        if self.averaged is not None:
            tensors += self.averaged.state_dict().values()
        for entries in self.optimizer.state.values():
            tensors += [value for value in entries.values() if isinstance(value, Tensor)]
        return tensors


def craft(
    attack: Craft, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator
) -> Tensor:
    """The attacked images; an attack with an argument `generator` gets this one."""
    options = {"generator": generator} if takes_generator(attack) else {}
    attacked = attack(model, images, labels, **options)
    check_array("what the attack returned", attacked, *images.shape)
    return attacked


def takes_generator(function: Callable[..., Any]) -> bool:
    """Whether an attack or objective has an argument `generator`, the source of its random numbers."""
    try:
        return "generator" in inspect.signature(function).parameters
    except ValueError:  # some built-in functions have no signature
        return False


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer: weights, which decay, then biases and norms, which do not.

    Biases of members have two axes, as weights do, so biases are recognised by their names.
    """
    decaying: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decaying if parameter.dim() > 1 and not name.endswith("bias") else others).append(parameter)
    return [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _float_state(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]


def _check_loss(loss: Any) -> None:
    """Raises InputError unless an objective returned a scalar tensor with a gradient."""
    if not isinstance(loss, Tensor) or loss.ndim:
        came = (
            f"shape {tuple(loss.shape)}: take its mean" if isinstance(loss, Tensor) else type(loss).__name__
        )
        raise InputError(f"the objective must return a tensor of one number, shape (), not {came}.")
    if not loss.requires_grad:
        raise InputError(
            "the objective depends on no parameter that is trained: unfreeze some (requires_grad_), and compute it "
            "with gradients."
        )


def _rank_and_world() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
