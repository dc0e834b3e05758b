"""The `torch.emu` module."""
import contextlib

import torch

from greenroom.emulator.build import load_extension

_C = load_extension()


def _idx(device=None):
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return device if device >= 0 else _C.current_device()
    device = torch.device(device)
    return _C.current_device() if device.index is None else device.index


def is_available():
    return True


def is_initialized():
    return True


def init():
    pass


def _is_in_bad_fork():
    return False


def device_count():
    return _C.device_count()


def current_device():
    return _C.current_device()


def set_device(device):
    _C.set_device(_idx(device))


class device:
    def __init__(self, dev):
        self.idx = None if dev is None else _idx(dev)

    def __enter__(self):
        self.prev = _C.current_device()
        if self.idx is not None:
            _C.set_device(self.idx)

    def __exit__(self, *a):
        _C.set_device(self.prev)
        return False


def get_device_name(device=None):
    return "Emulated accelerator"


def get_device_capability(device=None):
    return (1, 0)


def is_bf16_supported(including_emulation=True):
    return True


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]


def synchronize(device=None):
    _C.synchronize(_idx(device))


# ------------------------------------------------------------- streams, events
# Plain torch.Stream / torch.Event objects: Event.elapsed_time() refuses subclasses.
class _StreamMeta(type):
    def __instancecheck__(cls, o):
        return isinstance(o, torch.Stream) and o.device.type == "emu"


class Stream(metaclass=_StreamMeta):
    def __new__(cls, device=None, priority=0, **kw):
        if kw:
            return torch.Stream(**kw)
        return torch.Stream(device=torch.device("emu", _idx(device)), priority=priority)


class _EventMeta(type):
    def __instancecheck__(cls, o):
        return isinstance(o, torch.Event)


class Event(metaclass=_EventMeta):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return torch.Event(torch.device("emu", _C.current_device()), enable_timing=enable_timing, blocking=blocking)


def current_stream(device=None):
    return torch.accelerator.current_stream(_idx(device))


def default_stream(device=None):
    cur = current_stream(device)
    return torch.Stream(stream_id=0, device_index=cur.device_index, device_type=cur.device_type)


def set_stream(stream):
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(s):
    if s is None:
        yield
        return
    dev = _C.current_device()
    prev = torch.accelerator.current_stream(s.device.index)
    torch.accelerator.set_stream(s)
    try:
        yield s
    finally:
        torch.accelerator.set_stream(prev)
        _C.set_device(dev)


# --------------------------------------------------------------------- memory
def memory_allocated(device=None):
    return _C.stats(_idx(device))["allocated_bytes.current"]


def max_memory_allocated(device=None):
    return _C.stats(_idx(device))["allocated_bytes.peak"]


def memory_reserved(device=None):
    return _C.stats(_idx(device))["reserved_bytes.current"]


def max_memory_reserved(device=None):
    return _C.stats(_idx(device))["reserved_bytes.peak"]


def memory_stats(device=None):
    return torch.accelerator.memory_stats(_idx(device))


def reset_peak_memory_stats(device=None):
    _C.reset_peak(_idx(device))


def mem_get_info(device=None):
    return _C.mem_get_info(_idx(device))


def empty_cache():
    _C.empty_cache()


def ipc_collect():
    pass


# --------------------------------------------------------------------- random
def default_generator(device=None):
    return _C.default_generator(_idx(device))


def manual_seed(seed):
    _C.default_generator(_C.current_device()).manual_seed(int(seed))


def manual_seed_all(seed):
    for i in range(_C.device_count()):
        _C.default_generator(i).manual_seed(int(seed))


def initial_seed():
    return default_generator().initial_seed()


def get_rng_state(device="emu"):
    return default_generator(device).get_state()


def set_rng_state(state, device="emu"):
    default_generator(device).set_state(state)


def get_rng_state_all():
    return [get_rng_state(i) for i in range(_C.device_count())]


def set_rng_state_all(states):
    for i, s in enumerate(states):
        set_rng_state(s, i)


# --------------------------------------------------- the emulator's own controls
def set_capacity(nbytes, device=None):
    for i in range(_C.device_count()) if device is None else [_idx(device)]:
        _C.set_capacity(i, int(nbytes))


def set_bandwidth(h2d, d2h=None, p2p=None):
    """bytes/s, 0 = unlimited"""
    _C.set_bandwidth(float(h2d), float(h2d if d2h is None else d2h), float(h2d if p2p is None else p2p))


def pinned_stats():
    return _C.pinned_stats()


counters = _C.counters
reset_counters = _C.reset_counters
set_poison = _C.set_poison
set_pageable_factor = _C.set_pageable_factor
set_latency = _C.set_latency
cpu_view = _C.cpu_view
set_timeline = _C.set_timeline
take_timeline = _C.take_timeline


def set_race_check(mode):
    _C.set_race_mode({"off": 0, "collect": 1, "raise": 2}[mode])


race_reports = _C.take_race_reports


def set_virtual_time(on=True, flops=1e12, membw=100e9, launch=5e-6, kernel_latency=2e-6):
    """Model instead of measure: no sleeping, each stream has a clock that kernels (roofline) and copies advance."""
    _C.set_vtime(bool(on), float(flops), float(membw), float(launch), float(kernel_latency))


virtual_time = _C.vtime
