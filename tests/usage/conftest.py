from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parents[1] / "core", Path(__file__).parent):
    sys.path.insert(0, str(folder))
