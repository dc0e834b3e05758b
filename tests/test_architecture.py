"""The rooms are where ARCHITECTURE.md says, imports run downwards, and one room speaks to the device."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "greenroom"

# From the top to the bottom; a room may import from its own level and from those below.
LEVELS = (
    ("__main__", "cli"),
    ("serving", "generate"),
    ("engine", "demo", "testing"),
    ("loading",),
    ("api",),
    ("handle",),
    ("telemetry",),
    ("strategies",),
    ("distributed",),
    ("streaming", "topology", "estimate"),
    ("staging",),
    ("discovery", "catalog"),
    ("host", "declare", "residency"),
    ("config", "accelerator", "emulator"),
    ("memory", "frozen", "bounds", "grain"),
    ("errors",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(room, whether at the top of the module) of each import from greenroom."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "greenroom":
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("greenroom.")]
        found += [(name, id(node) in top) for name in names if name in LEVEL]
    return found


def sources() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__init__.py" or p.parent != PACKAGE]


def test_every_room_has_a_level() -> None:
    assert {room_of(p) for p in sources()} == set(LEVEL)


def test_imports_run_downwards() -> None:
    upwards = [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in sources()
        for room, _ in imports(path)
        if LEVEL[room] < LEVEL[room_of(path)]
    ]
    assert not upwards


def test_only_one_room_names_a_device() -> None:
    allowed = {"accelerator", "emulator"}
    device_api = re.compile(
        r"torch\.(cuda|xpu|npu|mps)\."
        r"|torch\.accelerator\.(?!current_accelerator|is_available)"
        r"|get_device_module|torch\.(Stream|Event)\("
        r"|\.pin_memory\(|\btorch\.\w+\((?:[^()]|\([^()]*\))*\bpin_memory="
        r"|with [^\n]*\.\w*stream:"  # see `Accelerator.on`
    )
    found = [
        f"{path.relative_to(PACKAGE)}: {match.group()}"
        for path in sources()
        if room_of(path) not in allowed | {"demo", "testing"}
        for match in device_api.finditer(path.read_text())
    ]
    assert not found


def test_the_map_names_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for room in LEVEL:
        name = f"{room}/" if (PACKAGE / room).is_dir() else f"{room}.py"
        assert re.search(rf"^  {re.escape(name)}\s", text, re.MULTILINE), name


def test_nothing_but_the_demo_and_the_command_line_needs_the_emulator() -> None:
    for path in sources():
        if room_of(path) not in {"emulator", "demo"}:
            assert ("emulator", True) not in imports(path), path
