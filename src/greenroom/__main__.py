"""`python -m greenroom`: the command line where no script is on the path."""

from __future__ import annotations

from greenroom.cli import app

if __name__ == "__main__":
    app(prog_name="python -m greenroom")
