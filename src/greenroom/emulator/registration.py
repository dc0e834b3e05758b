"""Makes PyTorch know the device: its name, its module, its distributed backend."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from greenroom.emulator.build import EmulatorUnavailableError, load_extension
from greenroom.emulator.safetensors_shim import install_safetensors_shim

DEVICE_TYPE = "emu"
DISTRIBUTED_BACKEND = "emu_gloo"


@cache
def register() -> None:
    """Registers everything, once per process."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", DEVICE_TYPE):
        raise EmulatorUnavailableError(
            f"greenroom.emulator: this process already has another out-of-tree device, {taken!r}; "
            "PyTorch has room for one"
        )
    extension = load_extension()
    if taken != DEVICE_TYPE:
        torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    extension.init()
    from greenroom.emulator import device

    torch._register_device_module(DEVICE_TYPE, device)
    # `import torch.emu` and pickled references to it find the module as well.
    sys.modules.setdefault(f"torch.{DEVICE_TYPE}", device)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    if torch.distributed.is_available():
        _register_distributed(extension)
    install_safetensors_shim(DEVICE_TYPE)


def _register_distributed(extension: Any) -> None:
    import torch.distributed as dist

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return extension.make_backend(dist.ProcessGroupGloo(store, rank, size, timeout))

    if DISTRIBUTED_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(DISTRIBUTED_BACKEND, create, devices=[DEVICE_TYPE])
