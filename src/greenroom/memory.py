"""Amounts of memory in the user's words: "12GiB", 12_000_000_000, "80%"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from greenroom.errors import ConfigError

UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)

ACCEPTED_BYTES = 'a positive number of bytes (12000000000) or a size such as "12GiB", "12 GB", "512MiB"'
ACCEPTED_MEMORY = ACCEPTED_BYTES + ', or a share of the device such as "80%"'


def parse_bytes(value: object, field: str = "bytes", accepted: str = ACCEPTED_BYTES) -> int:
    """Read an amount of memory as whole bytes.

    Args:
        value: a positive int, a float without a fraction (12e9), or a string of a number and a unit. Decimal
            units are powers of 1000 (kB, MB, GB, TB), binary ones powers of 1024 (KiB, MiB, GiB, TiB); case
            does not matter, and a bare number is bytes.
        field: the name to give in the error.
        accepted: what to say is accepted.

    Raises:
        ConfigError: for anything else; bool is not a number here, and zero is not an amount.
    """
    hint = None
    if isinstance(value, bool):
        pass
    elif isinstance(value, int):
        if value > 0:
            return value
    elif isinstance(value, float):
        if math.isfinite(value) and value >= 1 and value.is_integer():
            return int(value)
        if 0 < value < 1:
            hint = f'did you mean "{value * 100:g}%"?' if "%" in accepted else None
    elif isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        unit = (match.group(2).lower() or "b") if match else ""
        if match and unit in UNITS:
            amount = int(float(match.group(1)) * UNITS[unit]) if "." in match.group(1) else None
            amount = int(match.group(1)) * UNITS[unit] if amount is None else amount
            if amount > 0:
                return amount
        elif match and unit in ("k", "m", "g", "t"):
            hint = f'"{match.group(1)}{unit.upper()}B" or "{match.group(1)}{unit.upper()}iB"?'
    raise ConfigError(field, value, accepted, hint)


def format_bytes(count: int | float) -> str:
    """Bytes for people, in decimal units: ``format_bytes(12_340_000_000) == "12.34 GB"``."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.995:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


@dataclass(frozen=True)
class Memory:
    """A memory budget: either a number of bytes or a share of the device's memory.

    Attributes:
        bytes: the absolute amount, or None.
        percent: the share of the device's total memory, above 0 and at most 100, or None.
        given: the words that it was read from, for errors; None where there were none.
    """

    bytes: int | None = None
    percent: float | None = None
    given: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.percent is None):
            raise ConfigError("Memory", (self.bytes, self.percent), "either bytes or percent, not both")
        if self.bytes is not None:
            object.__setattr__(self, "bytes", parse_bytes(self.bytes, "Memory.bytes"))
        elif not _is_number(self.percent) or not 0 < self.percent <= 100:  # type: ignore[operator]
            raise ConfigError("Memory.percent", self.percent, "a number above 0 and at most 100")

    @classmethod
    def parse(cls, value: object, field: str = "memory") -> Memory:
        """Read "12GiB", "12 GB", bytes, "80%", or a Memory. Raises ConfigError naming ``field``."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
            percent = float(match.group(1))
            if 0 < percent <= 100:
                return cls(percent=percent, given=value)
        return cls(bytes=parse_bytes(value, field, ACCEPTED_MEMORY), given=value)

    def resolve(self, total: int) -> int:
        """The budget in whole bytes on a device of ``total`` bytes."""
        if self.bytes is not None:
            return self.bytes
        assert self.percent is not None
        return int(total * self.percent / 100)

    def to_word(self) -> int | str:
        """The JSON word that parses back to this budget: bytes, or "80%"."""
        if self.bytes is not None:
            return self.bytes
        return f"{self.percent!r}%"

    def __str__(self) -> str:
        return format_bytes(self.bytes) if self.bytes is not None else f"{self.percent:g}%"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
