"""Optimizers, and the settings of local training that all algorithms share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeVar

import torch
from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn

from p2pfl.learning.named_losses import DEFAULT, known_loss
from p2pfl.options import Options
from p2pfl.tensors import is_finite

OptimizerName = Literal["sgd", "adam"]
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def _lean(optimizer: type[OptimizerT]) -> type[OptimizerT]:
    """Return the optimizer without what each step does for torch's compiler and profiler.

    Decorators that tell the compiler what to leave out import it, which takes 80 MiB of memory and more than a
    second; nothing here is compiled. To name each step for the profiler takes a fifth of a small model's step.
    """
    methods = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    plain = {name: inspect.unwrap(getattr(optimizer, name)) for name in methods}
    bare = torch.no_grad()(inspect.unwrap(optimizer.step))
    named = optimizer.profile_hook_step(bare)  # runs hooks too

    def step(self: OptimizerT, closure: Callable[[], float] | None = None) -> float | None:
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        loss: float | None = (named if hooks else bare)(self, closure)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # otherwise, torch replaces it with one that names each step
    return type(optimizer.__name__, (optimizer,), {**plain, "step": step, "__module__": __name__})


SGD = _lean(torch.optim.SGD)
Adam = _lean(torch.optim.Adam)
AdamW = _lean(torch.optim.AdamW)


@dataclass(frozen=True)
class LocalTraining(Options):
    """How a peer trains on its local samples.

    All methods have these defaults, so that methods differ only where their papers do. A subclass sets what its paper
    asks for, and the page of the algorithm says so.
    """

    local_epochs: PositiveInt = 1
    """Epochs over the local training samples per round."""
    batch: PositiveInt = 64
    """Samples per optimizer step."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is smaller than ``batch``, unless it is the only one."""
    optimizer: OptimizerName = "sgd"
    """sgd or adam; its state persists across rounds."""
    lr: PositiveFloat = 0.01
    """Learning rate."""
    momentum: NonNegativeFloat = 0.0
    """Momentum; sgd only."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the moment estimates; adam only."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty added to the gradient."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of a gradient in local training, to which larger ones are scaled down; null: any."""
    loss: Annotated[str, AfterValidator(known_loss)] = DEFAULT
    """Loss on the labels: ce (cross-entropy), label-smoothing, focal, or a plug-in's."""

    @model_validator(mode="after")
    def _uses_every_setting(self) -> Self:
        # A resolved run file lists all defaults, so only another value shows that an effect is expected.
        unused = "betas" if self.optimizer == "sgd" else "momentum"
        preset = self.PRESETS.get(getattr(self, "preset", ""), {})
        if getattr(self, unused) not in (getattr(type(self), unused), preset.get(unused)):
            raise ValueError(f"{unused} has no effect with optimizer {self.optimizer}; remove it")
        return self

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Create an optimizer of ``parameters`` with these settings. Infinite entries stay as they are."""
        parameters = list(parameters)
        optimizer: torch.optim.Optimizer
        if self.optimizer == "sgd":
            optimizer = SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        else:
            optimizer = Adam(parameters, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)
        infinite = {p: p.detach().clone() for p in parameters if not is_finite(p.detach())}
        if infinite:
            optimizer.register_step_post_hook(lambda *_: _restore(infinite))
        return optimizer


@torch.no_grad()
def _restore(infinite: Mapping[nn.Parameter, Tensor]) -> None:
    """Undo a step for infinite entries, e.g. of a mask: with weight decay it makes NaN of them, −∞ − (−∞)."""
    for parameter, before in infinite.items():
        parameter.copy_(torch.where(before.isinf(), before, parameter))


def step_if_finite(optimizer: torch.optim.Optimizer) -> None:
    """Take one step and clear the gradients; skip the step if a gradient holds NaN or infinity.

    One such step would make the parameters and Adam's moments NaN permanently.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(parameter.grad is None or is_finite(parameter.grad) for parameter in parameters):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
