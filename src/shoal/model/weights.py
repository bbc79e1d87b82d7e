"""Weight tensors as the file holds them: a shape, a storage type and borrowed bytes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class WeightType(enum.StrEnum):
    """Storage types of weights; block formats are those of GGML."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"


@dataclass(frozen=True, slots=True, eq=False)
class WeightTensor:
    """A weight in its storage type.

    `shape` is row-major: (outputs, inputs) for a matrix, (n,) for a vector. `data` is uint8, the
    bytes of the file (a read-only view of its memory map), row after row.
    """

    name: str
    shape: tuple[int, ...]
    type: WeightType
    data: npt.NDArray[np.uint8]
