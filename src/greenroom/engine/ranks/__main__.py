"""The process of a rank: `python -m greenroom.engine.ranks FD PARENT`."""

import atexit
import os
import sys

from greenroom.engine.ranks.rank import main

status = main(sys.argv[1:])
# Ranks that share weights take their leave of each other here.
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
# A thread that is stuck in a computation, or in a collective that never ends, must not keep the process.
os._exit(status)
