"""The model of a peer: a backbone and its head."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from p2pfl.errors import ModelError
from p2pfl.tensors import frozen_of, note_frozen


class Model(nn.Module):
    """A backbone and its head.

    Attributes:
        name: of the architecture, e.g. ``tiny-cnn`` or ``htfe-cnn+fc512``.
        backbone: maps inputs such as float [B, C, H, W] to features, float [B, features].
        head: maps features to logits, float [B, classes]; one linear layer by default.
        head_path: where the head is in the network of a user that was split; None if none was, or if its number of
            features was changed.
    """

    def __init__(
        self,
        name: str,
        backbone: nn.Module,
        features: int,
        classes: int,
        head: nn.Module | None = None,
        head_path: str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.head_path = head_path
        self.features = features
        self.classes = classes
        self.backbone = backbone
        self.head = nn.Linear(features, classes) if head is None else head
        note_frozen(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits

    def plain_name(self, name: str) -> str:
        """Return the name of a parameter, buffer or attribute in the network of the user that was split."""
        part, _, rest = name.partition(".")
        if self.head_path is None or part not in ("backbone", "head"):
            return name
        return ".".join(filter(None, (self.head_path if part == "head" else "", rest)))

    def plain_state_dict(self) -> dict[str, Any]:
        """Return the state under the names of the user's class, which can load it; else under ours."""
        return {self.plain_name(name): value for name, value in self.state_dict().items()}

    @property
    def linear_head(self) -> nn.Linear:
        """The head, if it is a single linear layer with weights [K, d].

        A method that needs it sets ``Algorithm.linear_heads``, so that other models are rejected with the run file.

        Raises:
            ModelError: the head has several layers, or is frozen.
        """
        if not isinstance(self.head, nn.Linear):
            raise ModelError(f"{self.name!r} has a head of several layers, but the method needs a linear head")
        if "weight" in frozen_of(self.head):
            raise ModelError(f"{self.name!r} has a frozen head, but the method needs one that trains")
        return self.head

    def reset_linear_head(self) -> nn.Linear:
        """Draw the head's initial values anew, and return it. Raises ModelError as ``linear_head`` does.

        They are drawn on the CPU: from equal seeds, the generator of a GPU draws other values.
        """
        head = self.linear_head
        drawn = deepcopy(head).cpu()
        drawn.reset_parameters()
        head.load_state_dict(drawn.state_dict())
        return head
