"""The command line's words: whole in its help, as guides spell them, and printed as they are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from greenroom.cli import app
from ports import free_port

COMMANDS = ("demo", "generate", "plan", "serve")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option_whole_on_80_columns(name: str) -> None:
    run = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert run.exit_code == 0
    shown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*(?![\w…-])", run.output))
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options = [p for p in command.params if p.param_type_name == "option"]
    assert {o for p in options for o in (*p.opts, *p.secondary_opts)} <= shown and len(options) >= 2
    assert max(map(len, run.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dlo-no-use-allgather"], "--dlo-use-allgather = False is not accepted"),
        (["--no-dlo-use-allgather"], "--dlo-use-allgather = False is not accepted"),
        (["--dlo-use-allgather", "--tensor-parallel-size", "1"], "model = "),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size = 2 is not accepted; accepted: 1 ("),
        (["--device", "gpu"], "device: 'gpu' is not a device"),
    ],
)
def test_words_of_the_guides(words: list[str], told: str, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    line = ["serve", str(tmp_path / "no[thing]"), "--omni", "--device", "cpu", "--port", str(free_port()), *words]
    run = CliRunner().invoke(app, line)
    assert run.exit_code == 2 and f"error: {told}" in run.output, run.output
    assert "no[thing]" in run.output or told != "model = "


def test_what_to_install_is_told_with_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("greenroom.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    run = CliRunner().invoke(app, ["serve", "somewhere"])
    assert run.exit_code == 2 and "pip install 'greenroom[serve]'" in run.output


@pytest.mark.parametrize("word", ["[/red]", "[bold]", "a:cat:b", "a[0]\\"])
def test_a_wrong_word_is_told_as_it_is(word: str) -> None:
    run = CliRunner().invoke(app, ["plan", word])
    assert run.exit_code == 2 and f"model = {word!r} is not accepted" in run.output
    run = CliRunner().invoke(app, ["plan", "somewhere", f"--{word}"])
    assert run.exit_code == 2 and f"--{word}" in run.output
