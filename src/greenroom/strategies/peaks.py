"""The highest peaks of device memory, where the device's own count is started anew to measure single components."""

from __future__ import annotations

from greenroom.accelerator import Accelerator


class Peaks:
    """Bytes at the highest peak.

    Attributes:
        highest: since it was made, or `forget`.
        latest: of the latest call.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.highest = 0
        self.latest = 0
        self._calling = False

    def note(self) -> None:
        """Takes in what the device has counted."""
        peak = self._accelerator.peak()
        self.highest = max(self.highest, peak)
        if self._calling:
            self.latest = max(self.latest, peak)

    def restart(self) -> None:
        """Starts the device's count anew; what it was is not lost."""
        self.note()
        self._accelerator.reset_peak()

    def begin_call(self) -> None:
        """What was before is no part of the latest call."""
        self.restart()
        self.latest = 0
        self._calling = True

    def end_call(self) -> None:
        """What comes now is no part of it any more; the device's count goes on, for others who read it."""
        self.note()
        self._calling = False

    def forget(self) -> None:
        """What was before does not count any more."""
        self.restart()
        self.highest = self.latest = 0
