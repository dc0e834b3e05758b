"""What happens right before and right after a module's call, also where the call is compiled.

Note [Hooks stay outside the graph]
    `module.compile()` compiles the call together with the module's hooks. Hooks that move weights must not be traced:
    they would break the graph, or be compiled for the weights of one moment. Around a compiled module they are
    therefore called by a function that stands in for the compiled call and that the compiler leaves alone; around
    any other they are ordinary hooks. A module may be compiled at any time, so `settle` looks again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
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
        self._before = before
        self._after = after
        self._hooks = hooks
        self._run = run
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
            self._handles = self._hooks(module)
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

    def call(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "a compiled call outlived its module"
        args, kwargs = self._before(module, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = self._inner(*args, **kwargs) if self._run is None else self._run(self._inner, args, kwargs)
        finally:
            if self._after is not None:
                self._after(module, args, output)
        return output


def _is_new(compiled: Any) -> bool:
    """Whether a compiled call is nobody's stand-in: the module was compiled, perhaps once more, after it was set."""
    return compiled is not None and getattr(compiled, "greenroom", None) is None


def keep_out_of_graphs() -> None:
    """Lets the compiler leave the frames of these rooms alone, where it traces a model around them."""
    global _kept_out
    if not _kept_out:
        _kept_out = True
        for name in ("greenroom.strategies", "greenroom.streaming", "greenroom.host", "greenroom.accelerator"):
            torch._dynamo.trace_rules.add(name)


class _Around:
    def __init__(self, bracket: Bracket) -> None:
        self.bracket = bracket
        self.__name__ = "bracketed"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.bracket.call(*args, **kwargs)


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
