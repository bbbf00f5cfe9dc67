"""`make demo`: one prefill and one decode worker on a real model, three prompts, all stopped."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from splitserve.answers import Chunk
from splitserve.client import Client
from splitserve.cluster import Cluster

MODEL = "smollm2-135m"
PROMPTS = (
    "The capital of France is",
    "1 2 3 4 5 6 7",
    "Once upon a time, in a small village by the sea,",
)
_MAX_TOKENS = 48
_MS = 1000.0
# What is shown of an answer's timing, in the order in which it happens.
_SHOWN = {
    "queue_s": "queue",
    "prefill_s": "prefill",
    "ttft_s": "first token",
    "handoff_gap_s": "hand-off",
    "kv_transfer_s": "KV transfer",
}


def main() -> None:
    console = Console(highlight=False)
    with console.status(f"starting 1 prefill and 1 decode worker on {MODEL}"):
        started = time.perf_counter()
        cluster = Cluster(MODEL, prefill=1, decode=1)
    with cluster:
        took_s = time.perf_counter() - started
        console.print(f"[green]ready at {cluster.base_url} after {took_s:.1f} s[/green]")
        client = cluster.client()
        for prompt in PROMPTS:
            _stream(console, client, prompt)
        with console.status("stopping"):
            cluster.close()
    console.print("[green]stopped; nothing is left running[/green]")


def _stream(console: Console, client: Client, prompt: str) -> None:
    """Print the prompt, the model's continuation as it comes, then where the time went."""
    console.print(f"\n[bold]prompt:[/bold] {prompt}", soft_wrap=True)
    console.print("[bold]answer:[/bold] ", end="")
    begun = False
    last = Chunk(0, "")
    sent = time.perf_counter()
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": _MAX_TOKENS, "return_timing": True}
    for chunk in client.generate(prompt, stream=True, **options):
        text = chunk.text if begun else chunk.text.lstrip()
        begun = begun or bool(text)
        print(text, end="", flush=True)
        last = chunk if chunk.usage or chunk.timing else last
    took_s = time.perf_counter() - sent
    timing = last.timing or {}
    parts = [
        f"{label} {timing[name] * _MS:.0f} ms"
        for name, label in _SHOWN.items()
        if timing.get(name) is not None
    ]
    if "num_kv_bytes" in timing:
        parts.append(f"KV {timing['num_kv_bytes'] / 2**20:.2f} MiB")
    num_tokens = last.usage.completion_tokens if last.usage else 0
    parts.append(f"{num_tokens} tokens, {num_tokens / took_s:.1f} tokens/s")
    console.print(f"\n[dim]time:   {', '.join(parts)}[/dim]", soft_wrap=True)


if __name__ == "__main__":
    main()
