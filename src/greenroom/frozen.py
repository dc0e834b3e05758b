"""An immutable, hashable, picklable mapping for frozen declarations and configurations."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", covariant=True)


class FrozenDict(Mapping[K, V], Generic[K, V]):
    """A read-only copy of a mapping.

    `types.MappingProxyType` will not do: it can be neither pickled, nor hashed, nor deep-copied, and it shows
    later changes of the mapping it wraps. Hashing needs hashable values, as for a tuple.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        self._items: dict[K, V] = dict(items)

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return type(self), (dict(self._items),)

    def __repr__(self) -> str:
        return repr(self._items)
