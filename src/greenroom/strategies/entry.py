"""The doors of a component: every way in which a pipeline enters it, and what happens there.

A pipeline calls more than `forward`: `vae.decode`, `text_encoder.generate`, a child of the encoder directly. Each of
these is a door. Before anything computes behind a door, the component is brought in, and the inputs are brought to
the device: pipelines place some of them by asking a released module where it is.

Note [No reference cycles]
    What is hung on a module holds that module only weakly. A pipeline that is deleted is then freed at once, not
    when the garbage collector comes by.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn

from greenroom.errors import OffloadError
from greenroom.host import module_tensors
from greenroom.strategies.again import Inputs, stateful
from greenroom.strategies.brackets import Bracket
from greenroom.strategies.calls import asking_pipeline
from greenroom.strategies.copies import copy_component, whole_state
from greenroom.strategies.occupancy import Occupancy

# Methods that compute. Setters and switches (enable_tiling, set_attn_processor) are none of our business.
_COMPUTES = re.compile(
    r"(encode|decode|tiled_|spatial_tiled|temporal_tiled|generate|sample|embed|quantize|forward_|get_\w+_features|"
    r"get_\w+_embeddings?|vision_|language_|denoise|predict|apply_)"
)


class Door:
    """All doors of one component.

    Args:
        module: the component.
        owner: who the component is to its runtime; told apart by identity.
        device: where inputs go and computation happens.
        occupancy: shared by the doors of a pipeline.
        on_enter: called before the component computes, with the name of the door ("forward", "decode", ...) and the
            inputs.
        on_leave: called when it has, or has failed; told the name, and whether it failed.
        on_out_of_memory: called when the device runs out of memory behind the door, to make room, with the name of
            the door; the component is then run again from the same inputs, where these are what they were. It raises
            when there is no more to give.
        on_call: called when a pipeline asks where to compute, as it does when a call begins; told the pipeline, or
            None where it cannot be known.
        may_move_along: whether a request to move the module elsewhere is passed over now instead of refused: some
            pipelines make room for themselves in the middle of a call.
        children: also guard the component's children, for pipelines that call them directly.
        unwatched: children not to guard.
        blocks: children whose own children nobody calls from outside.
        methods: further methods to guard, beside those whose names say that they compute.
    """

    def __init__(
        self,
        module: nn.Module,
        owner: object,
        device: torch.device,
        occupancy: Occupancy,
        on_enter: Callable[[str, Any], None],
        on_leave: Callable[[str, bool], None],
        *,
        on_out_of_memory: Callable[[str, torch.OutOfMemoryError], None] | None = None,
        on_call: Callable[[Any], None] | None = None,
        may_move_along: Callable[[], bool] | None = None,
        children: bool = False,
        unwatched: Sequence[nn.Module] = (),
        blocks: Sequence[nn.Module] = (),
        methods: Sequence[str] = (),
    ) -> None:
        self.module = weakref.ref(module)
        self.owner = owner
        self.device = device
        self.occupancy = occupancy
        self.on_enter = on_enter
        self.on_leave = on_leave
        self.on_out_of_memory = on_out_of_memory
        self.on_call = on_call
        self.may_move_along = may_move_along
        self.serving = 0  # guarded methods that are running
        self._handles: list[Any] = []
        self._methods: dict[str, int] = {}  # by identity: a method knows its door, and must not be known by it
        self._under_forward: Any = None
        self._had_hook = "_hf_hook" in module.__dict__
        self._old_hook = module.__dict__.get("_hf_hook")
        self._install(module, children, {id(m) for m in unwatched}, {id(m) for m in blocks}, methods)

    def _install(
        self, module: nn.Module, children: bool, unwatched: set[int], closed: set[int], methods: Sequence[str]
    ) -> None:
        self._forward = Bracket(
            module, self._before_forward, self._after_forward, self._hook_forward, self._run_compiled
        )
        self._handles.append(self._forward)
        for name in sorted({*_computing_methods(type(module)), *methods}):
            self._guard(module, name)
        for name in ("to", "cpu", "cuda"):
            if name not in module.__dict__:
                self._put(module, name, getattr(type(module), name), self._move)
        other: Any = getattr(type(module), "enable_group_offload", None)
        if other is not None:
            self._put(module, "enable_group_offload", other, self._refuse_group_offload)
        self._put(module, "compile", type(module).compile, self._compile)
        self._handles.append(_StateHook(module))
        if not hasattr(module, "__deepcopy__"):
            self._put(module, "__deepcopy__", _copied, self._copy)
        if self.on_out_of_memory is not None and not self._forward.compiled:
            self._retry_forward(module)
        if children:
            for child in (c for c in _callable_children(module, closed) if id(c) not in unwatched):
                self._handles.append(Bracket(child, self._before_child, None, self._hook_child))
        module._hf_hook = ExecutionHook(self)  # type: ignore[assignment]

    def _hook_forward(self, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward, always_call=True),
        ]

    def _hook_child(self, child: nn.Module) -> list[Any]:
        return [child.register_forward_pre_hook(self._before_child, prepend=True, with_kwargs=True)]

    def settle(self) -> None:
        """Takes notice of modules that were compiled since the door was hung."""
        for handle in self._handles:
            handle.settle()

    def _compile(self, this: nn.Module, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Around `module.compile()`: what is compiled is forward itself, and the hooks stay outside."""
        self._take_off(this, "forward")
        original(this, *args, **kwargs)
        self._forward.settle()

    def remove(self) -> None:
        """Takes everything off the module again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        module = self.module()
        if module is None:
            return
        for name in list(self._methods):
            self._take_off(module, name)
        hook = module.__dict__.get("_hf_hook")
        if isinstance(hook, ExecutionHook) and hook.door() is self:
            if self._had_hook:
                module._hf_hook = self._old_hook  # type: ignore[assignment]
            else:
                del module._hf_hook

    def _take_off(self, module: nn.Module, name: str) -> None:
        method = self._methods.pop(name, None)
        # Another library may have put its own over ours since; ours then just passes calls on.
        if method is not None and id(module.__dict__.get(name)) == method:
            del module.__dict__[name]
            if name == "forward" and self._under_forward is not None:
                module.__dict__[name] = self._under_forward

    # ------------------------------------------------------------------ the doors

    def enter(self, name: str, inputs: Any) -> None:
        self.occupancy.enter(self)
        try:
            self.on_enter(name, inputs)
        except BaseException:
            self.occupancy.leave(self)
            raise

    def leave(self, name: str, failed: bool) -> None:
        if self.occupancy.leave(self):
            self.on_leave(name, failed)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.enter("forward", (args, kwargs))
        return self._moved(args, kwargs)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        # An always-called hook is given no output when forward has raised.
        self.leave("forward", output is None)

    def _before_child(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.occupancy.inside and self.occupancy.inside[-1] is self:
            return None  # called from inside the component
        with self.occupancy.lock:
            self.on_enter("child", (args, kwargs))
        return self._moved(args, kwargs)

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        moved_args, moved_kwargs = to_device(args, self.device), to_device(kwargs, self.device)
        if moved_args is args and moved_kwargs is kwargs:
            return None
        return moved_args, moved_kwargs

    def _guard(self, module: nn.Module, name: str) -> None:
        """Puts a guarded method on the instance, over the one of its class; the class is not touched."""
        original = inspect.getattr_static(type(module), name, None)
        if not callable(original) or isinstance(original, staticmethod | classmethod) or name in module.__dict__:
            return
        self._put(module, name, original, self._serve)

    def _put(self, module: nn.Module, name: str, original: Any, run: Callable[..., Any]) -> None:
        stand_in = StandIn(name, original, self.module, run)
        module.__dict__[name] = stand_in
        self._methods[name] = id(stand_in)

    def _serve(self, this: nn.Module, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.enter(name, (args, kwargs))
        self.serving += 1
        failed = True
        try:
            args, kwargs = self._moved(args, kwargs) or (args, kwargs)
            result = self._run(name, MethodType(original, this), args, kwargs)
            failed = False
            return result
        finally:
            self.serving -= 1
            self.leave(name, failed)

    def _move(self, this: nn.Module, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Instead of `to`, `cpu` and `cuda`: casts, and leaves the placement to the offload."""
        if name != "to":
            self._refuse_move(torch.device(name), name)
            return this
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if layout not in (None, torch.preserve_format):
            raise OffloadError(
                f"to(memory_format={layout}): the module is offloaded, and its weights keep their layout; accepted: "
                "the same before greenroom.offload()"
            )
        frame = sys._getframe(2)
        caller = str(frame.f_globals.get("__name__"))
        if device is not None and not (_only_completes(caller) and device == next(module_tensors(this)).device):
            self._refuse_move(device, f"to({str(device)!r})", whole=_moves_pipeline(caller, frame))
        return original(this, dtype) if dtype is not None else this

    def _refuse_move(self, device: torch.device, call: str, *, whole: bool = False) -> None:
        here = device.type == self.device.type and device.index in (None, self.device.index)
        if not here and (whole or self.may_move_along is None or not self.may_move_along()):
            raise OffloadError(
                f"{call}: the module is offloaded and computes on {self.device}; call handle.disable() before moving it"
            )

    def _refuse_group_offload(self, this: nn.Module, name: str, original: Any, args: Any, kwargs: Any) -> Any:
        raise OffloadError(f"{name}: the module is offloaded already, and one strategy owns it; call handle.disable()")

    def _copy(self, this: nn.Module, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Instead of `copy.deepcopy`: a plain module, all of it on the host."""
        state = {k: v for k, v in this.__dict__.items() if self._methods.get(k) != id(v)}
        if "forward" in self._methods and self._under_forward is not None:
            state["forward"] = self._under_forward
        hook = state.pop("_hf_hook", None)
        if not isinstance(hook, ExecutionHook):
            state["_hf_hook"] = hook
        elif self._had_hook:
            state["_hf_hook"] = self._old_hook
        with self.occupancy.lock:
            return copy_component(this, state, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Door:
        return _OpenDoor()

    def __reduce__(self) -> Any:
        raise OffloadError("a module cannot be pickled while it is offloaded; call handle.disable() first")

    def _retry_forward(self, module: nn.Module) -> None:
        """Lets forward be run again after the device ran out of memory, which no hook can do."""
        if "forward" not in module.__dict__:
            self._put(module, "forward", type(module).forward, self._rerun)
            return
        original = module.__dict__["forward"]  # another library's, which knows its module
        door = self

        def forward(*args: Any, **kwargs: Any) -> Any:
            return door._run("forward", original, args, kwargs)

        functools.update_wrapper(forward, original)
        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        self._under_forward = original
        module.__dict__["forward"] = forward
        self._methods["forward"] = id(forward)

    def _rerun(self, this: nn.Module, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(name, MethodType(original, this), args, kwargs)

    def _run_compiled(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run("forward", call, args, kwargs)

    def _run(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`call`; the outermost one of a component again, for as long as memory runs out and there is some to free."""
        if self.on_out_of_memory is None or not self._handles or len(self.occupancy.inside) > 1:
            return call(*args, **kwargs)
        inputs = Inputs(args, kwargs, self.device)
        while True:
            try:
                return call(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                obstacle = inputs.obstacle() or stateful(self.module())
                # The frames of the failed attempt hold its activations.
                traceback.clear_frames(error.__traceback__)
                failure = error.with_traceback(None)
            self.on_out_of_memory(name, failure)
            if obstacle is not None:
                raise torch.OutOfMemoryError(
                    f"{failure}\nThe call cannot be run again with more room, since {obstacle}; the next one has it"
                ) from None
            inputs.restore()


class _StateHook:
    def __init__(self, module: nn.Module) -> None:
        self.remove = module.register_state_dict_post_hook(whole_state).remove

    def settle(self) -> None: ...


def _copied(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Stands for the way in which Python copies an object that does not say how."""
    raise AssertionError("the door copies by itself")


def _only_completes(caller: str) -> bool:
    """Whether code of the libraries asks a model to be all where it says it is: loaders do, after adding layers."""
    return caller.startswith(("diffusers.loaders", "diffusers.models", "transformers.", "peft."))


def _moves_pipeline(caller: str, frame: FrameType) -> bool:
    """Whether a pipeline is moved as a whole: its user asks for that, never a call that makes room for itself."""
    return caller == "diffusers.pipelines.pipeline_utils" and frame.f_code.co_name == "to"


class StandIn:
    """A method on an instance, over the one of its class: passes calls to `run` and shows the original's signature.

    A deep copy of the module gets the original back.
    """

    def __init__(self, name: str, original: Any, reference: weakref.ref[nn.Module], run: Callable[..., Any]) -> None:
        self._name = name
        self._original = original
        self._reference = reference
        self._run = run
        functools.update_wrapper(self, original)
        # As a bound method would show itself: without `self`.
        signature = inspect.signature(original)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        this = self._reference()
        assert this is not None, "a method outlived its module"
        return self._run(this, self._name, self._original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(self._original, memo[id(self._reference())])

    def __reduce__(self) -> Any:
        raise OffloadError("a module cannot be pickled while it is offloaded; call handle.disable() first")


class _OpenDoor(Door):
    """What the hooks of a deep copy lead to: nothing happens there."""

    def __init__(self) -> None:
        self.occupancy = Occupancy()
        self.on_enter = lambda name, inputs: None

    def enter(self, name: str, inputs: Any) -> None: ...

    def leave(self, name: str, failed: bool) -> None: ...

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None


class ExecutionHook:
    """What diffusers looks for to learn where a component computes (`pipe._execution_device`).

    Shaped like a hook of accelerate, and of none of its classes, so that nobody takes it for accelerate's offloading.
    """

    greenroom = True
    no_grad = False

    def __init__(self, door: Door) -> None:
        self.door = weakref.ref(door)
        self._device = door.device

    @property
    def execution_device(self) -> torch.device:
        door = self.door()
        if door is not None and door.on_call is not None:
            door.on_call(asking_pipeline(sys._getframe(1)))
        return self._device

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        from accelerate.hooks import ModelHook

        return ModelHook()  # one that does nothing

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Called by pipelines that are about to use a part of the component that is not its forward."""
        door = self.door()
        if door is not None:
            with door.occupancy.lock:
                door.on_enter("child", ())
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when another offloading is about to take over, before it has changed anything."""
        if self.door() is not None:
            raise OffloadError(
                f"{type(module).__name__} is offloaded by greenroom, and one strategy owns a pipeline; call "
                "handle.disable() first"
            )
        return module


def _computing_methods(cls: type[nn.Module]) -> list[str]:
    """Public methods of the model's own classes whose names say that they compute."""
    names = []
    for base in cls.__mro__:
        if base is nn.Module:
            break
        for name, member in vars(base).items():
            if _COMPUTES.match(name) and inspect.isfunction(member):
                names.append(name)
    return names


def _callable_children(module: nn.Module, closed: set[int], depth: int = 2) -> list[nn.Module]:
    """The children that a pipeline may call by itself; what is inside those in `closed` is left out."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += _callable_children(child, closed, depth) if depth > 1 else []
        else:
            found.append(child)
            if depth > 1 and id(child) not in closed:
                found += _callable_children(child, closed, depth - 1)
    return found


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; the same object where nothing had to move.

    Tuples, lists, mappings, dataclasses and model outputs are entered. Tensors without dimensions stay: they compute
    with tensors of any device, and moving one would make the host wait for the device.
    """
    if isinstance(value, torch.Tensor):
        if value.device == device or value.dim() == 0 or value.device.type == "meta":
            return value
        return value.to(device, non_blocking=True)
    if isinstance(value, list | tuple):
        moved = [to_device(v, device) for v in value]
        if all(a is b for a, b in zip(moved, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*moved)
        return type(value)(moved)
    if isinstance(value, Mapping):
        moved_items = {k: to_device(v, device) for k, v in value.items()}
        if all(moved_items[k] is v for k, v in value.items()):
            return value
        if type(value) is dict:
            return moved_items
        try:
            copied = value.copy()  # type: ignore[attr-defined]
            for k, v in moved_items.items():
                copied[k] = v
            return copied
        except (AttributeError, TypeError):
            return moved_items
    if is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for f in fields(value):
            old = getattr(value, f.name, None)
            new = to_device(old, device)
            if new is not old:
                changes[f.name] = new
        if changes:
            value = copy.copy(value)
            for k, v in changes.items():
                object.__setattr__(value, k, v)
    return value
