"""The emulated accelerator: importing this module registers the device type ``emu`` with PyTorch."""

import torch

from greenroom.emulator import device as _mod
from greenroom.emulator.device import _C

if torch._C._get_privateuse1_backend_name() != "emu":
    torch.utils.rename_privateuse1_backend("emu")
num_registered = _C.init()
torch._register_device_module("emu", _mod)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


def register_distributed():
    import torch.distributed as dist

    def create(store, rank, size, timeout):
        return _C.make_backend(dist.ProcessGroupGloo(store, rank, size, timeout))

    if "emu_gloo" not in dist.Backend.backend_list:
        dist.Backend.register_backend("emu_gloo", create, devices=["emu"])


if torch.distributed.is_available():
    register_distributed()


def _patch_safetensors():
    """safetensors' Rust core only knows a fixed list of device names; open on the CPU and move."""
    try:
        import safetensors
        import safetensors.torch as st
    except ImportError:
        return
    orig = safetensors.safe_open
    if getattr(orig, "_emu", False):
        return

    class safe_open:
        _emu = True

        def __init__(self, filename, framework, device="cpu", **kw):
            dev = str(device)
            self._dev = dev if dev.startswith("emu") else None
            self._f = orig(filename, framework=framework, device="cpu" if self._dev else device, **kw)

        def __enter__(self):
            self._f.__enter__()
            return self

        def __exit__(self, *a):
            return self._f.__exit__(*a)

        def get_tensor(self, name):
            t = self._f.get_tensor(name)
            return t.to(self._dev) if self._dev else t

        def get_tensors(self, *a, **k):
            r = self._f.get_tensors(*a, **k)
            return {n: t.to(self._dev) for n, t in r.items()} if self._dev else r

        def __getattr__(self, k):
            return getattr(self._f, k)

    safetensors.safe_open = safe_open
    st.safe_open = safe_open


_patch_safetensors()
