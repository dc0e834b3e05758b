"""What vLLM-Omni's guide to layerwise offloading shows runs here with the names changed; so do our own first steps."""

from __future__ import annotations

import base64
import io
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from command_line import command
from live_server import until
from PIL import Image

from greenroom import testing
from greenroom.demo import checkpoint_path

# vLLM-Omni's snippet and commands; of these only the model's name is replaced by a folder.
SNIPPET = """
from greenroom import Omni

omni = Omni(
    model="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    diffusion_offload_config=CONFIG,
)
"""
CONFIGS: list[dict[str, Any]] = [
    {"mode": "layer", "components": ["dit"]},
    {"mode": "layer", "components": ["text_encoder"]},
    {"mode": "layer", "components": ["dit", "text_encoder"]},
    {"mode": "module", "components": ["dit", "text_encoder"]},
    {"mode": "module"},
]
COMMANDS = [
    """serve MODEL --omni --diffusion-offload-config '{"mode":"layer","components":["text_encoder"]}'""",
    """serve MODEL --omni --diffusion-offload-config '{"mode":"layer","components":["dit"]}'""",
    """serve MODEL --omni --diffusion-offload-config '{"mode":"layer","components":["dit","text_encoder"]}'""",
    """serve MODEL --omni --diffusion-offload-config '{"mode":"module","components":["dit","text_encoder","vae"]}'""",
    "serve MODEL --omni --enable-layerwise-offload",
    "serve MODEL --omni --enable-cpu-offload",
    "serve MODEL --omni --enable-distributed-layerwise-offload",
]
WORDS = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "seed": 3}
PROMPT = "a red cube rolls"


@pytest.fixture(scope="module")
def expected(emu_module: Any, checkpoints: Any) -> np.ndarray:
    """The frames of the pipeline that was never offloaded."""
    from diffusers import DiffusionPipeline

    with testing.quiet():
        pipe: Any = DiffusionPipeline.from_pretrained(checkpoints["wan22_t2v"], dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    words = {k: v for k, v in WORDS.items() if k != "seed"}
    generator = torch.Generator().manual_seed(WORDS["seed"])
    frames = pipe.to("emu")(PROMPT, generator=generator, output_type="pil", **words).frames[0]
    return np.stack([np.asarray(f) for f in frames])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_snippet(emu: Any, checkpoints: Any, expected: np.ndarray, config: dict[str, Any]) -> None:
    code = SNIPPET.replace("Wan-AI/Wan2.2-T2V-A14B-Diffusers", str(checkpoints["wan22_t2v"]))
    names: dict[str, Any] = {"CONFIG": config}
    exec(compile(code, "guide", "exec"), names)
    with names["omni"] as omni:
        assert str(omni.device) == "emu:0" and omni.report().strategy in ("layerwise", "model-level")
        frames = omni.generate(PROMPT, WORDS, progress=False)[0].frames
    assert np.array_equal(np.stack([np.asarray(f) for f in frames]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands(emu: Any, checkpoints: Any, expected: np.ndarray, line: str) -> None:
    words = shlex.split(line.replace("MODEL", str(checkpoints["wan22_t2v"])))
    assert words.pop(0) == "serve"
    with command(*words) as (url, _), httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        assert client.get("/v1/offload").json()["offloaded"] is True
        made = client.post("/v1/videos", json={"prompt": PROMPT, **WORDS}).json()
        path = f"/v1/videos/{made['id']}"
        until(lambda: client.get(path).json()["status"] in ("completed", "failed"), 60)
        archive = zipfile.ZipFile(io.BytesIO(client.get(f"{path}/content?variant=frames").content))
    frames = [np.asarray(Image.open(archive.open(name))) for name in archive.namelist()]
    assert np.array_equal(np.stack(frames), expected)


def first_steps() -> list[str]:
    """The commands of "From install to first picture", lines that go on put together."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (block,) = re.findall(r"## From install to first picture\n+```console\n(.*?)```", page, re.DOTALL)
    return [line.removeprefix("$ ") for line in block.replace("\\\n", "").splitlines()]


def test_three_commands_lead_to_the_first_picture(emu: Any, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    install, serve, draw = first_steps()
    assert install.startswith("pip install ")
    words = shlex.split(serve.replace("Qwen/Qwen-Image", str(checkpoint_path())))
    assert words[:2] == ["greenroom", "serve"]
    with command(*words[2:]) as (url, _):
        line = draw.replace("localhost:8000", url.removeprefix("http://")).replace("| python ", f"| {sys.executable} ")
        assert line != draw
        subprocess.run(line, shell=True, check=True, cwd=tmp_path, timeout=60)
        body = httpx.post(
            f"{url}/v1/images/generations", json={"prompt": "a cup of coffee", "seed": 7}, trust_env=False
        )
    shown = Image.open(tmp_path / "cup.png")
    again = Image.open(io.BytesIO(base64.b64decode(body.json()["data"][0]["b64_json"])))
    assert shown.size == (32, 32) and np.array_equal(np.asarray(shown), np.asarray(again))
