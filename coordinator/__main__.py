"""python -m coordinator: configured by SPLITSERVE_ROLE_CONFIG, reports on SPLITSERVE_READY_FD."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys

from coordinator.server import Server
from splitserve.config import READY_FD_ENV, ROLE_CONFIG_ENV, CoordinatorConfig, from_json
from splitserve.errors import ConfigError, SplitserveError
from splitserve.logs import set_up_logging
from splitserve.process import allow_many_files, die_with_parent

log = logging.getLogger("coordinator")


def main() -> int:
    """The exit code: 0 after SIGTERM, 1 with one line in the log for what users can cause."""
    set_up_logging("coordinator")
    try:
        config = _config()
        set_up_logging("coordinator", config.log_level)
        die_with_parent(config.parent_pid)
        allow_many_files()
        asyncio.run(_serve(config, os.environ.get(READY_FD_ENV)))
    except SplitserveError as error:
        log.error("%s", error)
        return 1
    log.info("stopped")
    return 0


def _config() -> CoordinatorConfig:
    text = os.environ.get(ROLE_CONFIG_ENV)
    if text is None:
        raise ConfigError(f"{ROLE_CONFIG_ENV} is not set; `splitserve serve` starts this process")
    return from_json(CoordinatorConfig, text)


async def _serve(config: CoordinatorConfig, ready_fd: str | None) -> None:
    server = Server(config, None if ready_fd is None else int(ready_fd))
    gc.freeze()  # what is here stays: a collection need not look at it again and again
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    await server.run()


if __name__ == "__main__":
    sys.exit(main())
