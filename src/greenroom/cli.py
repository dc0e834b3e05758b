"""The command line: the same words as in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from greenroom.errors import ConfigError, GreenroomError

app = typer.Typer(
    name="greenroom",
    help="CPU offloading for diffusion models: exact to the bit, as fast as the bus allows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Tables of help cut the names of options where lines are short, and read brackets in texts as their own.
    rich_markup_mode=None,
)
console = Console(emoji=False)
errors = Console(stderr=True, emoji=False)

ModelArgument = Annotated[str, typer.Argument(help="Folder of a diffusers checkpoint, or a hub id.")]
DtypeOption = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")]
OffloadOption = Annotated[
    str | None,
    typer.Option(
        "--diffusion-offload-config",
        help='JSON, such as \'{"mode": "layer", "components": ["dit", "text_encoder"]}\'.',
    ),
]
ModelLevelOption = Annotated[bool, typer.Option("--enable-cpu-offload", help="Model-level offloading.")]
LayerwiseOption = Annotated[bool, typer.Option("--enable-layerwise-offload", help="Layerwise offloading.")]
BudgetOption = Annotated[
    str | None, typer.Option("--memory-budget", help='Device memory to use, such as "12GiB" or "80%".')
]
VariantOption = Annotated[str | None, typer.Option(help='Weights of a variant, such as "fp16".')]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
RemoteCodeOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the checkpoint brings along.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="Where to compute: cuda, xpu, npu, cpu, or emu for the emulated accelerator. "
        "Default: the accelerator that is present, else the CPU without offloading."
    ),
]


# The demo compares strategies, and on the CPU there is nothing to offload.
DemoDeviceOption = Annotated[
    str | None,
    typer.Option(
        help="The accelerator that is present (such as cuda), or emu for the emulated one. "
        "Default: the one that is present, else emu."
    ),
]


# Fields of errors that are flags here; most have the same name.
_FLAGS = frozenset(
    {
        "dtype", "device", "revision", "variant", "trust_remote_code", "data_parallel_size", "usp",
        "tensor_parallel_size", "output", "negative_prompt", "seed", "height", "width", "steps", "frames",
        "guidance_scale", "memory_budget", "api_key",
    }
)  # fmt: skip
_OTHER_NAMES = {"memory": "memory_budget", "num_inference_steps": "steps", "num_frames": "frames"}


def _told(error: Exception, memory_budget: str | None) -> str:
    """An error in the words of the command line: what a flag has set is called by the flag's name."""
    text, field = str(error), getattr(error, "field", None)
    flag = _OTHER_NAMES.get(field or "", field or "")
    if flag == "memory_budget" and memory_budget is None:
        return text
    if isinstance(error, ConfigError) and flag == "memory_budget":
        text = str(ConfigError(error.field, memory_budget, error.accepted, error.hint))
    if (flag in _FLAGS or flag.startswith("dlo_")) and text.startswith(f"{field} "):
        return f"--{flag.replace('_', '-')}{text.removeprefix(str(field))}"
    return text


@contextlib.contextmanager
def _in_one_line(memory_budget: str | None = None) -> Iterator[None]:
    """Ends the command with one line for what is raised on purpose, and for a device that is too small."""
    try:
        yield
    except (GreenroomError, OSError, ImportError) as error:
        raise _fail(_told(error, memory_budget)) from None
    except RuntimeError as error:
        import torch

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        told = f"the device has too little memory for what is to stay on it; offload more ({error})"
        raise _fail(told) from None


def _say(text: str, lead: str = "", to: Console = console) -> None:
    """Prints a text as it is, whatever brackets it holds, behind a lead in rich's markup."""
    to.print(lead + escape(text), highlight=False, soft_wrap=True)


def _fail(message: str) -> typer.Exit:
    _say(message, "[bold red]error:[/] ", errors)
    return typer.Exit(2)


