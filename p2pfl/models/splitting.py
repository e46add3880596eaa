"""Split any network into a backbone and a head, which maps the backbone's features to the logits.

Where the head is, and what the network needs to work with every method, is found out once for each architecture, on
networks that are thrown away: the ones that are trained keep their attributes, statistics and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from p2pfl.errors import ModelError, PluginError
from p2pfl.inputs import Size, describe, varied
from p2pfl.models.backbone import copied, kept_random_states, plugin_line

MODES = ("evaluation", "training")


@dataclass(frozen=True)
class Layout:
    """How the networks of an architecture are split.

    Attributes:
        head: path of the head in the network; empty if the network is nothing else.
        features: number of features, which the head takes.
        converts: whether features and logits are converted to float32, and features to the dtype of the head.
        copies: whether the network, and whether the head, changes its input in place: it is given a copy.
    """

    head: str
    features: int
    converts: bool = False
    copies: tuple[bool, bool] = (False, False)

    def split(self, network: nn.Module) -> tuple[nn.Module, nn.Module]:
        """Return the network without its head, and the head. Raises ModelError."""
        head, backbone = network.get_submodule(self.head), network
        if self.head:
            network.set_submodule(self.head, nn.Identity())
        else:
            backbone = nn.Sequential()
        for part, copies in zip((backbone, head), self.copies, strict=True):
            if copies:
                part.register_forward_pre_hook(_copied)
        if self.converts:
            backbone.register_forward_hook(_to_float32)
            head.register_forward_pre_hook(_to_dtype)
            head.register_forward_hook(_to_float32)
        return backbone, head


def _copied(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0].clone()


def _to_dtype(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0].to(next(module.parameters()).dtype)


def _to_float32(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.float()


def find_layout(
    name: str, build: Callable[[], nn.Module], channels: int, size: Size, classes: int, head: str | None
) -> Layout:
    """Find out how a network is split.

    Args:
        name: of the network, for errors.
        build: builds it.
        channels, size, classes: as for ``build`` in building.py.
        head: path of the head; None for the linear layer whose output the network returns.

    Raises:
        ModelError: the network fails, its output is not float [B, classes], in training too, or it is not the
            output of the head.
    """
    with kept_random_states():
        network = build()
    other = copied(network)
    if other is None:
        with kept_random_states():
            other = build()
        other.load_state_dict(network.state_dict())
    if isinstance(network, torch.jit.ScriptModule):
        raise ModelError(
            f"{name!r} is compiled by torch.jit, so it cannot be split; name what builds the module itself"
        )
    inputs, batch = describe(channels, size), varied(2, channels, size)
    linear = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if head is None and not linear:
        raise ModelError(f"{name!r} has no linear layer; name its head: `head: classifier`")
    where = linear[-1] if head is None else head
    _check_part(name, network, where)

    returned: dict[str, Any] = {}
    for path in {*linear, where}:
        network.get_submodule(path).register_forward_hook(partial(_keep, returned, path))
    whole, changed, returns = {}, False, list[str]()
    for mode in MODES:
        given = batch.clone()
        with kept_random_states():
            whole[mode] = output = _outputs(name, network, given, mode, inputs)
        _check_output(name, network, output, (2, classes), mode, inputs)
        changed = changed or given._version != 0
        if mode == "evaluation":
            returns = [path for path in linear if _is_same(returned.get(path), output)]
    if head is None and returns and where not in returns:
        where = returns[-1]

    layout = Layout(where, 0, copies=(changed, False))
    backbone, last = layout.split(other)
    for mode in MODES:
        with kept_random_states():  # once for both: the head draws after the backbone
            try:
                features = _outputs(name, backbone, batch.clone(), mode, inputs)
            except (ModelError, PluginError) as error:
                text = str(error.__cause__).partition("\n")[0]
                raise _not_the_output(
                    name, where, f" (without it: {type(error.__cause__).__name__}: {text})"
                ) from error
            if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != 2:
                shape = type(features).__name__ if not isinstance(features, Tensor) else list(features.shape)
                text = f"{name!r} passes {shape} to its head {where!r} instead of [2, features]"
                raise ModelError(f"{text}; name another part as `head`")
            dtypes = {features.dtype, whole[mode].dtype, next(last.parameters()).dtype}
            if isinstance(returned.get(where), Tensor):
                dtypes.add(returned[where].dtype)
            given = features.detach().to(next(last.parameters()).dtype, copy=True)
            logits = _outputs(name, last, given, mode, f"its features, as its head {where!r},")
            layout = Layout(
                where,
                features.shape[1],
                layout.converts or dtypes != {torch.float32},
                (changed, layout.copies[1] or given._version != 0),
            )
            if not _is_close(logits, whole[mode], dtypes):
                raise _not_the_output(name, where, " in training" if mode == "training" else "")
    return layout


def _keep(returned: dict[str, Any], path: str, module: nn.Module, inputs: object, output: Any) -> None:
    returned[path] = output


def _is_same(value: object, output: Tensor) -> bool:
    return value is output or (
        isinstance(value, Tensor)
        and not output.is_meta
        and value.shape == output.shape
        and torch.equal(value, output)
    )


def _is_close(found: object, expected: Tensor, dtypes: set[torch.dtype]) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    if found.is_meta:
        return True
    tolerance = {} if all(dtype.itemsize > 2 for dtype in dtypes) else {"rtol": 0.05, "atol": 0.05}
    return torch.allclose(found.float(), expected.float(), equal_nan=True, **tolerance)


def _check_part(name: str, network: nn.Module, where: str) -> None:
    try:
        head = network.get_submodule(where)
    except AttributeError:
        near = ", ".join(child for child, _ in network.named_children())
        raise ModelError(f"{name!r} has no part {where!r} to be its head; its parts are {near}") from None
    if not list(head.parameters()):
        raise ModelError(f"{name!r}: its part {where!r} has nothing to train; name its last layer as `head`")


def _check_output(
    name: str, network: nn.Module, output: object, expected: tuple[int, int], mode: str, inputs: str
) -> None:
    during = " in training" if mode == "training" else ""
    if not isinstance(output, Tensor):
        remedy = "return the logits alone" + (
            " (args: {aux_logits: false})" if hasattr(network, "aux_logits") else ""
        )
        raise ModelError(f"{name!r} returns {type(output).__name__}{during}, not a tensor of logits; {remedy}")
    if tuple(output.shape) != expected:
        remedy = ""
        if output.dim() == 2 and len(output) == expected[0]:
            remedy = "; give it a parameter `num_classes`, or set the number of outputs in `args`"
        found = f"{list(output.shape)} instead of {list(expected)}"
        raise ModelError(f"{name!r} maps {expected[0]} {inputs} to {found}{during}{remedy}")
    if not output.is_floating_point():
        raise ModelError(f"{name!r} returns {output.dtype}{during}, not float logits")
    if mode == "training" and not output.requires_grad and any(p.requires_grad for p in network.parameters()):
        text = "no gradient reaches its parameters from its output in training"
        raise ModelError(f"{name!r}: {text}; compute it without detach, no_grad and inference_mode")


def _not_the_output(name: str, where: str, hint: str = "") -> ModelError:
    return ModelError(
        f"{name!r}: the output is not the output of its head {where!r}{hint}; name the last part as `head`, call it "
        "once, and return its output (logits) unchanged"
    )


def _outputs(name: str, network: nn.Module, batch: Tensor, mode: str, what: str) -> Any:
    """Return the output for a batch as a run computes it. Raises ModelError, PluginError."""
    network.train(mode == "training")
    with torch.set_grad_enabled(mode == "training"):
        return called(name, network, batch, f"for {what}" if mode == "evaluation" else f"in training for {what}")


def called(name: str, network: Callable[[Tensor], Any], batch: Tensor, when: str) -> Any:
    """Return the output for a batch. Raises ModelError, or PluginError with the line of the network that failed."""
    try:
        return network(batch)
    except Exception as error:
        text = f"{name!r} fails {when}: {type(error).__name__}: {' '.join(str(error).split())}"
        line = plugin_line(error)
        raise (ModelError(text) if line is None else PluginError(*line, text)) from error
