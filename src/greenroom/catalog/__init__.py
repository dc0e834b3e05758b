"""What Greenroom knows about the model classes of diffusers and transformers: data, not code.

Classes are known by name, so that nothing is imported to look one up. To support another class, add a
declaration here, or let the class and the pipeline speak for themselves (`greenroom.declare`), which wins.
"""

from __future__ import annotations

from torch import nn

from greenroom.catalog import denoisers, encoders, vaes
from greenroom.catalog.declaration import ModelDeclaration, Role
from greenroom.declare import block_paths
from greenroom.errors import TopologyError
from greenroom.frozen import FrozenDict

__all__ = ["CATALOG", "ModelDeclaration", "Role", "lookup"]

CATALOG: FrozenDict[str, ModelDeclaration] = FrozenDict(
    {
        declaration.class_name: declaration
        for declaration in (
            *denoisers.DENOISERS,
            *vaes.VAES,
            *encoders.TEXT_ENCODERS,
            *encoders.IMAGE_ENCODERS,
        )
    }
)


def lookup(module: nn.Module) -> ModelDeclaration | None:
    """The declaration of the module's class, or of the nearest base class that has one; else None.

    A declaration whose containers the module does not have is passed over: the class then shares only the
    name, or its library has moved on, and in either case the structure itself must be asked.
    """
    for base in type(module).__mro__:
        declaration = CATALOG.get(base.__name__)
        if declaration is not None and _fits(module, declaration):
            return declaration
    return None


def _fits(module: nn.Module, declaration: ModelDeclaration) -> bool:
    try:
        block_paths(module, declaration.blocks)
    except TopologyError:
        return False
    return True
