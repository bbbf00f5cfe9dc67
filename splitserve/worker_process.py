"""What both worker roles do between the start of their process and the start of their loop."""

from __future__ import annotations

import gc
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from splitserve.config import ROLE_CONFIG_ENV, EngineConfig, WorkerConfig, from_json
from splitserve.engine.ceilings import Achieved, ceilings, keep_achieved
from splitserve.engine.kv_cache import DTYPES
from splitserve.engine.model_runner import ModelRunner
from splitserve.errors import SplitserveError
from splitserve.logs import set_up_logging
from splitserve.models import fingerprint
from splitserve.process import die_with_parent
from splitserve.profiling.recorder import Recorder
from splitserve.wire import messages as m
from splitserve.work import Ceilings

log = logging.getLogger(__name__)


def run_role(serve: Callable[[WorkerConfig, str], None]) -> int:
    """Read this process's config, call `serve(config, worker_id)`, return the exit code.

    `worker_id` is new with each process. What users and peers cause ends in one log line.
    """
    config = from_json(WorkerConfig, os.environ[ROLE_CONFIG_ENV])
    worker_id = f"{config.launch_id}-{secrets.token_hex(4)}"
    set_up_logging(worker_id, config.log_level)
    die_with_parent(config.parent_pid)
    try:
        serve(config, worker_id)
    except SplitserveError as error:
        log.error("%s", error)
        return 1
    log.info("stopped")
    return 0


def load_runner(config: WorkerConfig) -> ModelRunner:
    """The model, after a real forward pass: whoever has it is ready."""
    runner = ModelRunner.load(config.engine, config.device)
    runner.warm_up()
    # What is here now stays to the end. Left out of garbage collection, it costs neither pauses
    # between steps nor most of a second when the process ends.
    gc.collect()
    gc.freeze()
    return runner


def make_recorder(runner: ModelRunner) -> Recorder:
    """The worker's stopwatch. What this machine can do is measured, and remembered."""
    weight_bytes = runner.work_model.weight_bytes
    machine = DTYPES[runner.config.dtype], runner.num_threads, str(runner.device)
    roofs = ceilings(*machine)

    def keep(roofs: Ceilings) -> None:
        keep_achieved(roofs, *machine)

    achieved = Achieved(roofs, weight_bytes, keep)
    return Recorder(roofs, weight_bytes, on_raised=achieved.raised)


def facts_of(
    config: WorkerConfig, runner: ModelRunner, recorder: Recorder, num_cores: int = 0
) -> m.WorkerFacts:
    """What Hello says about this worker. `num_cores` are the host's: it may be pinned to fewer."""
    return m.WorkerFacts(
        num_blocks=runner.num_blocks,
        max_num_seqs=runner.config.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        max_model_len=runner.max_model_len,
        layout=runner.layout,
        fingerprint=fingerprint(Path(config.engine.model)),
        num_threads=runner.num_threads,
        device=config.device,
        ceilings=recorder.ceilings,
        weight_bytes=recorder.weight_bytes,
        transport=config.transport,
        num_cores=num_cores,
        weight_bytes_per_number=_weight_bytes_per_number(runner.config),
    )


def _weight_bytes_per_number(config: EngineConfig) -> int:
    return 1 if config.quantization == "int8" else DTYPES[config.dtype].itemsize
