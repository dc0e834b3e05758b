"""Writes the support table of the README from the results of tests/architectures and tests/distributed.

python -m pytest tests/architectures        # leaves out/support.json
python -m pytest tests/distributed/test_every_architecture.py   # leaves out/support_distributed.json
python scripts/support_table.py             # takes it over into docs/support.json and the README
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "out" / "support.json"
RANKS = ROOT / "out" / "support_distributed.json"
KEPT = ROOT / "docs" / "support.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- support-table:begin -->", "<!-- support-table:end -->"

WAYS = {
    "model-level": "model-level",
    "layerwise dit": "layerwise, DiT",
    "layerwise dit and text_encoder": "layerwise, DiT and text encoders",
    "budget at half": "budget for half of the weights",
    "two ranks": "gathered by two ranks",
}
# Name of the tiny pipeline (None: not yet supported), name of the pipeline, an example.
ROWS = (
    ("flux2", "Flux2Pipeline", "black-forest-labs/FLUX.2-dev"),
    ("longcat_image", "LongCatImagePipeline", "meituan-longcat/LongCat-Image"),
    ("ovis_image", "OvisImagePipeline", "AIDC-AI/Ovis-Image-7B"),
    ("qwen_image", "QwenImagePipeline", "Qwen/Qwen-Image"),
    ("sdxl", "StableDiffusionXLPipeline", "stabilityai/stable-diffusion-xl-base-1.0"),
    ("sd3", "StableDiffusion3Pipeline", "stabilityai/stable-diffusion-3.5-medium"),
    ("wan22_t2v", "Wan22Pipeline", "Wan-AI/Wan2.2-T2V-A14B-Diffusers"),
    ("wan22_i2v", "Wan22I2VPipeline", "Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
    ("cosmos3", "Cosmos3OmniDiffusersPipeline", "nvidia/Cosmos3-Nano"),
    (None, "NextStep11Pipeline", "stepfun-ai/NextStep-1.1"),
    (None, "BagelPipeline", "ByteDance-Seed/BAGEL-7B-MoT"),
)
NOT_THERE = {("cosmos3", "layerwise dit and text_encoder"): "no text encoder"}
DTYPES = ("fp32", "bf16")

Results = dict[str, dict[str, dict[str, str]]]


def table(results: Results) -> str:
    """The table in Markdown: what was exact in both dtypes says so, and nothing else does."""
    lines = [
        "| Pipeline | Example | " + " | ".join(WAYS.values()) + " |",
        "|---" * (2 + len(WAYS)) + "|",
    ]
    for name, pipeline, example in ROWS:
        cells = [_cell(name, way, results) for way in WAYS]
        lines.append(f"| `{pipeline}` | {example} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(name: str | None, way: str, results: Results) -> str:
    if name is None:
        return "not yet"
    if (name, way) in NOT_THERE:
        return NOT_THERE[name, way]
    found = results.get(name, {}).get(way, {})
    missing = [dtype for dtype in DTYPES if found.get(dtype) != "exact"]
    return f"**not exact in {', '.join(missing)}**" if missing else "exact"


def inserted(readme: str, results: Results) -> str:
    """The README with the table between the markers.

    Raises:
        ValueError: a marker is missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def main() -> int:
    """Takes over what was measured last; what was not measured here stays as it is."""
    results: Results = json.loads(KEPT.read_text())
    if MEASURED.exists():
        for name, ways in json.loads(MEASURED.read_text()).items():
            results.setdefault(name, {}).update(ways)
    if RANKS.exists():
        for name, cells in json.loads(RANKS.read_text()).items():
            results.setdefault(name, {})["two ranks"] = cells
    KEPT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    README.write_text(inserted(README.read_text(), results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
