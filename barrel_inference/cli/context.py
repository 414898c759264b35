"""What commands share: the endpoint, a client, and better hints for misspelt names."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from barrel_inference.cli.failure import suggest
from barrel_inference.errors import NotFound

if TYPE_CHECKING:
    from barrel_inference.client import Client

# Set once by the application's callback: `--endpoint`.
endpoint: str | None = None


def set_endpoint(given: str | None) -> None:
    """Talk to this runtime instead of the default one."""
    global endpoint
    endpoint = given


@contextlib.contextmanager
def connected(*, timeout_s: float | None = None) -> Iterator["Client"]:
    """A client of the runtime; names that are close to a misspelt one are suggested."""
    # Here, so that --help and usage errors do not wait for ZeroMQ and asyncio.
    from barrel_inference.client import Client

    with Client(endpoint, timeout_s=timeout_s) as client:
        try:
            yield client
        except NotFound as missing:
            known = missing.details.get("known")
            quoted = missing.message.split("'")
            if known and len(quoted) > 1 and (hint := suggest(quoted[1], list(known))):
                missing.hint = hint
            raise


def runtime_dir() -> Path:
    """The directory of the runtime's sockets."""
    from barrel_inference.link import endpoint_of  # as above

    return Path(endpoint_of(endpoint).removeprefix("ipc://")).parent
