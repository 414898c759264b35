"""May a request be sent again after a process died, and with what? Pure.

A caller of a stream sees a pause, not an error: the client sends the same request id again and says what was delivered.
"""

from dataclasses import dataclass, replace

from barrel_inference.errors import BarrelError, ModelDown, ModelFailed, NoRuntime, NoSession
from barrel_inference.protocol import Complete, Resume

# A request whose model died each of these times is taken for the cause.
MAX_MODEL_DEATHS = 3

# Neither the router nor a model that computed somebody else's request died of this one; these only bound a runtime that
# keeps falling over.
MAX_CONNECTION_LOSSES = 8
MAX_BYSTANDER_DEATHS = 16


class ConnectionLost(Exception):
    """The connection to the router broke; nobody knows what became of the requests on it."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What one request has been through."""

    model_deaths: int = 0  # of a model that computed it
    connection_losses: int = 0
    bystander_deaths: int = 0  # of a model in which it waited

    @property
    def survived(self) -> int:
        """How often a dead process was survived."""
        return self.model_deaths + self.connection_losses + self.bystander_deaths


@dataclass(frozen=True, slots=True)
class Delivered:
    """What the caller has, or will get from what has arrived."""

    token_ids: tuple[int, ...] = ()
    text_bytes: int = 0
    seed: int | None = None
    span_ends: int = 0


def after(failure: BarrelError | ConnectionLost, tally: Tally, *, retry: bool) -> Tally:
    """The tally with which to send again.

    Raises:
        BarrelError: it is not to be sent again, and this is why.
    """
    if isinstance(failure, ConnectionLost):
        if not retry or tally.connection_losses >= MAX_CONNECTION_LOSSES:
            raise NoRuntime("the connection to the runtime broke before the answer came", hint="see `barrelctl status`")
        return replace(tally, connection_losses=tally.connection_losses + 1)
    if not isinstance(failure, ModelDown) or not retry:
        raise failure
    if not failure.details.get("accepted", True):
        return tally  # it was refused because the model is on its way up: no death of its own
    if not failure.details.get("computing", True):
        if tally.bystander_deaths >= MAX_BYSTANDER_DEATHS:
            raise failure
        return replace(tally, bystander_deaths=tally.bystander_deaths + 1)
    tally = replace(tally, model_deaths=tally.model_deaths + 1)
    if tally.model_deaths >= MAX_MODEL_DEATHS:
        raise ModelFailed(
            f"the model died {tally.model_deaths} times while it had this request",
            hint="the request is probably the cause; see `barrelctl doctor`", **failure.details,
        )  # fmt: skip
    return tally


def is_restartable(request: Complete) -> bool:
    """Can the request be computed anew from what the client knows? A plain continuation lives in the dead session only."""
    return request.mode != "continue" or request.expect_committed is not None


def resumed(request: Complete, delivered: Delivered, tally: Tally, *, suffix_ids: list[int] | None = None) -> Complete:
    """The request to send next.

    Args:
        suffix_ids: of a continuation, whose session died: the token ids of what it appends.

    Raises:
        NoSession: a continuation without `expect_committed`; nobody knows what it continued.
    """
    if not is_restartable(request):
        raise NoSession(
            f"session {request.session_id!r} ended with its model process",
            hint="send the whole prompt, or give expect_committed so that it can be continued",
        )
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    if request.mode == "continue":
        # Not checked against the session again: there is none. These tokens are the session.
        fields |= {
            "mode": "complete", "expect_committed": None,
            "prompt": [*(request.expect_committed or ()), *(suffix_ids or ())],
        }  # fmt: skip
    # It was admitted once: others that came back faster are no reason to refuse it now.
    fields["on_full"] = "block"
    fields["resume"] = Resume(
        attempt=tally.survived, token_ids=list(delivered.token_ids), text_bytes=delivered.text_bytes,
        seed=delivered.seed if delivered.seed is not None else request.sampling.seed, span_ends=delivered.span_ends,
        deaths=tally.model_deaths,
    )  # fmt: skip
    return Complete(**fields)
