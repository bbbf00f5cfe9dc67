"""Rules of the source that no linter here checks."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("splitserve", "coordinator", "prefill_worker", "decode_worker", "kv_transfer")
# Names that turn received bytes into code. Method names such as model.eval() are not among them.
FORBIDDEN = re.compile(
    r"\b(c?pickle|_pickle|cloudpickle|marshal|dill|shelve|recv_pyobj|send_pyobj)\b"
    r"|(?<![.\w])(eval|exec)\s*\("
    r"|\bweights_only\s*=\s*False\b|\byaml\.(unsafe_load|load)\s*\("
)


def code_of(text: str) -> str:
    """Python source without its comments and strings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kept = [t for t in tokens if t.type not in (tokenize.COMMENT, tokenize.STRING)]
    return "\n".join(
        " ".join(t.string for t in kept if t.start[0] == line)
        for line in sorted({t.start[0] for t in kept})
    ).replace(" . ", ".")


def source_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_there_is_source_to_look_at() -> None:
    assert len(source_files()) > 20


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_received_can_become_code(path: Path) -> None:
    """InternLM/lmdeploy#4804, vllm-project/vllm#12055: pickle on a socket runs anyone's code."""
    found = FORBIDDEN.search(code_of(path.read_text()))
    assert found is None, found


@pytest.mark.parametrize(
    "line",
    ["import pickle", "socket.recv_pyobj()", "x = eval(text)", "exec (text)", "from dill import x"],
)
def test_the_rule_sees_what_it_should(line: str) -> None:
    assert FORBIDDEN.search(code_of(line + "\n"))


@pytest.mark.parametrize("line", ["model.eval()", "retrieval(x)", "x = 'eval(y)'", "# pickle"])
def test_the_rule_leaves_the_rest_alone(line: str) -> None:
    assert not FORBIDDEN.search(code_of(line + "\n"))
