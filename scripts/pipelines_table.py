"""Writes docs/pipelines.md from the results of tests/pipelines.

python -m pytest tests/pipelines            # the slow ones included; leaves out/pipelines.json
python scripts/pipelines_table.py           # takes it over into docs/pipelines.json and docs/pipelines.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "out" / "pipelines.json"
KEPT = ROOT / "docs" / "pipelines.json"
PAGE = ROOT / "docs" / "pipelines.md"

HEAD = """# Pipelines that nothing is declared for

Greenroom finds the components and blocks of a pipeline by type, structure and size where nobody declared them. Each
class below was built with tiny random components, with the catalog emptied, and run twice under layerwise
offloading and under a device budget for half of its weights. *Exact* means: the same bits as without offloading.
What cannot be offloaded is refused before anything is touched, by the name of the component and the reason.

{count} classes. This page is written by `scripts/pipelines_table.py` from the results of `tests/pipelines`.

| Pipeline | layerwise | budget for half of the weights |
|---|---|---|
"""

Results = dict[str, dict[str, str]]


def page(results: Results) -> str:
    lines = [
        f"| `{name}` | {_cell(results[name].get('layerwise'))} | {_cell(results[name].get('budget at half'))} |"
        for name in sorted(results)
    ]
    return HEAD.format(count=len(results)) + "\n".join(lines) + "\n"


def _cell(found: str | None) -> str:
    if found in (None, "failed"):
        return f"**{found or 'not run'}**"
    return str(found).replace("|", "/").replace("\n", " ")


def main() -> int:
    """Takes over what was measured last; what was not measured stays as it is."""
    results: Results = json.loads(KEPT.read_text())
    for name, ways in json.loads(MEASURED.read_text()).items():
        results.setdefault(name, {}).update(ways)
    KEPT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
