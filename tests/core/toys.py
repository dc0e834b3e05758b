"""Small modules with the traits that break hook-based offloaders, and a pipeline of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 64


class Block(nn.Module):
    """Mixed dtypes, a parameter outside any layer, a persistent and a non-persistent buffer."""

    def __init__(self, width: int = WIDTH, inner: int = 4 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner).to(torch.bfloat16)
        self.down = nn.Linear(inner, width)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / 10)
        self.register_buffer("offset", torch.randn(width) / 10)
        self.register_buffer("table", torch.randn(width) / 10, persistent=False)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        shift, gain = self.scale_shift_table
        h = self.norm(x) * (1 + gain) + shift + self.offset + self.table
        h = self.up(h.to(torch.bfloat16))
        return x + scale * self.down(F.gelu(h).float())


class DiT(nn.Module):
    """Two block lists of unequal blocks, root parameters and buffers."""

    _layerwise_offload_blocks_attrs: ClassVar = ["blocks", "single_blocks"]

    def __init__(self, blocks: int = 4, single: int = 3) -> None:
        super().__init__()
        self.patch = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.single_blocks = nn.ModuleList(Block(inner=2 * WIDTH) for _ in range(single))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("freqs", torch.randn(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor, context: dict[str, Any], order: list[int] | None = None) -> torch.Tensor:
        x = self.patch(x) * self.scale + self.freqs + context["embeds"][0]
        every = [*self.blocks, *self.single_blocks]
        for i in range(len(every)) if order is None else order:
            x = every[i](x)
        return x


class Row(nn.Module):
    """Blocks one after another, and nothing else."""

    _layerwise_offload_blocks_attrs: ClassVar = ["blocks"]

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Encoder(nn.Module):
    """Tied embedding and head; a direct entry point beside forward; generate runs the blocks many times."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 300, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def generate(self, tokens: torch.Tensor, new: int = 3) -> torch.Tensor:
        for _ in range(new):
            logits = self.head(self(tokens))
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        return tokens

    def get_text_features(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.embed(tokens))


class Vae(nn.Module):
    """Never called by forward; a part that runs before the decoder; statistics that pipelines read themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.post_quant = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WIDTH)
        self.bn = nn.BatchNorm1d(WIDTH)
        nn.init.normal_(self.bn.running_mean)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.post_quant(z))


class Pipeline:
    """Two text encoders, two DiTs that split the steps, a VAE; shaped like a diffusers pipeline."""

    def __init__(self, **dit: int) -> None:
        torch.manual_seed(0)
        self.text_encoder = Encoder().eval()
        self.text_encoder_2 = Encoder(2).eval()
        self.transformer = DiT(**dit).eval()
        self.transformer_2 = DiT(**dit).eval()
        self.vae = Vae().eval()
        self.between: Any = None

    @property
    def components(self) -> dict[str, Any]:
        names = ("text_encoder", "text_encoder_2", "transformer", "transformer_2", "vae")
        return {name: getattr(self, name) for name in names if getattr(self, name, None) is not None}

    def maybe_free_model_hooks(self) -> None: ...

    @torch.no_grad()
    def __call__(self, device: Any = "cpu", steps: int = 4, seed: int = 0) -> torch.Tensor:
        # Where the module says it is, as some pipelines ask: the host, while it is released.
        tokens = torch.arange(6)[None].to(self.text_encoder.embed.weight.device)
        embeds = self.text_encoder(tokens) + self.text_encoder_2(tokens)
        x = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(seed))
        x = x.to(device)
        for step in range(steps):
            dit = self.transformer if step < steps // 2 else self.transformer_2
            x = dit(x, {"embeds": [embeds]})
            if self.between is not None:
                self.between(step, x)
        x = x - self.vae.bn.running_mean
        image = self.vae.decode(x).cpu()
        self.maybe_free_model_hooks()
        return image


def only(dit: nn.Module) -> nn.Module:
    """A pipeline of a DiT and nothing else."""
    pipe = nn.Module()
    pipe.transformer = dit.eval()
    return pipe


def with_blocks(block: Callable[[], nn.Module], seed: int) -> Pipeline:
    """A pipeline whose first DiT has four blocks of another kind."""
    pipe = Pipeline()
    torch.manual_seed(seed)
    pipe.transformer.blocks = nn.ModuleList(block() for _ in range(4)).eval()
    return pipe


def inputs(batch: int = 1, device: Any = "cpu") -> tuple[torch.Tensor, dict[str, Any]]:
    """What `DiT` takes: tokens (batch, 4, WIDTH) and a context."""
    x, embeds = (torch.randn(batch, 4, WIDTH, device=device) for _ in range(2))
    return x, {"embeds": [embeds]}


def at_once(*works: Callable[[], None], seconds: float = 120) -> None:
    """Runs each on a thread of its own; raises what the first to fail raised."""
    failed: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a thread hangs"
    if failed:
        raise failed[0]


def tensors(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name, ties under each of their names."""
    found: dict[str, torch.Tensor] = {}
    for name, module in pipe.components.items():
        for key, value in module.named_parameters(remove_duplicate=False):
            found[f"{name}.{key}"] = value
        for key, value in module.named_buffers(remove_duplicate=False):
            found[f"{name}.{key}"] = value
    return found


def nbytes(module: nn.Module) -> int:
    return sum({id(t): t.nbytes for t in (*module.parameters(), *module.buffers())}.values())


MODEL_LEVEL = {"mode": "module", "components": ["dit", "text_encoder"]}
MODEL_LEVEL_VAE = {"mode": "module", "components": ["dit", "text_encoder", "vae"]}
LAYERWISE = {"mode": "layer", "components": ["dit", "text_encoder"]}
LAYERWISE_DIT = {"mode": "layer", "components": ["dit"]}
LAYERWISE_RESIDENT = {"mode": "layer", "components": ["dit"], "layer_options": {"dit": {"resident_layers": 3}}}
UNPINNED = {"mode": "layer", "components": ["dit", "text_encoder"], "pin_memory": False}
EVERY = {
    "model-level": MODEL_LEVEL,
    "model-level with vae": MODEL_LEVEL_VAE,
    "layerwise": LAYERWISE,
    "layerwise dit": LAYERWISE_DIT,
    "layerwise with residents": LAYERWISE_RESIDENT,
    "layerwise unpinned": UNPINNED,
}
