"""CUDA graphs: what a pass launches, written down once and launched as one from then on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Run = Callable[[], Tensor]


class Graphs:
    """Owns the memory that the graphs of one device share. One of them runs at a time.

    On a device without graphs, what would be captured is run each time instead.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = self._stream = None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Run) -> Run:
        """`run`, which always works on the same tensors; what it returns is overwritten each time.

        The larger ones should come first: the others find room in their memory.
        """
        if self._stream is None:
            return run
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and sets libraries up, which a capture does not allow
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
