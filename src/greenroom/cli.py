"""The command line: the same words as in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from greenroom.errors import GreenroomError

app = typer.Typer(
    name="greenroom",
    help="CPU offloading for diffusion models: exact to the bit, as fast as the bus allows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()
errors = Console(stderr=True)

OffloadOption = Annotated[
    str | None,
    typer.Option(
        "--diffusion-offload-config",
        help='JSON, such as \'{"mode": "layer", "components": ["dit", "text_encoder"]}\'.',
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="Where to compute: cuda, xpu, npu, cpu, or emu for the emulated accelerator. "
        "Default: the accelerator that is present, else the CPU without offloading."
    ),
]


def _fail(message: str) -> typer.Exit:
    errors.print(f"[bold red]error:[/] {message}", highlight=False, soft_wrap=True)
    return typer.Exit(2)


@app.command()
def demo(
    prompt: Annotated[
        str, typer.Argument(help="What to draw: any digit, in words or figures.")
    ] = "a handwritten seven",
    out: Annotated[Path, typer.Option(help="Where pictures and plot go.")] = Path("out/demo"),
    device: DeviceOption = None,
) -> None:
    """Draws a digit with a small trained pipeline on a device that is too small for it."""
    from greenroom.demo.run import run

    raise typer.Exit(run(prompt, out, console, device))


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="Folder of a diffusers checkpoint.")],
    prompt: Annotated[str, typer.Option(help="What to draw.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture to write.")] = Path("out.png"),
    diffusion_offload_config: OffloadOption = None,
    enable_cpu_offload: Annotated[bool, typer.Option("--enable-cpu-offload", help="Model-level offloading.")] = False,
    enable_layerwise_offload: Annotated[
        bool, typer.Option("--enable-layerwise-offload", help="Layerwise offloading.")
    ] = False,
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", help='Device memory to use, such as "12GiB" or "80%".')
    ] = None,
    device: DeviceOption = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to keep out of the picture.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same bits, whatever the strategy.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps. Default: the pipeline's.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels. Default: the pipeline's.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels. Default: the pipeline's.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Default: the pipeline's.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Draws one picture with a local diffusers checkpoint, offloaded."""
    from greenroom.generate import Request, generate_image

    request = Request(
        prompt=prompt,
        negative_prompt=negative_prompt,
        seed=seed,
        steps=steps,
        height=height,
        width=width,
        guidance_scale=guidance_scale,
    )
    try:
        picture, report = generate_image(
            model,
            request,
            config=diffusion_offload_config,
            memory=memory_budget,
            enable_cpu_offload=enable_cpu_offload,
            enable_layerwise_offload=enable_layerwise_offload,
            device=device,
            dtype=dtype,
        )
    except (GreenroomError, OSError) as error:
        raise _fail(str(error)) from None
    output.parent.mkdir(parents=True, exist_ok=True)
    picture.save(output)
    if report is not None:
        console.print(str(report), highlight=False, soft_wrap=True)
    console.print(f"[green]wrote[/] {output}", highlight=False, soft_wrap=True)


def main() -> Any:
    return app()


__all__ = ["app", "main"]
