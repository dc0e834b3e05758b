"""What happens right before and right after a module's call, also where the call is compiled.

Note [Hooks stay outside the graph]
    `module.compile()` compiles the call together with the module's hooks. Hooks that move weights must not be traced:
    they would break the graph, or be compiled for the weights of one moment. Around a compiled module they are
    therefore called by a function that stands in for the compiled call and that the compiler leaves alone; around
    any other they are ordinary hooks. A module may be compiled at any time, so `settle` looks again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

_kept_out = False

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[nn.Module, Any, Any], None]


class Bracket:
    """Calls `before` and `after` around each call of `module`.

    Args:
        module: not kept alive.
        before: given the module, args and kwargs; returns None, or other args and kwargs.
        after: given the module, args and the output, which is None if the call has failed.
        hooks: registers the two as hooks and returns what removes them.
        run: calls a compiled function with args and kwargs, for who wants to run it again.
    """

    def __init__(
        self,
        module: nn.Module,
        before: Before,
        after: After | None,
        hooks: Callable[[nn.Module], list[Any]],
        run: Callable[..., Any] | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        # Who owns a bracket is known by it, and must not be kept alive by it.
        self._before, self._after, self._hooks, self._run = map(_weakly, (before, after, hooks, run))
        self._handles: list[Any] = []
        self._stand_in: Any = None
        self._inner: Any = None
        self._outer: Bracket | None = None
        self._install(module)

    @property
    def compiled(self) -> bool:
        return self._stand_in is not None

    def _install(self, module: nn.Module) -> None:
        inner = module.__dict__.get("_compiled_call_impl")
        if inner is None:
            self._handles = self._hooks()(module)
            return
        keep_out_of_graphs()
        self._stand_in = torch._dynamo.disable(_Around(self), recursive=False)
        self._stand_in.greenroom = self
        self._outer = getattr(inner, "greenroom", None)
        if self._outer is not None:  # hung later, so inside, as hooks that are not prepended are
            self._inner, self._outer._inner = self._outer._inner, self._stand_in
        else:
            self._inner = inner
            module.__dict__["_compiled_call_impl"] = self._stand_in

    def settle(self) -> None:
        """Moves from one place to the other if the module was compiled since."""
        module = self._module()
        found = None if module is None else module.__dict__.get("_compiled_call_impl")
        if (module is not None and (found is None) == self.compiled) or _is_new(found):
            for handle in self._handles:
                handle.remove()
            self._handles, self._stand_in = [], None
            if module is not None:
                self._install(module)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        module = self._module()
        ours = self._stand_in
        if ours is not None and self._outer is not None:
            if self._outer._inner is ours:
                self._outer._inner = self._inner
        elif ours is not None and module is not None and module.__dict__.get("_compiled_call_impl") is ours:
            module.__dict__["_compiled_call_impl"] = self._inner
        self._stand_in = self._inner = self._outer = None

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        return self._before(), self._after(), self._run()

    def inside(self) -> tuple[nn.Module, Any]:
        module = self._module()
        assert module is not None, "a compiled call outlived its module"
        return module, self._inner


def _is_new(compiled: Any) -> bool:
    """Whether a compiled call is nobody's stand-in: the module was compiled, perhaps once more, after it was set."""
    return compiled is not None and getattr(compiled, "greenroom", None) is None


def keep_out_of_graphs() -> None:
    """Lets the compiler leave the frames of these rooms alone, where it traces a model around them.

    Nothing is done before the compiler is loaded: that takes a second, and most never need it.
    """
    global _kept_out
    if not _kept_out and "torch._dynamo" in sys.modules:
        _kept_out = True
        for name in ("greenroom.strategies", "greenroom.streaming", "greenroom.host", "greenroom.accelerator"):
            torch._dynamo.trace_rules.add(name)


def _weakly(call: Any) -> Callable[[], Any]:
    """A reference that does not keep the object of a bound method alive; what is no bound method is kept."""
    return weakref.WeakMethod(call) if isinstance(call, MethodType) else lambda: call


class _Around:
    """Stands in for a compiled call."""

    def __init__(self, bracket: Bracket) -> None:
        self.bracket = bracket
        self.before, self.after, self.run = bracket.parts
        self.__name__ = "bracketed"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, inner = self.bracket.inside()
        args, kwargs = self.before(module, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = inner(*args, **kwargs) if self.run is None else self.run(inner, args, kwargs)
        finally:
            if self.after is not None:
                self.after(module, args, output)
        return output


def compile_in_place(wrapper: Any, module: nn.Module) -> Callable[[], None]:
    """Lets `module` itself have the compiled call that `wrapper`, made by `torch.compile(module)`, has for it.

    Returns:
        What undoes it.
    """
    if module.__dict__.get("_compiled_call_impl") is not None:
        return lambda: None
    module.__dict__["_compiled_call_impl"] = wrapper.dynamo_ctx(module._call_impl)
    reference = weakref.ref(module)

    def undo() -> None:
        found = reference()
        if found is not None:
            found.__dict__.pop("_compiled_call_impl", None)

    return undo
