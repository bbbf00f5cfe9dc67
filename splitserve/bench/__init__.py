"""Load for any OpenAI-compatible server, and what its users would have felt."""

from __future__ import annotations

from collections.abc import Callable

from splitserve.bench.report import Report as Report
from splitserve.bench.report import analyze
from splitserve.bench.run import Run as Run
from splitserve.bench.run import run_load
from splitserve.bench.workloads import WORKLOADS as WORKLOADS
from splitserve.bench.workloads import BenchSpec as BenchSpec
from splitserve.bench.workloads import MixedSpec as MixedSpec
from splitserve.bench.workloads import Spec as Spec
from splitserve.bench.workloads import make_prompts as make_prompts
from splitserve.bench.workloads import request_body as request_body


async def run_bench(
    spec: Spec,
    base_url: str,
    model: str,
    api_key: str | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Report:
    """Send everything; returns when the last answer is in. Failed requests are counted by cause."""
    return analyze(await run_load(spec, base_url, model, api_key, on_done))
