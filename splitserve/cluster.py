"""A whole cluster from Python, as child processes of this one."""

from __future__ import annotations

from typing import Any, Self

from splitserve.client import AsyncClient, Client
from splitserve.errors import LaunchError
from splitserve.launch.local import local_launcher
from splitserve.settings import ServeSettings, resolve

_DEFAULTS = {"port": 0, "log_level": "warning"}  # where they differ from `serve`


class Cluster:
    """Owns a coordinator and workers on this machine, from construction until `close`.

        with Cluster("smollm2-135m", prefill=1, decode=1) as cluster:
            print(cluster.client().generate("The capital of France is", max_tokens=8).text)

    Keyword arguments are the flags of `splitserve serve`, with underscores. The HTTP port is any
    free one unless given. It works in scripts without a main guard, in notebooks, and from stdin;
    what is not closed ends with this process.
    """

    def __init__(self, model: str, **flags: Any) -> None:
        """Start everything; returns when it is ready.

        Raises ConfigError, ModelNotFoundError, or LaunchError naming the process that failed.
        """
        self.settings: ServeSettings = resolve({**_DEFAULTS, **flags, "model": model})
        self._clients: list[Client] = []
        self._launcher = local_launcher(self.settings)
        try:
            self.base_url = self._launcher.start()
        except BaseException:
            self._launcher.kill()
            self._launcher.stop()
            raise

    def client(self) -> Client:
        """A client of this cluster; closed with it."""
        client = Client(self.base_url, self._api_key)
        self._clients.append(client)
        return client

    def async_client(self) -> AsyncClient:
        """A client for the running event loop; close it yourself."""
        return AsyncClient(self.base_url, self._api_key)

    @property
    def failure(self) -> LaunchError | None:
        """Why the cluster ended by itself; None while it runs and after `close`."""
        return self._launcher.failure

    def close(self) -> None:
        """Stop everything; returns when all processes are gone. Idempotent."""
        for client in self._clients:
            client.close()
        self._launcher.stop()

    @property
    def _api_key(self) -> str | None:
        return next(iter(self.settings.api_keys), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
