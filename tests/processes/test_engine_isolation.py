"""The engine on a bare GPU image, and what a worker loads before it is ready."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.config import EngineConfig, Role, WorkerConfig, to_json

SCRIPT = """
import sys

BLOCKED = {names}

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
for name in BLOCKED:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{{name}} is not blocked")

from splitserve.config import EngineConfig
from splitserve.engine.batch import Chunk, SampleRow
from splitserve.engine.model_runner import ModelRunner
from splitserve.request import Sampling

runner = ModelRunner.load(EngineConfig({model!r}, dtype="float32", num_blocks=4, num_threads=1))
runner.warm_up()
row = SampleRow(Sampling(max_tokens=1), 0, 0, 3, [1, 2, 3])
print(runner.step([Chunk([1, 2, 3], 0, 3, [2], (row,))])[0][0].token_id)
loaded = {{name.split(".")[0] for name in sys.modules}}
own = {{name for name in sys.modules if name.startswith(("splitserve.wire", "kv_transfer"))}}
assert not loaded & set(BLOCKED) and not own, (loaded & set(BLOCKED), own)
"""
BLOCKED = (
    "zmq msgpack fastapi pydantic gguf ray typer rich httpx xxhash uvicorn prometheus_client"
).split()


START = """
import sys
from {role}.__main__ import facts_of, load_runner, make_recorder
from splitserve.config import WorkerConfig, from_json

config = from_json(WorkerConfig, sys.argv[1])
runner = load_runner(config)
facts = facts_of(config, runner, make_recorder(runner))
slow = {names} & {{name.split(".")[0] for name in sys.modules}}
assert facts.num_blocks == 4 and not slow, slow
"""
# Over a second of CPU between them, and a worker that died is back that much later.
SLOW = {"transformers", "tokenizers", "huggingface_hub", "sympy", "networkx"}


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_runs_with_everything_else_blocked(model: Path) -> None:
    script = SCRIPT.format(names=BLOCKED, model=str(model))
    assert 0 <= int(run(script)) < 260


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_ready_without_transformers(role: Role, model: Path) -> None:
    engine = EngineConfig(str(model), dtype="float32", num_blocks=4, num_threads=1)
    config = to_json(WorkerConfig(role, engine, "tcp://127.0.0.1:1", "launch"))
    run(START.format(role=f"{role}_worker", names=SLOW), config)
