"""The part of a model that peers exchange and average: parameters, and batch-normalization statistics if asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from p2pfl.learning.optimizers import LocalTraining
from p2pfl.models import Model
from p2pfl.options import OptionErrors, Options
from p2pfl.tensors import frozen_of, parameters_of, statistics_of

Share = Literal["trainable", "all", "head", "backbone"] | Annotated[tuple[str, ...], Field(min_length=1)]


@dataclass(frozen=True)
class SharedStatistics(LocalTraining):
    share_statistics: bool = False
    """Send and average the running means and variances of batch normalization too, with the weights of the
    parameters; otherwise they stay local."""


@dataclass(frozen=True)
class SharedModel(SharedStatistics):
    share: Share = "trainable"
    """Parameters that are sent and averaged; the others stay local. trainable: all but frozen ones, which are equal
    everywhere; all: frozen ones too; head or backbone: the trainable ones there; or a list of patterns of names, e.g.
    [backbone.0.*, head.*]."""


@dataclass(frozen=True)
class StepsOrEpochs(SharedModel):
    local_steps: PositiveInt | None = None
    """Gradient steps per round. Default without local_epochs: 1, as in Algorithm 1."""
    local_epochs: PositiveInt | None = None  # type: ignore[assignment]
    """Alternative to local_steps: epochs per round."""

    @model_validator(mode="after")
    def _exclusive(self) -> Self:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("give local_steps or local_epochs, not both")
        return self

    @property
    def steps(self) -> int | None:
        """Gradient steps per round; None if these are epochs."""
        return None if self.local_epochs else self.local_steps or 1


def shares_statistics(hyper: Options) -> bool:
    return isinstance(hyper, SharedStatistics) and hyper.share_statistics


def statistics_stay_local(hyper: Options) -> bool:
    """Return whether some of a model's statistics may not be exchanged."""
    return not shares_statistics(hyper) or getattr(hyper, "share", "trainable") not in ("trainable", "all")


def shared_tensors(model: Model, hyper: Options, share: Share = "trainable") -> dict[str, Tensor]:
    """Return the parameters and statistics of ``model`` that peers exchange, without a copy.

    Args:
        share: the part, unless the run file chooses it. Names are relative to that.

    Raises:
        OptionErrors: there is nothing of that name.
    """
    return shared_parameters(model, hyper, share) | shared_statistics(model, hyper, share)


def shared_parameters(model: Model, hyper: Options, share: Share = "trainable") -> dict[str, Tensor]:
    """As ``shared_tensors``, without the statistics."""
    share = getattr(hyper, "share", share)
    part = _part(model, share)
    parameters = parameters_of(part) | (frozen_of(part) if share == "all" else {})
    if isinstance(share, tuple):
        for number, pattern in enumerate(share):
            if not _matching(model, parameters, (pattern,)):
                known = ", ".join(parameters)
                raise OptionErrors([(("share", number), f"{pattern!r} matches no parameter; there are {known}")])
        parameters = _matching(model, parameters, share)
    if not parameters:
        raise OptionErrors([(("share",), f"{model.name} has no parameters to share: none train in {share!r}")])
    return parameters


def shared_statistics(model: Model, hyper: Options, share: Share = "trainable") -> dict[str, Tensor]:
    """Return the statistics that peers exchange, without a copy: {} unless ``share_statistics`` is set."""
    if not shares_statistics(hyper):
        return {}
    share = getattr(hyper, "share", share)
    found = statistics_of(_part(model, share))
    return _matching(model, found, share) if isinstance(share, tuple) else found


def _part(model: Model, share: Share) -> nn.Module:
    return model.get_submodule(share) if share in ("head", "backbone") else model


def _matching(model: Model, tensors: dict[str, Tensor], patterns: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors that a pattern matches, by their names here or in the user's class."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if any(fnmatchcase(text, pattern) for text in (name, model.plain_name(name)) for pattern in patterns)
    }
