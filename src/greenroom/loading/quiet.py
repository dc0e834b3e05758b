"""Loading and saving without the libraries' bars and advice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps diffusers and transformers from printing progress bars and warnings; errors are still told."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    before = [(library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, (verbosity, bar) in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
            if bar:
                library.enable_progress_bar()
