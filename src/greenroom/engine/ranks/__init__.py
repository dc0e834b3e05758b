"""Several ranks, each a process with an engine of its own, behind one front."""
