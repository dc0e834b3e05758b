"""This process among the ranks of a job, as torchrun or the front of several ranks has told it by its environment."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from greenroom import distributed
from greenroom.accelerator import Accelerator
from greenroom.config import OffloadConfig
from greenroom.distributed.ranks import tell_failure
from greenroom.errors import ConfigError
from greenroom.strategies.sharing import wanted


def world_size() -> int:
    """How many ranks the environment tells of; 1 where it tells nothing.

    Raises:
        ConfigError: WORLD_SIZE is not a number of ranks.
    """
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """This process's place among them."""
    return _number("RANK", 0)


def local_device(device: str | torch.device) -> str | torch.device:
    """`device`, with this rank's index on its host where it has none."""
    wanted = torch.device(device)
    if world_size() < 2 or wanted.type == "cpu" or wanted.index is not None:
        return device
    return f"{wanted.type}:{_number('LOCAL_RANK', rank())}"


def join(config: OffloadConfig | None, accelerator: Accelerator, *, needed: bool = False) -> None:
    """Makes the process group where the configuration, or the caller, needs one and nobody has made it yet."""
    needed = needed or (config is not None and wanted(config))
    if not needed or world_size() < 2 or dist.is_initialized():
        return
    accelerator.make_current()
    kind = accelerator.device.type
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=distributed.timeout()))
    atexit.register(_leave)


@contextlib.contextmanager
def told_of_failures(config: OffloadConfig | None) -> Iterator[None]:
    """Lets what fails inside the block fail on the other ranks too, which are about to wait for this one."""
    try:
        yield
    except Exception as error:
        if config is not None and wanted(config):
            tell_failure(error)
        raise


def _leave() -> None:
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or (name == "WORLD_SIZE" and int(text) < 1):
        raise ConfigError(name, text, "a whole number, as torchrun sets it in the environment")
    return int(text)
