"""Sleep: the device is somebody else's for a while, the offload stays.

Note [Sleep copies no weights out]
    The masters hold every value already, so falling asleep only lets go of device memory. What was edited on the
    device is written back first, as whenever a unit leaves it, and what stays there all the time is compared with its
    master byte by byte, since an edit through `.data` leaves no other trace; the comparison runs on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from greenroom.errors import OffloadError
from greenroom.strategies.runtime import Runtime
from greenroom.streaming import DeviceCopy


def fall_asleep(runtime: Runtime) -> None:
    """Frees all device memory that the offload takes; harmless when it sleeps already.

    Raises:
        OffloadError: other ranks gather with this one, and need its slots.
    """
    if runtime.sharing is not None and runtime.sharing.gatherer is not None:
        raise OffloadError(
            "sleep: blocks are gathered from all ranks, and the others need this rank's device for that; call "
            "handle.disable() on every rank instead"
        )
    if runtime.asleep:
        return
    with torch.inference_mode(False), torch.no_grad():
        _let_go(runtime)
    runtime.asleep = True
    runtime.accelerator.synchronize()  # free means free when this returns
    runtime.accelerator.empty_cache()


def wake_up(runtime: Runtime) -> None:
    """Brings back what the layout keeps on the device; harmless when it is awake.

    Raises:
        torch.OutOfMemoryError: it does not fit beside what is there now; the offload sleeps on.
    """
    if not runtime.asleep:
        return
    runtime.asleep = False
    try:
        with torch.inference_mode(False), torch.no_grad():
            _bring_back(runtime)
    except BaseException:
        with contextlib.suppress(Exception):
            fall_asleep(runtime)
        raise


def _let_go(runtime: Runtime) -> None:
    # Rings first: a comparison takes a little room itself, which is then there within any budget.
    for part in runtime.parts:
        runtime.unhook_blocks(part)
    runtime.stream.close_arena()
    copier = runtime.copier
    for part in runtime.parts:
        stays = part.share.hold == "always"
        for block in part.blocks:
            copier.unfix([block], thorough=stays and block.unit.differs())
        copier.drop(part.copies, thorough=stays and _differ(part.copies))
        copier.drop(part.kept, thorough=_differ(part.kept))
        for addition in part.additions:
            copier.drop(addition.copies, thorough=stays and _differ(addition.copies))
        part.present = False
    copier.drop(runtime.shared_copies, thorough=_differ(runtime.shared_copies))


def _differ(copies: Sequence[DeviceCopy]) -> bool:
    return any(copy.unit.differs() for copy in copies)


def _bring_back(runtime: Runtime) -> None:
    runtime.bring_what_stays()
    runtime.apply_what_fits(runtime.layout)
    runtime.stream.prime(wait=True)
