"""Lets safetensors open files onto the emulated device.

safetensors' core accepts a fixed list of device names, so ``safe_open(..., device="emu")`` opens on the CPU here
and moves each tensor as it is read. Real devices need nothing of the kind.
"""

from __future__ import annotations

from typing import Any


def install_safetensors_shim(device_type: str) -> None:
    """Replaces ``safetensors.safe_open``, once; code that imported the name before keeps the original."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        return
    original: Any = safetensors.safe_open
    if getattr(original, "_greenroom_emulator", False):
        return

    class SafeOpen:
        _greenroom_emulator = True

        def __init__(self, filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> None:
            self._device = str(device) if str(device).startswith(device_type) else None
            opened_on = "cpu" if self._device else device
            self._file = original(filename, framework=framework, device=opened_on, **kwargs)

        def __enter__(self) -> SafeOpen:
            self._file.__enter__()
            return self

        def __exit__(self, *exc: Any) -> Any:
            return self._file.__exit__(*exc)

        def get_tensor(self, name: str) -> Any:
            tensor = self._file.get_tensor(name)
            return tensor.to(self._device) if self._device else tensor

        def get_tensors(self, *args: Any, **kwargs: Any) -> Any:
            tensors = self._file.get_tensors(*args, **kwargs)
            return {k: t.to(self._device) for k, t in tensors.items()} if self._device else tensors

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    for module in (safetensors, safetensors.torch):
        module.safe_open = SafeOpen  # type: ignore[attr-defined]
