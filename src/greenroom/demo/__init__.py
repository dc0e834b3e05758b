"""A small text-to-image pipeline that really draws: trained on handwritten digits, 14 transformer blocks, a few MB.

It is a plain diffusers ``FluxPipeline``: whatever offloads it, offloads its big sisters in the same way.
"""

from __future__ import annotations

from greenroom.demo.pictures import enlarge, sheet
from greenroom.demo.pipeline import CALL_KWARGS, checkpoint_path, load_pipeline
from greenroom.demo.reader import DigitReader
from greenroom.demo.wordings import DIGIT_WORDS, HELD_OUT, PROMPTS, SEEN, spell

__all__ = [
    "CALL_KWARGS",
    "DIGIT_WORDS",
    "HELD_OUT",
    "PROMPTS",
    "SEEN",
    "DigitReader",
    "checkpoint_path",
    "enlarge",
    "load_pipeline",
    "sheet",
    "spell",
]
