"""Short words for what HTTP tests ask for."""

from __future__ import annotations

from typing import Any

from tests.unit.coordinator.running import RunningCoordinator
from tests.unit.coordinator.scripted_worker import Script

Body = dict[str, Any]
R3 = b" H I K L P Q R S T U\n\n"  # what SmolLM2-135M-Instruct makes of "A B C D E F G"


def script(coordinator: RunningCoordinator, answer: bytes | None = None, **options: Any) -> Script:
    """Change what the workers do."""
    found = coordinator.workers[0].script
    if answer is not None:
        found.answer = lambda prefill, choice: answer
    for name, value in options.items():
        setattr(found, name, value)
    return found


def complete(coordinator: RunningCoordinator, **body: Any) -> Body:
    response = coordinator.http.post("/v1/completions", json={"prompt": "hi", **body})
    assert response.status_code == 200, response.text
    found: Body = response.json()
    return found


def chat(coordinator: RunningCoordinator, **body: Any) -> Body:
    messages = [{"role": "user", "content": "Hi"}]
    response = coordinator.http.post("/v1/chat/completions", json={"messages": messages, **body})
    assert response.status_code == 200, response.text
    found: Body = response.json()
    return found


def last_prefill(coordinator: RunningCoordinator) -> Any:
    return coordinator.workers[1].prefills[-1]


def wasted(coordinator: RunningCoordinator) -> int:
    return int(coordinator.cluster()["coordinator"]["num_wasted_tokens"])
