"""Asking a running cluster for a profile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from splitserve.answers import error_from
from splitserve.calls import Address
from splitserve.errors import ConfigError, StreamBrokenError, UnavailableError
from splitserve.streams import failure_of, http_options

_PATH = "/cluster/profile"
_SILENCE_S = 30.0  # beyond the duration; an idle cluster is silent all the while
_LATEST_S = 90.0  # beyond the duration; a cluster gives up sooner
_MAX_ERROR_BYTES = 64 << 10


@contextmanager
def profile_stream(
    address: Address, duration_s: float, num_kernel_steps: int = 0
) -> Iterator[Iterator[bytes]]:
    """The bytes of a profile that begins now. Leaving early ends it.

    Raises ConfigError for what is no URL, UnavailableError when nothing answers or a server knows
    no profiles, else what splitserve.answers makes of an HTTP error; while iterating
    StreamBrokenError, also when it does not end.
    """
    deadline = time.monotonic() + duration_s + _LATEST_S
    body: dict[str, float] = {"duration_s": duration_s}
    if num_kernel_steps:
        body["num_kernel_steps"] = num_kernel_steps
    with _client(address, duration_s + _SILENCE_S) as http:
        request = http.build_request("POST", _PATH, json=body)
        try:
            response = http.send(request, stream=True)
        except httpx.TransportError as error:
            raise failure_of(address, error) from error
        try:
            if response.status_code in (404, 405):
                raise UnavailableError(
                    f"{address.base_url} has no {_PATH}: it is no splitserve, or an older one"
                )
            if response.is_error:
                said = _beginning(_chunks(response, deadline))
                raise error_from(response.status_code, said, response.headers)
            yield _chunks(response, deadline)
        finally:
            response.close()


def _client(address: Address, timeout_s: float) -> httpx.Client:
    try:
        return httpx.Client(**http_options(address, timeout_s))
    except httpx.InvalidURL as error:
        raise ConfigError(f"{address.base_url!r} is no URL: {error}") from error


def _chunks(response: httpx.Response, deadline: float) -> Iterator[bytes]:
    try:
        for chunk in response.iter_bytes():
            yield chunk
            if time.monotonic() > deadline:
                raise StreamBrokenError("the profile goes on long after its end")
    except httpx.RequestError as error:
        raise StreamBrokenError(f"the profile was cut off by {error!r}") from error


def _beginning(chunks: Iterator[bytes]) -> bytes:
    """All that an error may say; a server that is not ours may say more, without an end."""
    said = b""
    for chunk in chunks:
        said += chunk
        if len(said) > _MAX_ERROR_BYTES:
            break
    return said
