"""The engine on a bare GPU image: nothing of the serving side installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_the_engine_runs_with_everything_else_blocked(tiny_llama: Path) -> None:
    script = SCRIPT.format(names=BLOCKED, model=str(tiny_llama))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert 0 <= int(done.stdout) < 260