@app.command()
def demo(
    prompt: Annotated[
        str, typer.Argument(help="What to draw: any digit, in words or figures.")
    ] = "a handwritten seven",
    out: Annotated[Path, typer.Option(help="Where pictures and plot go.")] = Path("out/demo"),
    device: DemoDeviceOption = None,
) -> None:
    """Draws a digit with a small trained pipeline on a device that is too small for it."""
    from greenroom.demo.run import run

    raise typer.Exit(run(prompt, out, console, device))


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Option(help="What to draw.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The picture or video to write. Default: out.png, or out.mp4 for a video."),
    ] = None,
    diffusion_offload_config: OffloadOption = None,
    enable_cpu_offload: ModelLevelOption = False,
    enable_layerwise_offload: LayerwiseOption = False,
    memory_budget: BudgetOption = None,
    device: DeviceOption = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to keep out of the picture.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same bits, whatever the strategy.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps. Default: the pipeline's.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels. Default: the pipeline's.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels. Default: the pipeline's.")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of a video. Default: the pipeline's.")] = None,
    fps: Annotated[int, typer.Option(min=1, max=120, help="Frames per second of a video.")] = 16,
    guidance_scale: Annotated[float | None, typer.Option(help="Default: the pipeline's.")] = None,
    dtype: DtypeOption = "auto",
    variant: VariantOption = None,
    revision: RevisionOption = None,
    trust_remote_code: RemoteCodeOption = False,
) -> None:
    """Draws one picture or video with a diffusers checkpoint, offloaded."""
    with _in_one_line(memory_budget):
        from greenroom.engine import OmniDiffusionSamplingParams
        from greenroom.generate import generate_file

        params = OmniDiffusionSamplingParams(
            negative_prompt=negative_prompt,
            seed=seed,
            num_inference_steps=steps,
            height=height,
            width=width,
            num_frames=frames,
            guidance_scale=guidance_scale,
        )
        written, report = generate_file(
            model,
            prompt,
            params,
            output,
            fps=fps,
            diffusion_offload_config=diffusion_offload_config,
            memory_budget=memory_budget,
            enable_cpu_offload=enable_cpu_offload,
            enable_layerwise_offload=enable_layerwise_offload,
            device=device,
            dtype=dtype,
            variant=variant,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    _say(report)
    _say(str(written), "[green]wrote[/] ")


@app.command()
def plan(
    model: ModelArgument,
    memory_budget: BudgetOption = None,
    device: Annotated[
        str | None,
        typer.Option(help='The device whose memory "80%" is of. Default: the accelerator that is present.'),
    ] = None,
    variant: VariantOption = None,
    revision: RevisionOption = None,
    trust_remote_code: RemoteCodeOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Says what each strategy would keep on the device and move, without reading a weight."""
    import json
    from dataclasses import asdict

    from greenroom.loading import load_checkpoint
    from greenroom.loading.plan import budget_bytes, describe, plan_pipeline

    with _in_one_line(memory_budget):
        budget = None if memory_budget is None else budget_bytes(memory_budget, device)
        loaded = load_checkpoint(model, variant=variant, revision=revision, trust_remote_code=trust_remote_code)
        planned = plan_pipeline(loaded.pipeline, budget)
    if as_json:
        typer.echo(json.dumps({**asdict(planned), "loading": loaded.report.to_dict()}))
        return
    _say(describe(planned))
    for name, why in loaded.report.fallbacks.items():
        _say(f"{name}: {why}")


@app.command()
def serve(
    model: ModelArgument,
    omni: Annotated[bool, typer.Option("--omni", help="Accepted; every model is served this way.")] = True,
    diffusion_offload_config: OffloadOption = None,
    enable_cpu_offload: ModelLevelOption = False,
    enable_layerwise_offload: LayerwiseOption = False,
    enable_distributed_layerwise_offload: Annotated[
        bool, typer.Option("--enable-distributed-layerwise-offload", help="Layerwise over several ranks.")
    ] = False,
    dlo_use_allgather: Annotated[
        bool,
        typer.Option(
            "--dlo-use-allgather/--dlo-no-use-allgather",
            " /--no-dlo-use-allgather",
            help="Each rank copies its share, the group gathers.",
        ),
    ] = True,
    dlo_resident_layers: Annotated[int, typer.Option(min=0, help="DiT blocks that stay on the device.")] = 0,
    dlo_pin_budget_gb: Annotated[float | None, typer.Option(help="Most host memory to lock, in GB.")] = None,
    dlo_pin_failure_policy: Annotated[str, typer.Option(help="fail or whole_block_fallback.")] = "fail",
    dlo_chunk_size_mb: Annotated[int | None, typer.Option(min=1, help="Accepted; changes nothing.")] = None,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="Ranks: processes with a device each, which serve different requests.")
    ] = 1,
    usp: Annotated[
        int, typer.Option(min=1, help="Ranks that compute each request together (Ulysses sequence parallelism).")
    ] = 1,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Accepted; 1 is all that there is, as matrices are not split over ranks.")
    ] = 1,
    rank_timeout: Annotated[
        float, typer.Option(min=3, help="Seconds without a sign of life after which a rank counts as dead.")
    ] = 30.0,
    memory_budget: BudgetOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    variant: VariantOption = None,
    revision: RevisionOption = None,
    trust_remote_code: RemoteCodeOption = False,
    served_model_name: Annotated[str | None, typer.Option(help="The name that clients see.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A further name that requests may be addressed to, as behind a proxy; * is any. Repeatable."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="What clients must send as a bearer token. Default: GREENROOM_API_KEY, if set.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Most requests that wait; more get 429.")] = 32,
    max_pixels: Annotated[int, typer.Option(min=1, help="Most pixels of a picture or frame.")] = 2048 * 2048,
    max_frames: Annotated[int, typer.Option(min=1, help="Most frames of a video.")] = 257,
    max_steps: Annotated[int, typer.Option(min=1, help="Most denoising steps.")] = 200,
    request_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a request is given up.")
    ] = 1800.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serves a model behind OpenAI's interface, with a page at /."""
    try:
        from greenroom.serving import ServerSettings
        from greenroom.serving.main import LOG_LEVELS, listen, run
        from greenroom.serving.settings import read_key
    except ImportError as error:
        raise _fail(str(error)) from None
    from greenroom.engine import serve_rank, start_engine, world_rank

    if world_rank() > 0:
        # Inside torchrun: the first rank listens, the others compute for it.
        raise typer.Exit(serve_rank())
    with _in_one_line():
        api_key = read_key(api_key)
    if log_level not in LOG_LEVELS:
        raise _fail(str(ConfigError("--log-level", log_level, ", ".join(LOG_LEVELS))))
    try:
        listener = listen(host, port)  # before anything is loaded, which may take minutes
    except OSError as error:
        raise _fail(f"cannot listen on {host}:{port}: {error}") from None

    words: dict[str, Any] = {
        "diffusion_offload_config": diffusion_offload_config,
        "memory_budget": memory_budget,
        "device": device,
        "dtype": dtype,
        "variant": variant,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "max_queue": max_queue,
        "enable_cpu_offload": enable_cpu_offload,
        "enable_layerwise_offload": enable_layerwise_offload,
        "enable_distributed_layerwise_offload": enable_distributed_layerwise_offload,
        "tensor_parallel_size": tensor_parallel_size,
        "dlo_use_allgather": dlo_use_allgather,
        "dlo_resident_layers": dlo_resident_layers,
        "dlo_pin_budget_gb": dlo_pin_budget_gb,
        "dlo_pin_failure_policy": dlo_pin_failure_policy,
        "dlo_chunk_size_mb": dlo_chunk_size_mb,
    }
    settings = ServerSettings(
        served_model_name=served_model_name,
        api_key=api_key,
        allowed_hosts=tuple(allowed_host) if allowed_host else None,
        max_queue=max_queue,
        max_pixels=max_pixels,
        max_frames=max_frames,
        max_steps=max_steps,
        request_timeout=request_timeout,
    )
    with _in_one_line(memory_budget):
        engine = start_engine(model, data_parallel_size=data_parallel_size, usp=usp, rank_timeout=rank_timeout, **words)
    report = engine.report()
    _say(str(report) if report is not None else f"not offloaded, on {engine.device}")
    shown = f"[{host}]" if ":" in host else host
    _say(f"{model} on http://{shown}:{port}", "[green]serving[/] ")
    run(engine, settings, listener, host=host, log_level=log_level)
    if engine.status.cause is not None:
        _say(f"ended without {engine.status.cause}", "[bold red]error:[/] ", errors)
        raise typer.Exit(1)


def main() -> Any:
    return app()


__all__ = ["app", "main"]
