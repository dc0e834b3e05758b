"""The form in which a known class is described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["dit", "text_encoder", "vae", "resident"]


@dataclass(frozen=True)
class ModelDeclaration:
    """What Greenroom knows about one model class, by the class's name.

    Attributes:
        class_name: the name of the class; subclasses inherit the declaration.
        role: "dit", "text_encoder", "vae", or "resident" for what always stays on the device.
        blocks: block containers that every forward runs, in execution order, in the notation of
            `greenroom.declare`. Empty for what is never streamed by block.
        occasional_blocks: block containers that only some calls run (a vision tower in a text encoder). They
            may leave the device, but no prefetch should wait for them.
        hold: methods other than forward that need the whole component on the device until they return:
            a VAE's decode, whose caches and tile loops call children, and an LLM's generate, which would
            otherwise copy every block once a token.
        resident: submodules that the pipeline reads from outside, at any time; they never leave.
        notes: why, where it does not go without saying.
    """

    class_name: str
    role: Role
    blocks: tuple[str, ...] = ()
    occasional_blocks: tuple[str, ...] = ()
    hold: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    notes: str = ""
