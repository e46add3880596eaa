"""Local training: batches, views, optimizer steps, and the modes of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from p2pfl.learning.cuda_graph import CapturedGradients
from p2pfl.learning.gradients import Batch, GradientRule, LossTerms
from p2pfl.learning.meter import Meter
from p2pfl.learning.named_losses import DEFAULT, LOSSES
from p2pfl.learning.peer_data import PeerData
from p2pfl.models import Model
from p2pfl.models.backbone import stays_in_evaluation
from p2pfl.outcomes import AVERAGES, TRAININGS, Outcomes
from p2pfl.rng import Streams
from p2pfl.tensors import ORDINARY, InitialValues, Tensors, assign, clone, diverged_entry, is_statistic, parameters_of


class Trainer:
    """Trains a model on a peer's local samples.

    Attributes:
        model: trained together with all other modules among the attributes of a subclass.
        optimizer: set by the subclass.
        views: augmented views of each sample in a training batch.
        meter: means of the loss terms.
        gradient: draws batches, and makes their gradients.
        gradient_state: what ``gradient`` keeps from batch to batch.
        captured: makes gradients from CUDA graphs; None: none are used.
        outcomes: counts of what was kept, and of what was skipped because it had diverged.
        training_seconds: time spent in ``train``, by ``now``.
        trained_samples: how often a network was trained on a sample or one of its views; for a simulated clock.
        trains: whether ``train`` takes steps. Otherwise it draws batches and counts their samples.
        before_training: called when ``train`` begins; if it returns False, nothing is trained.
        after_batch: called after each batch; may raise to stop training.
        loss_name: the loss on the labels, of the table LOSSES.
        drop_last: whether epochs leave out a last batch that is smaller than the others.
        norm_statistics: what becomes of the model's batch-normalization statistics, for people to read.
        shared_norm_statistics: the same with ``share_statistics: true``.
    """

    optimizer: torch.optim.Optimizer
    views: int = 1
    loss_name: str = DEFAULT
    drop_last: bool = False
    trained_models: ClassVar[int] = 1
    """Networks that ``train`` trains on each batch, unless told otherwise."""
    norm_statistics: str = "local"
    shared_norm_statistics: str = "averaged"

    def __init__(self, model: Model, data: PeerData, streams: Streams) -> None:
        self.model = model
        self.data = data
        self.streams = streams
        self.meter = Meter()
        self.gradient = GradientRule()
        self.gradient_state: dict[str, Any] = {}
        self.captured: CapturedGradients | None = None
        self.outcomes = Outcomes()
        self._starts: dict[tuple[nn.Module, str], InitialValues] = {}
        self.now: Callable[[], float] = perf_counter
        self.training_seconds = 0.0
        self.trained_samples = 0
        self.trains = True
        self.before_training: Callable[[], bool] = lambda: True
        self.after_batch: Callable[[], None] = lambda: None

    def loss(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the terms of the training loss on one batch; their sum is minimized. Default: ``label_loss``.

        Args:
            x: network input, e.g. float [views * B, C, H, W]: the first views of all samples, then the second ones.
            labels: int64 [views * B].
        """
        return self.label_loss(self.model(x), labels)

    def label_loss(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss on the labels that the run file names, by its name; cross-entropy, "ce", by default."""
        return {self.loss_name: LOSSES[self.loss_name](logits, labels)}

    def train(
        self,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch: int,
        step: Callable[[Tensor, Tensor], None] | None = None,
        order: str = "batches",
        models: int | None = None,
    ) -> None:
        """Train for a number of epochs over the local samples, or of steps.

        Args:
            step: processes a batch of inputs and labels; default ``self.step``. For algorithms that train in phases.
            order: name of the stream that shuffles the samples.
            models: networks that each batch trains; default: ``trained_models``.
        """
        if not self.before_training():
            return
        began = self.now()
        passes = self.views * (self.trained_models if models is None else models)
        with self.training():
            for images, labels in self._batches(epochs, steps, batch, self.streams.numpy(order)):
                if self.trains:
                    (step or self.step)(images, labels)
                self.trained_samples += passes * len(labels)
                self.after_batch()
        self.training_seconds += self.now() - began

    def train_or_roll_back(self, *, epochs: int, batch: int, beside: Sequence[nn.Module] = ()) -> Tensors:
        """Train; if the model has then diverged, restore model and optimizer as they were before.

        Args:
            beside: modules that are trained with the model: if one diverges, all are restored.

        Returns:
            A copy of the model's parameters that train from before, by name.
        """
        modules = [self.model, *beside]
        before, optimizer = [clone(m.state_dict()) for m in modules], copy.deepcopy(self.optimizer.state_dict())
        self.train(epochs=epochs, batch=batch)
        diverged = (self.what_diverged(module.state_dict()) for module in modules)
        if not self.outcomes.note(TRAININGS, next(filter(None, diverged), "")):
            for module, state in zip(modules, before, strict=True):
                module.load_state_dict(state)
            self.optimizer.load_state_dict(optimizer)
        return {name: before[0][name] for name in parameters_of(self.model)}

    def assign_unless_diverged(self, target: Tensors, values: Tensors) -> bool:
        """Copy ``values`` into ``target`` in place unless one has diverged; return whether they were copied.

        ``Net`` drops received bodies that have diverged, but the local values may have diverged too.
        """
        if not self.outcomes.note(AVERAGES, self.what_diverged(target, values)):
            return False
        assign(target, values)
        return True

    def note_start(self) -> None:
        """Note the values of all modules among the attributes before round 0: divergence is judged by them."""
        self._starts = {
            (owner, name): InitialValues.of(tensor.detach(), constant=is_buffer and not is_statistic(name))
            for owner, name, tensor, is_buffer, _ in self._places()
        }

    def what_diverged(self, tensors: Tensors, values: Tensors | None = None) -> str:
        """Return which of some tensors has diverged, and its value; empty if none has.

        A tensor that shares memory with one of the modules' is compared with what that was before round 0, so that a
        mask with −∞, or a table of large numbers, has not diverged. Buffers other than the running statistics of
        normalization are not trained: of these, only NaN counts.

        Args:
            values: new values of the tensors, by name, to check instead of the current ones.
        """
        found = tensors if values is None else values
        suspects = [name for name, tensor in found.items() if diverged_entry(tensor) is not None]
        if not suspects:  # fast: most of the time
            return ""
        places = {tensor.data_ptr(): (owner, name, where) for owner, name, tensor, _, where in self._places()}
        for suspect in suspects:
            owner, name, where = places.get(tensors[suspect].data_ptr(), (None, "", suspect))
            start = ORDINARY if owner is None else self._starts.get((owner, name), ORDINARY)
            if (entry := diverged_entry(found[suspect], start)) is not None:
                return f"{where} holds {entry:.3g}"
        return ""

    def module_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of all modules among the attributes by name, without a copy."""
        return {where: tensor.detach() for _, _, tensor, _, where in self._places()}

    def _places(self) -> Iterator[tuple[nn.Module, str, Tensor, bool, str]]:
        """Return each parameter and buffer: owner, name there, tensor, whether it is a buffer, name for people."""
        for attribute, module in vars(self).items():
            if isinstance(module, nn.Module):
                for prefix, owner in module.named_modules(prefix=attribute):
                    for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
                        if tensor is not None:
                            yield owner, name, tensor, name in owner._buffers, f"{prefix}.{name}"

    def reset_after_divergence(self) -> None:
        """Clear the optimizer's state and the batch-normalization statistics, which NaN parameters have spoiled."""
        clear_statistics(self.model, self.optimizer)

    def _batches(
        self, epochs: int | None, steps: int | None, size: int, order: np.random.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if steps is None:
            for _ in range(epochs or 0):
                yield from self.gradient.batches(self.data, size, order, self.drop_last)
            return
        done = 0
        while done < steps and len(self.data.train):
            for batch in self.gradient.batches(self.data, size, order, self.drop_last):
                yield batch
                done += 1
                if done == steps:
                    return

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Take one optimizer step on a batch of inputs as they are stored, e.g. uint8 images."""
        with self.streams.torch("augmentation"):
            x = self.inputs(images)
        self.descend(self.optimizer, self.loss, x, labels, self.views)

    def inputs(self, images: Tensor) -> Tensor:
        """Return the input of ``loss`` for a batch of inputs: the augmented views, concatenated."""
        views = [self.data.input(images, augmented=True) for _ in range(self.views)]
        return views[0] if self.views == 1 else torch.cat(views)

    def descend(
        self, optimizer: torch.optim.Optimizer, loss: LossTerms, x: Tensor, labels: Tensor, views: int = 1
    ) -> None:
        """Take one step of ``optimizer`` on the gradient that the run's rule makes of the sum of the loss terms.

        The meter averages each term over the samples.

        Args:
            loss: a function of network input and labels.
            x: network input of B samples, ``views`` times each: first views first.
            labels: int64 [B].
        """
        with self.streams.torch("dropout"):
            terms = self.differentiate(optimizer, loss, x, labels, views)
        optimizer.step()
        self.meter.add(terms, len(labels))

    def minimize(self, optimizer: torch.optim.Optimizer, loss: Tensor, x: Tensor, labels: Tensor) -> None:
        """Take one step on a loss that has been computed for one view of a batch, and free the gradients."""
        self.differentiate(optimizer, lambda x, labels: {"loss": loss}, x, labels, 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def differentiate(
        self, optimizer: torch.optim.Optimizer, loss: LossTerms, x: Tensor, labels: Tensor, views: int
    ) -> Mapping[str, Tensor]:
        """Let the run's rule set the gradients of the parameters that ``optimizer`` moves; return the loss terms."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            parameter.grad = None
        batch = Batch(loss, x, labels, views, parameters, self.streams, self.gradient_state)
        if self.captured is not None and self._is_plain(loss):
            return self.captured.backward(self.model, self.gradient, batch)
        return self.gradient.backward(batch)

    def _is_plain(self, loss: LossTerms) -> bool:
        """Whether a loss is a function of model, input and labels alone, and its gradient the mean's."""
        plain = (type(self).loss, type(self).label_loss) == (Trainer.loss, Trainer.label_loss)
        return plain and loss == self.loss and type(self.gradient) is GradientRule

    @contextmanager
    def training(self) -> Iterator[None]:
        """Put all modules in training mode, and back in evaluation mode on exit."""
        for module in self.modules():
            module.train()
        try:
            yield
        finally:
            for module in self.modules():
                module.eval()
                module.zero_grad(set_to_none=True)  # takes as much memory as the model

    def modules(self) -> Iterator[nn.Module]:
        return (value for value in vars(self).values() if isinstance(value, nn.Module))


def clear_statistics(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clear the optimizer's state and the batch-normalization statistics."""
    optimizer.state.clear()
    reset_norms(model)


def reset_norms(model: nn.Module) -> None:
    """Clear the batch-normalization statistics."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not stays_in_evaluation(module):
            module.reset_running_stats()
