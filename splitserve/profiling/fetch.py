"""Asking a running cluster for a profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from splitserve.answers import error_from
from splitserve.calls import Address
from splitserve.errors import StreamBrokenError, UnavailableError
from splitserve.streams import failure_of, http_options

_PATH = "/cluster/profile"
_SLACK_S = 30.0  # beyond the duration; an idle cluster is silent all the while


@contextmanager
def profile_stream(
    address: Address, duration_s: float, num_kernel_steps: int = 0
) -> Iterator[Iterator[bytes]]:
    """The bytes of a profile that begins now. Leaving early ends it.

    Raises UnavailableError when nothing answers or a server knows no profiles, else what
    splitserve.answers makes of an HTTP error; while iterating StreamBrokenError.
    """
    body: dict[str, float] = {"duration_s": duration_s}
    if num_kernel_steps:
        body["num_kernel_steps"] = num_kernel_steps
    with httpx.Client(**http_options(address, duration_s + _SLACK_S)) as http:
        request = http.build_request("POST", _PATH, json=body)
        try:
            response = http.send(request, stream=True)
            if response.is_error:
                response.read()
        except httpx.TransportError as error:
            raise failure_of(address, error) from error
        try:
            if response.status_code in (404, 405):
                raise UnavailableError(
                    f"{address.base_url} has no {_PATH}: it is no splitserve, or an older one"
                )
            if response.is_error:
                raise error_from(response.status_code, response.content, response.headers)
            yield _chunks(response)
        finally:
            response.close()


def _chunks(response: httpx.Response) -> Iterator[bytes]:
    try:
        yield from response.iter_bytes()
    except httpx.TransportError as error:
        raise StreamBrokenError(f"the profile was cut off by {error!r}") from error
