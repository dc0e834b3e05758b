"""Ranks that share the weights of a pipeline: what to call, and what happens by itself.

Every rank calls `greenroom.offload` (or starts an `Omni`) with the same words on its own copy of the same pipeline,
after `torch.distributed.init_process_group`. That is the only call that the ranks make together. It returns on every
rank or raises on every rank: `RanksError` where they disagree, where one of them raised, or where one did not come
within `timeout()` seconds.

From then on a rank runs what it likes, when it likes, from any one thread at a time: `pipe(...)` with other steps,
guidance and shapes than the others, or nothing at all. Weights that are gathered are gathered in *passes*: one pass
brings the streamed blocks of one component by, in order, on every rank. A thread of each rank takes part in the
passes that other ranks ask for while this one computes something else, is between two calls or has nothing to do. So
there are no waves to form, nothing has to be called by an idle rank, and a request that ends early, raises or is
cancelled leaves the others in step. Ranks that want the same component at about the same time share a pass.

The passes end when every rank has called `handle.disable()` or is about to exit. A rank that disables first (or whose
process reaches its end first) goes on taking part, in the background, until the others have too.

    handle = greenroom.offload(pipe, {"mode": "layer", "layer_options": {"dit": {"weight_transfer": "allgather"}}})
    handle.ranks            # Standing: rank, size, whether all is well; None for an offload without ranks
    handle.ranks.broken     # None, or why no gathered component runs any more: "rank 1 is gone: ..."

A rank that dies is noticed within `HEARTBEAT` seconds or so while the ranks are idle, and at the latest after
`timeout()` seconds otherwise. The gathered components then raise `RanksError` on every rank that is left; all else
goes on working, `handle.disable()` included, and `greenroom.offload` may be called anew in a new process group.
"""

from greenroom.distributed.errors import RanksError
from greenroom.distributed.ranks import HEARTBEAT, Ranks, Standing, agree, gather_ranks, is_distributed, timeout

__all__ = ["HEARTBEAT", "Ranks", "RanksError", "Standing", "agree", "gather_ranks", "is_distributed", "timeout"]
