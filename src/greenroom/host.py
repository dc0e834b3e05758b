"""Host masters: the one authoritative copy of every offloaded tensor.

A `HostUnit` is a set of tensors that travel together: one transformer block, or all that a component holds outside
its blocks. Its values live in one packed slab of host memory, page-locked where the configuration says so, in which
tensors of one dtype lie side by side. A device buffer of the same size with the same layout can stand in for the
slab, so that a whole block moves in one flat copy and its tensors are rebound with views prepared beforehand.

Note [A released tensor is its master]
    While a unit is off the device, each of its Parameter and buffer objects points at the master itself. So
    `state_dict()` and `save_pretrained()` give real values at any time, an edit in place (LoRA fusing, scaling) edits
    the master, `dtype` and `shape` answer as ever, and a computation that reads it by mistake meets a host tensor
    and raises. The objects keep their identity throughout: only what they point at changes.

Note [Masters are never copied back]
    Releasing a unit drops the device bytes. Only a tensor that was changed on the device is written back: its
    version counter moved since it was bound, or something else was put in its place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Tensors start at multiples of this many bytes inside a slab: as aligned as a separate allocation is on the CPU and
# enough for every vectorised kernel, which matters for equal results, since kernels pick their path by alignment.
ALIGNMENT = 64
# Device allocators hand out multiples of this many bytes. A slab that is one too costs exactly what the plan says.
GRANULARITY = 512
# Bytes of device memory that a comparison with a master may take.
_COMPARED = 2 * 2**20

Renew = Callable[["HostUnit", int], tuple[torch.Tensor, bool]]
"""Makes memory, of so many bytes, for the next master of a unit: the memory, and whether it is page-locked. When it
returns, no copy reads the present master any more."""

# Read for every tensor of every block that passes, so they are taken by `map`, which costs less than a loop.
_address = torch.Tensor.data_ptr
_version = operator.attrgetter("_version")


@dataclass(frozen=True)
class _Place:
    """Where one tensor lies in the slab of its unit; offset and span in bytes, the rest in elements."""

    offset: int
    span: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, slab: torch.Tensor, at: int = 0) -> torch.Tensor:
        """The tensor in `slab`, or in the part of it that begins at byte `at`."""
        flat = slab[self.offset - at : self.offset - at + self.span].view(self.dtype)
        return flat.as_strided(self.size, self.stride)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last that `tensor` touches in its storage."""
    start, count, itemsize = int(tensor.storage_offset()), int(tensor.numel()), tensor.element_size()
    if count == 0 or tensor.is_contiguous():
        return start * itemsize, (start + count) * itemsize
    stop = start + 1 + sum((int(n) - 1) * int(s) for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return start * itemsize, stop * itemsize


def alias_groups(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Distinct tensor objects in groups that share bytes; a tensor that shares none is a group of its own.

    Tensors that lie side by side in one storage without touching each other are not aliases.
    """
    unique = list({id(t): t for t in tensors}.values())
    by_storage: dict[tuple[str, int], list[torch.Tensor]] = {}
    groups: list[list[torch.Tensor]] = []
    for tensor in unique:
        if tensor.numel() == 0 or tensor.device.type == "meta" or not movable(tensor):
            groups.append([tensor])
        else:
            key = (str(tensor.device), tensor.untyped_storage().data_ptr())
            by_storage.setdefault(key, []).append(tensor)
    for sharing in by_storage.values():
        if len(sharing) == 1:  # nearly always
            groups.append(sharing)
            continue
        sharing.sort(key=extent)
        end = -1
        for tensor in sharing:
            start, stop = extent(tensor)
            if start < end:
                groups[-1].append(tensor)
            else:
                groups.append([tensor])
            end = max(end, stop)
    return groups


def references(tensor: torch.Tensor) -> int:
    """How many tensors share the storage of `tensor`, itself included."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # less `storage`


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that `tensors` hold, shared bytes counted once."""
    total = 0
    for group in alias_groups(tensors):
        starts, stops = zip(*map(extent, group), strict=True)
        total += max(stops) - min(starts)
    return total


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the bytes: `tensor` itself, or those inside a wrapper subclass, however deep."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # a DTensor names its mesh, too
                yield from inner_tensors(inner)
    else:
        yield tensor


def movable(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is dense memory of its own that another can stand in for."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return False
    try:
        storage = tensor.untyped_storage()
        return tensor.numel() == 0 or (storage.data_ptr() != 0 and storage.nbytes() >= extent(tensor)[1])
    except (RuntimeError, NotImplementedError):
        return False  # a wrapper that does not say what is inside


def module_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every Parameter and buffer object of `module`, persistent or not, each once.

    Of a wrapper subclass, as quantised weights are, it is the tensors inside.
    """
    seen: set[int] = set()
    for child in module.modules():
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                if type(tensor) is torch.nn.Parameter or type(tensor) is torch.Tensor:
                    yield tensor
                else:
                    yield from inner_tensors(tensor)


class HostUnit:
    """Tensors that travel together, with their packed master.

    Until `take` is called the tensors are untouched. The unit holds the tensor objects and never a module, so that
    hooks which hold a unit make no reference cycle with the module they sit on.

    Args:
        name: dotted path for reports, such as "transformer.blocks.3".
        tensors: Parameter and buffer objects; ties and overlapping views are found and stored once.
    """

    def __init__(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        self.name = name
        self.layout = 0
        """Counts the layouts that the slab has had: views made for an earlier one no longer fit."""
        self.master: torch.Tensor | None = None
        self.pinned = False
        self.shared: torch.Tensor | None = None
        self.renew: Renew | None = None
        """Set by whoever allocated the master; without it, another one is pageable."""
        self.diverged = False
        """Whether the master was edited, so that it holds other values than `shared`."""
        self._taken: list[int] = []
        self._origin: list[torch.device] = []
        self._lay_out(alias_groups(tensors))
        self._master_views: list[torch.Tensor] = []
        self._master_at: list[int] = []
        self._bound: Sequence[torch.Tensor] | None = None
        self._bound_at: Sequence[int] = ()
        self._versions: list[int] = []
        # Tensors made under inference_mode keep no version counter: a replaced one is noticed, an edited one is not.
        self.versioned = not any(t.is_inference() for t in self.tensors)

    def _lay_out(self, groups: list[list[torch.Tensor]]) -> None:
        # Segments by dtype, the widest first, so that padding appears only where two dtypes meet or a tensor is odd.
        groups = sorted(groups, key=lambda g: (-g[0].element_size(), str(g[0].dtype)))
        self.tensors: list[torch.Tensor] = []
        self._places: list[_Place] = []
        self._groups: list[tuple[int, int, list[int]]] = []  # offset, span, indices of the members
        offset = 0
        for group in groups:
            base = min(extent(t)[0] for t in group)
            span = max(extent(t)[1] for t in group) - base
            first = len(self.tensors)
            for tensor in group:
                start, stop = extent(tensor)
                self.tensors.append(tensor)
                self._places.append(
                    _Place(
                        offset + start - base,
                        stop - start,
                        tensor.dtype,
                        tuple(tensor.size()),
                        tuple(tensor.stride()),
                    )
                )
            self._groups.append((offset, span, list(range(first, len(self.tensors)))))
            offset += -(-span // ALIGNMENT) * ALIGNMENT
        # Tensors without any elements have a slab as well, so that they are where the others are.
        self.nbytes = max(-(-offset // GRANULARITY), bool(groups)) * GRANULARITY
        """Size of the slab in bytes, the padding between tensors included."""

    # ------------------------------------------------------------------ taking over and giving back

    def fill(self, slab: torch.Tensor, start: int, stop: int) -> None:
        """Copies the values into the bytes `start` to `stop` of `slab`; of the tensors only what goes there is read."""
        with torch.inference_mode(False), torch.no_grad():
            for offset, span, members in self._groups:
                low, high = max(start, offset), min(stop, offset + span)
                if low < high:
                    values = bytes_of([self.tensors[i] for i in members])
                    slab[low:high].copy_(values[low - offset : high - offset])

    def take(self, slab: torch.Tensor, *, pinned: bool, shared: torch.Tensor | None = None) -> None:
        """Points the tensors at `slab`, which holds their values (see `fill`).

        Args:
            shared: other memory with the same values, which copies to the device read instead; see `source`.
        """
        with torch.inference_mode(False), torch.no_grad():
            views = self._views_apart(slab)
            self._origin = [t.device for t in self.tensors]
            self.master, self.pinned = slab, pinned
            self.shared, self.diverged = shared, False
            self._set_master_views(views)
            for tensor, view in zip(self.tensors, views, strict=True):
                tensor.data = view
        self._taken = self.versions()

    @property
    def source(self) -> torch.Tensor:
        """The bytes that copies to the device read: the master, or memory with the same values that others share."""
        assert self.master is not None
        return self.master if self.shared is None or self.diverged else self.shared

    def look(self) -> None:
        """Notices edits in place, which are in the master and not in what is shared, by the version counters."""
        if self.shared is not None and not self.diverged and not self.bound and self.versions() != self._taken:
            self.diverged = True

    def retake(self, tensors: Iterable[torch.Tensor]) -> None:
        """Lets go of the tensors it has, which get memory of their own, and stands for `tensors` instead.

        They are untouched until `take` is called again.
        """
        self.restore()
        self._lay_out(alias_groups(tensors))
        self.layout += 1
        self.versioned = not any(t.is_inference() for t in self.tensors)

    def _views_apart(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """The tensors as views of a master, those that share no bytes with a storage of their own over their place.

        Whoever saves or pickles some of them would write the whole slab otherwise, and `torch.save` refuses a storage
        that is read with two dtypes.
        """
        views: dict[int, torch.Tensor] = {}
        memory = slab.numpy()
        for offset, span, members in self._groups:
            for i in members:
                with torch.inference_mode(self.tensors[i].is_inference()):
                    if i == members[0]:
                        own = torch.from_numpy(memory[offset : offset + span])
                    views[i] = self._places[i].view(own, at=offset)
        return [views[i] for i in range(len(self.tensors))]

    def _set_master_views(self, views: list[torch.Tensor]) -> None:
        self._master_views = views
        self._master_at = [v.data_ptr() for v in views]

    def owed(self, device: torch.device) -> int:
        """Bytes of `device` that `restore` will take."""
        if self.master is None:
            return 0
        return sum(span for _, span, members in self._groups if members and self._origin[members[0]] == device)

    def restore(self) -> None:
        """Gives each tensor memory of its own again, where it was before `take`; ties and strides are kept.

        Where it raises, it may be called again: what had its own memory already is taken back first.
        """
        if self.master is None:
            return
        self.renew = None  # what was edited need not be page-locked on its way
        self.release(thorough=True)
        self.absorb()
        with torch.inference_mode(False), torch.no_grad():
            for offset, span, members in self._groups:
                if not members:
                    continue
                with torch.inference_mode(self.tensors[members[0]].is_inference()):
                    device = self._origin[members[0]]
                    own = torch.empty(span, dtype=torch.uint8, device=device)
                    own.copy_(self.master[offset : offset + span])
                    for i in members:
                        place = self._places[i]
                        at = place.offset - offset
                        flat = own[at : at + place.span].view(place.dtype)
                        self.tensors[i].data = flat.as_strided(place.size, place.stride)
        self.master = None
        self._set_master_views([])

    def take_along(self, tensors: Iterable[torch.Tensor], slab: torch.Tensor) -> list[torch.Tensor]:
        """From now on the unit, released now, also stands for `tensors`: views of its tensors, as they lie in `slab`.

        Args:
            slab: what stood in for the master when the views were made.

        Returns:
            Those that were taken; one that reaches beyond the tensors of the unit is left alone.
        """
        assert self.master is not None and not self.bound
        taken = []
        for tensor in tensors:
            start, stop = extent(tensor)
            at = tensor.data_ptr() - slab.data_ptr()
            place = _Place(at, stop - start, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()))
            over = (g for g in self._groups if g[0] <= at and at + place.span <= g[0] + g[1])
            offset, span, members = next(over, (0, 0, []))
            if not members:
                continue
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                storage = self._master_views[members[0]].untyped_storage()
                view = place.view(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (span,), (1,)), at=offset)
                tensor.data = view
            members.append(len(self.tensors))
            self.tensors.append(tensor)
            self._places.append(place)
            self._origin.append(self._origin[members[0]])
            self._master_views.append(view)
            self._master_at.append(view.data_ptr())
            self._taken.append(0 if tensor.is_inference() else tensor._version)
            taken.append(tensor)
        if taken:
            self.layout += 1
            self.versioned = not any(t.is_inference() for t in self.tensors)
        return taken

    # ------------------------------------------------------------------ binding

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """The unit's tensors as views of `slab`, uint8 with at least `nbytes` elements, in the order of `tensors`."""
        with torch.inference_mode(False):
            views = [place.view(slab) for place in self._places]
        if not self.versioned:
            # A tensor made under inference_mode may only stand for memory that was, too.
            with torch.inference_mode():
                flat = torch.empty(0, dtype=torch.uint8, device=slab.device)
                flat.set_(slab.untyped_storage(), slab.storage_offset(), slab.size(), slab.stride())
                for i, tensor in enumerate(self.tensors):
                    if tensor.is_inference():
                        views[i] = self._places[i].view(flat)
        return views

    def bind(self, views: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        """Points the tensors at `views`, whose data_ptrs are `addresses`."""
        self._bound, self._bound_at = views, addresses
        tensors = self.tensors
        for tensor, view in zip(tensors, views):  # noqa: B905 - hot path, lengths are equal by construction
            tensor.data = view
        self._versions = self.versions()

    def release(self, *, thorough: bool = False) -> None:
        """Points the tensors at the master again, after writing back what was changed on the device.

        Args:
            thorough: compare every byte with the master instead of trusting the version counters, which an edit
                through `.data` goes past. For units that were on the device long enough to be edited.
        """
        if self._bound is None:
            return
        if thorough:
            self._write_back_differences()
        versions = self.versions()
        addresses = list(map(_address, self.tensors))
        if versions != self._versions or addresses != self._bound_at:
            expected = list(zip(versions, self._versions, addresses, self._bound_at, strict=True))
            for tensor, (version, was, address, at) in zip(list(self.tensors), expected, strict=True):
                if version != was or address != at:
                    self._write_back(tensor)
        for tensor, view in zip(self.tensors, self._master_views):  # noqa: B905 - hot path
            tensor.data = view
        self._bound = None

    def differs(self) -> bool:
        """Whether the bytes of a bound unit differ from the master; compared on the device, so that none come back."""
        if self._bound is None:
            return False
        assert self.master is not None
        with torch.inference_mode(False), torch.no_grad():
            for offset, span, members in self._groups:
                group = [self.tensors[i] for i in members]
                there = [t.data_ptr() for t in group] == [self._bound_at[i] for i in members]
                if span and there and not _equal(bytes_of(group), self.master[offset : offset + span]):
                    return True
        return False

    def write_back(self) -> None:
        """Brings the master up to date with a bound unit whose tensors may have been edited on the device."""
        if self._bound is not None:
            views, addresses = self._bound, self._bound_at
            self.release(thorough=True)
            self.bind(views, addresses)

    @property
    def bound(self) -> bool:
        return self._bound is not None

    # ------------------------------------------------------------------ edits

    def _write_back_differences(self) -> None:
        assert self.master is not None
        with torch.inference_mode(False), torch.no_grad():
            for offset, span, members in self._groups:
                group = [self.tensors[i] for i in members]
                if span and [t.data_ptr() for t in group] == [self._bound_at[i] for i in members]:
                    value = bytes_of(group).cpu()
                    if not torch.equal(value, self.master[offset : offset + span]):
                        self.diverged = True
                        self.master[offset : offset + span].copy_(value)

    def _write_back(self, tensor: torch.Tensor) -> None:
        i = next(k for k, t in enumerate(self.tensors) if t is tensor)
        self.diverged = True
        with torch.inference_mode(False), torch.no_grad():
            value = tensor.detach()
            if _same_layout(value, self._places[i]):
                bytes_of([self._master_views[i]]).copy_(bytes_of([value]))
            else:
                self._repack(i, value.cpu())

    @property
    def edited(self) -> bool:
        """Whether a released tensor was given other memory than its master (an assignment to `.data`, a cast)."""
        return list(map(_address, self.tensors)) != self._master_at

    def versions(self) -> list[int]:
        """The version counters of the tensors, which each edit in place moves; zeros where there are none."""
        return list(map(_version, self.tensors)) if self.versioned else [0] * len(self.tensors)

    def absorb(self) -> bool:
        """Takes values that were put in place of a master while the unit was released; True if there were any."""
        changed = [t for t, at in zip(self.tensors, self._master_at, strict=True) if t.data_ptr() != at]
        for tensor in changed:
            self._write_back(tensor)
        for tensor, view in zip(self.tensors, self._master_views, strict=True):
            tensor.data = view
        return bool(changed)

    def _repack(self, i: int, value: torch.Tensor) -> None:
        """Gives tensor `i` a place of its own outside the slab's old layout: its dtype, shape or strides changed.

        Raises:
            RuntimeError: memory could not be page-locked, and has to be; nothing was changed.
        """
        assert self.master is not None
        stand_ins = [value if j == i else place.view(self.master) for j, place in enumerate(self._places)]
        fresh = HostUnit(self.name, stand_ins)
        if self.renew is not None:
            slab, pinned = self.renew(self, fresh.nbytes)
        else:
            slab, pinned = torch.empty(fresh.nbytes, dtype=torch.uint8), False
        views = fresh._views_apart(slab)
        for view, stand_in in zip(views, fresh.tensors, strict=True):
            view.copy_(stand_in)
        place_of = {id(s): j for j, s in enumerate(stand_ins)}
        order = [place_of[id(s)] for s in fresh.tensors]
        self.tensors = [self.tensors[j] for j in order]
        self._origin = [self._origin[j] for j in order]
        self._places, self._groups, self.nbytes = fresh._places, fresh._groups, fresh.nbytes
        self.master, self.pinned, self.shared = slab, pinned, None
        self.layout += 1
        self._set_master_views(views)


def bytes_of(group: list[torch.Tensor]) -> torch.Tensor:
    """The bytes that tensors of one storage span, as they lie there: layout, overlaps and gaps included."""
    start, stop = min(extent(t)[0] for t in group), max(extent(t)[1] for t in group)
    flat = torch.empty(0, dtype=torch.uint8, device=group[0].device)
    return flat.set_(group[0].untyped_storage(), start, (stop - start,), (1,))


def _equal(there: torch.Tensor, here: torch.Tensor) -> bool:
    """Whether bytes on the device are those in host memory; compared there, in pieces that take little room."""
    for start in range(0, there.numel(), _COMPARED):
        piece, other = there[start : start + _COMPARED], here[start : start + _COMPARED]
        try:
            same = torch.equal(piece, other.to(piece.device))
        except torch.OutOfMemoryError:
            same = torch.equal(piece.cpu(), other)
        if not same:
            return False
    return True


def _same_layout(value: torch.Tensor, place: _Place) -> bool:
    return value.dtype == place.dtype and tuple(value.size()) == place.size and tuple(value.stride()) == place.stride
