"""The emulated accelerator: importing this module registers the device type ``emu`` with PyTorch.

``torch.device("emu")``, ``torch.emu`` and the ``torch.distributed`` backend ``emu_gloo`` exist from then on. The
first import compiles the C++ half (about a minute) into a per-user cache. docs/emulator.md says what is modelled.

Raises :class:`EmulatorUnavailableError` when it cannot be built or loaded here.
"""

from __future__ import annotations

from greenroom.emulator.build import EmulatorUnavailableError
from greenroom.emulator.registration import register

__all__ = ["EmulatorUnavailableError"]

register()
