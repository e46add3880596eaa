"""Properties of samples besides their label, such as the writer of a letter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Column:
    """One property of each sample.

    Attributes:
        values: the distinct values as text, in ascending order.
        train, test: int64 [N], the position in ``values`` of each sample's value.
    """

    values: tuple[str, ...]
    train: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]

    @staticmethod
    def of(train: npt.NDArray[Any], test: npt.NDArray[Any]) -> Column:
        """Encode the values, [N] each: numbers or text."""
        values, codes = np.unique(np.concatenate((train, test)), return_inverse=True)
        codes = codes.astype(np.int64)
        return Column(tuple(map(str, values.tolist())), codes[: len(train)], codes[len(train) :])


Columns = Mapping[str, Column]
