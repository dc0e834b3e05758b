"""What can be wrong with a checkpoint."""

from __future__ import annotations

from pathlib import Path

from greenroom.errors import GreenroomError


class CheckpointError(GreenroomError, OSError):
    """A checkpoint that is not whole, or not what it says it is.

    Attributes:
        file: the file that is at fault.
        tensor: the tensor that is at fault, or None where the whole file is.
        problem: what is wrong with it, in words.
    """

    def __init__(self, file: str | Path, tensor: str | None, problem: str) -> None:
        super().__init__(str(file), tensor, problem)
        self.file = str(file)
        self.tensor = tensor
        self.problem = problem

    def __str__(self) -> str:
        where = self.file if self.tensor is None else f"{self.file}: tensor {self.tensor!r}"
        return f"{where}: {self.problem}"
