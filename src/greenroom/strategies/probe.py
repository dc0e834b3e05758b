"""Timing one forward of a part on the device's own clock: each block, each copy, and what lies around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from greenroom.accelerator import Accelerator
from greenroom.staging import Copy, Span
from greenroom.strategies.brackets import Bracket
from greenroom.streaming import Copier

# Two measurements of one thing may differ by this much.
_NOISE = 0.02


@dataclass(frozen=True)
class Timing:
    """What one forward took, in seconds.

    Attributes:
        forward_s: from its first kernel to its last.
        block_s: compute time of each block; waiting for its copy is not in it.
        other_s: compute time outside the blocks.
        copies: (bytes, seconds) of each copy that was made meanwhile.
        lanes: (lane, name, start, end, bytes), start and end from the beginning of the forward.
        memory: (seconds from the beginning, bytes allocated on the device) at the start of each block.
    """

    forward_s: float
    block_s: tuple[float, ...]
    other_s: float
    copies: tuple[tuple[int, float], ...]
    lanes: tuple[tuple[str, str, float, float, int], ...] = field(default=(), repr=False)
    memory: tuple[tuple[float, int], ...] = field(default=(), repr=False)

    def like(self, other: Timing) -> bool:
        """Whether the two differ by no more than measuring does."""
        mine, theirs = (*self.block_s, self.other_s), (*other.block_s, other.other_s)
        slack = _NOISE * max(self.forward_s, other.forward_s) / max(1, len(mine))
        return len(mine) == len(theirs) and all(
            abs(a - b) <= _NOISE * max(a, b) + slack for a, b in zip(mine, theirs, strict=True)
        )


class Probe:
    """Hangs on one part from `__init__` to `stop`; `timing` waits for the device and adds up.

    Args:
        accelerator: whose events to use.
        copier: whose copies to time.
        blocks: the part's blocks in execution order, None for one that is gone.
        names: their names.
    """

    def __init__(
        self, accelerator: Accelerator, copier: Copier, blocks: list[nn.Module | None], names: list[str]
    ) -> None:
        self.accelerator = accelerator
        self.copier = copier
        self._blocks: dict[int, tuple[str, Any, Any]] = {}
        self._copies: list[tuple[str, int, Span, Copy]] = []
        self._memory: list[tuple[Any, int]] = []
        self._names = names
        self._hooks: list[Any] = []
        self._begin, self._end = self._event(), self._event()
        for i, block in enumerate(blocks):
            if block is not None:
                self._watch(i, block)
        copier.probe = self
        self._begin.record(accelerator.current_stream())

    def _event(self) -> Any:
        return self.accelerator.new_event(timing=True)

    def _watch(self, index: int, block: nn.Module) -> None:
        # Inside of the ring's own hooks: after the wait for the block's copy, before the block is released.
        start, end = self._event(), self._event()

        def before(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            start.record(self.accelerator.current_stream())
            self._memory.append((start, self.accelerator.allocated()))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            end.record(self.accelerator.current_stream())
            self._blocks[index] = (self._names[index], start, end)

        def hooks(module: nn.Module) -> list[Any]:
            return [module.register_forward_pre_hook(before), module.register_forward_hook(after, prepend=True)]

        self._hooks.append(Bracket(block, before, after, hooks))

    def span(self) -> Span:
        return self._event(), self._event()

    def copied(self, name: str, nbytes: int, span: Span, copy: Copy) -> None:
        self._copies.append((name, nbytes, span, copy))

    def stop(self) -> None:
        """The forward is over."""
        self._end.record(self.accelerator.current_stream())
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.copier.probe is self:
            self.copier.probe = None

    def timing(self) -> Timing:
        """The figures; waits until the device is past the end of the forward, and of the copies made meanwhile.

        A copy that failed has no time; whoever needs it is told.
        """
        self._end.synchronize()
        made = [(name, nbytes, *span) for name, nbytes, span, copy in self._copies if not copy.failed()]
        for _, _, _, end in made:
            end.synchronize()
        blocks = [self._blocks.get(i) for i in range(len(self._names))]
        block_s = tuple(_seconds(b[1], b[2]) if b is not None else 0.0 for b in blocks)
        forward_s = _seconds(self._begin, self._end)
        ran = sorted((_seconds(self._begin, b[1]), _seconds(self._begin, b[2])) for b in blocks if b is not None)
        # Before the first block and after the last: between two blocks there is mostly the wait for a copy.
        other_s = max(0.0, ran[0][0]) + max(0.0, forward_s - ran[-1][1]) if ran else forward_s
        copies = tuple((nbytes, max(_seconds(s, e), 1e-12)) for _, nbytes, s, e in made)
        lanes = [
            ("compute", b[0], _seconds(self._begin, b[1]), _seconds(self._begin, b[2]), 0)
            for b in blocks
            if b is not None
        ]
        lanes += [("copy", c, _seconds(self._begin, s), _seconds(self._begin, e), nbytes) for c, nbytes, s, e in made]
        memory = tuple((_seconds(self._begin, event), nbytes) for event, nbytes in self._memory)
        return Timing(forward_s, block_s, other_s, copies, tuple(lanes), memory)


def _seconds(start: Any, end: Any) -> float:
    return float(start.elapsed_time(end)) / 1e3
