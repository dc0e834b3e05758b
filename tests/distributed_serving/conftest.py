"""Two ranks behind a server, for as long as a file's tests run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs greenroom[serve]")

from served import BODY, PROMPT, Faults, planted

from greenroom import Omni
from greenroom.demo import checkpoint_path


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Ranks share the machine with each other and with other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    with planted(tmp_path_factory.mktemp("faults")) as found:
        yield found


@pytest.fixture(scope="session")
def expected(emu_module: Any) -> Any:
    """The demo's picture for a seed, drawn without offloading in this process."""
    known: dict[int, np.ndarray] = {}

    def draw(seed: int = 7) -> np.ndarray:
        if seed not in known:
            with Omni(checkpoint_path(), device="emu") as omni:
                result = omni.generate(PROMPT, {"seed": seed, "num_inference_steps": 3}, progress=False)[0]
            known[seed] = np.asarray(result.images[0])
        return known[seed]

    assert BODY["num_inference_steps"] == 3
    return draw
