"""Python's garbage collector, which holds up every thread of a process while it looks around."""

from __future__ import annotations

import gc


def spare_what_is_loaded() -> None:
    """To be called in a process of one's own once all is loaded that it keeps: later collections
    look at none of it. A full one looks at some 100,000 objects of libraries otherwise, for 50 to
    200 ms in which no token moves and no request is refused."""
    gc.collect()
    gc.freeze()
