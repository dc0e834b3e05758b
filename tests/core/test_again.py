"""A component that ran out of memory is run again where that gives the same bits, and fails where it might not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import toys

import greenroom
from greenroom import testing


def outcomes(emu: ModuleType, draw: Callable[[], Any], expected: Any, ks: range) -> list[str]:
    """What became of calls in which allocation `k` failed; whatever did, the next call is right."""
    found = []
    for k in ks:
        emu.fail_allocation(k)
        try:
            assert torch.equal(draw(), expected), k
            found.append("recovered")
        except torch.OutOfMemoryError as error:
            found.append("refused" if "cannot be run again" in str(error) else "failed")
        emu.fail_allocation(None)
        assert torch.equal(draw(), expected), k
    return found


class Prompts:
    """A language model that generates, as the whole of a pipeline."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.text_encoder = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=4,
            )
        ).eval()  # fmt: skip

    @torch.no_grad()
    def __call__(self, device: str, **words: Any) -> torch.Tensor:
        made: Any = self.text_encoder.generate(
            torch.arange(1, 9, device=device)[None], max_new_tokens=4, do_sample=False, pad_token_id=0,
            output_scores=True, return_dict_in_generate=True, **words,
        )  # fmt: skip
        return torch.stack(made.scores).cpu()


def test_generate_is_run_again_as_a_whole(emu: ModuleType) -> None:
    """Its cache has the tokens of the attempt that failed."""
    pipe = Prompts()
    expected = pipe("cpu")
    greenroom.offload(SimpleNamespace(text_encoder=pipe.text_encoder), memory="64MiB", device="emu")
    assert torch.equal(pipe("emu"), expected)
    assert set(outcomes(emu, lambda: pipe("emu"), expected, range(5, 400, 31))) == {"recovered"}


def test_a_cache_of_the_caller_is_not_appended_to_twice(emu: ModuleType) -> None:
    from transformers import DynamicCache

    pipe = Prompts()
    expected = pipe("cpu")
    greenroom.offload(SimpleNamespace(text_encoder=pipe.text_encoder), memory="64MiB", device="emu")
    found = outcomes(emu, lambda: pipe("emu", past_key_values=DynamicCache()), expected, range(40, 400, 61))
    assert "refused" in found


@pytest.mark.parametrize("cache", ["first block", "taylor"])
def test_step_caches_do_not_move_on_twice(emu: ModuleType, cache: str) -> None:
    from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig

    pipe = testing.build_pipeline("qwen_image")
    words = {**testing.call_kwargs("qwen_image"), "num_inference_steps": 4, "output_type": "latent"}
    del words["generator"]
    configs = {"first block": FirstBlockCacheConfig(threshold=0.5), "taylor": TaylorSeerCacheConfig(max_order=1)}
    pipe.transformer.enable_cache(configs[cache])

    def draw() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        made: torch.Tensor = pipe(**words, generator=generator, return_dict=False)[0]
        return made.cpu()

    expected = draw()
    greenroom.offload(pipe, memory="64MiB", device="emu")
    assert torch.equal(draw(), expected)
    assert "refused" in outcomes(emu, draw, expected, range(500, 3000, 400))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_inputs_that_are_changed_in_place(emu: ModuleType, mode: Any) -> None:
    """Tensors of inference mode do not tell that they were changed; they are kept, and given back."""

    class InPlace(toys.DiT):
        def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
            x += 1.0
            return super().forward(x, *args)

    torch.manual_seed(0)
    dit = InPlace().eval()
    pipe = SimpleNamespace(transformer=dit)

    def draw(device: str = "emu") -> torch.Tensor:
        torch.manual_seed(1)
        with mode():
            x, context = toys.inputs(device=device)
            for _ in range(2):
                x = dit(x, context)
            return x.cpu()

    expected = draw("cpu")
    greenroom.offload(pipe, memory="64MiB", device="emu")
    assert torch.equal(draw(), expected)
    found = outcomes(emu, draw, expected, range(8, 60, 9))
    assert ("refused" if mode is torch.no_grad else "recovered") in found
    assert mode is torch.no_grad or "refused" not in found


def test_a_thread_that_ends_inside_a_component_locks_nobody_out(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    expected = pipe()
    greenroom.offload(pipe, {"mode": "module"}, device="emu")

    def leave(module: Any, args: Any) -> None:
        raise SystemExit

    def end() -> None:
        with contextlib.suppress(SystemExit):
            pipe("emu")

    hook = pipe.transformer.blocks[1].register_forward_pre_hook(leave)
    ending = threading.Thread(target=end)
    ending.start()
    ending.join()
    hook.remove()
    made = []
    toys.at_once(lambda: made.append(pipe("emu")), seconds=60)
    assert torch.equal(made[0], expected)


def test_a_layout_of_memory_is_refused_while_offloaded(emu: ModuleType) -> None:
    pipe = toys.Pipeline()
    greenroom.offload(pipe, device="emu")
    with pytest.raises(greenroom.OffloadError, match="memory_format"):
        pipe.vae.to(memory_format=torch.channels_last)
    assert pipe.vae.to(memory_format=torch.preserve_format) is pipe.vae
