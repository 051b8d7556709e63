"""Captures a forward as a CUDA graph: a step then costs one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch

Forward = Callable[[], torch.Tensor]
Capture = Callable[[Forward], Forward]
"""Makes a forward over fixed buffers one that is cheaper to run again."""

_WARM_UPS = 2
"""The first run chooses kernels and compiles, and what it allocates must not enter the graph."""


class GraphCapture:
    """A Capture for one device. Its graphs share the memory of what they compute on the way; the
    output of one is overwritten when it runs again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward) -> Forward:
        with torch.cuda.device(self._device):
            self._warm_up(forward)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = forward()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def _warm_up(self, forward: Forward) -> None:
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                forward()
        current.wait_stream(side)
