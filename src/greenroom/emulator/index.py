"""Which device a caller means."""

from __future__ import annotations

import torch

from greenroom.emulator.build import load_extension

DeviceLike = torch.device | str | int | None


def device_index(device: DeviceLike = None) -> int:
    """The index that ``device`` names; ``None``, a negative index and plain ``"emu"`` are the current device.

    Raises ValueError for a device of another type or an index that does not exist.
    """
    extension = load_extension()
    if isinstance(device, int):
        index: int | None = device if device >= 0 else None
    elif device is None:
        index = None
    else:
        named = torch.device(device)
        if named.type != "emu":
            raise ValueError(f"device={device!r}: not an emulated device; accepted: 'emu', 'emu:N', N or None")
        index = named.index
    if index is None:
        return extension.current_device()
    if index >= extension.device_count():
        raise ValueError(f"device={device!r}: there are {extension.device_count()} emulated devices")
    return index
