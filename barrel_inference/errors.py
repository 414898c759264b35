"""Everything this package raises on purpose.

BarrelError
  Refused            the request can never succeed as it stands
    InvalidArgument    `invalid_argument`    an option or a prompt is wrong; the text names it and its value
    NotFound           `not_found`           no such model, key or process
    AlreadyLoaded      `already_loaded`      the model id is taken
    BadModel           `bad_model`           the file cannot be loaded; the text has llama.cpp's own reason
    ContextOverflow    `context_overflow`    the prompt does not fit; the text has both numbers
    NoSession          `no_session`          the session was never started, or was reclaimed
    TranscriptMismatch `transcript_mismatch` `expect_committed` differs from what the session holds
    GrammarFailed      `grammar_failed`      the grammar is wrong, or nothing it allows can be sampled
    NotSupported       `not_supported`       this model or build cannot do that
    ProtocolError      `protocol_error`      the peer sent bytes that we do not accept
    ModelFailed        `model_down`          the model died again and again; it stays down until loaded anew
  Unavailable        true now, may change: the caller may retry
    StickyBusy         `sticky_busy`         the session has a request in flight
    SeqCapacity        `seq_capacity`        every sequence is in use and the caller did not want to wait
    ModelDown          `model_down`          the model process died; it is being restarted
    Overloaded         `overloaded`          a limit on requests or memory was reached
    DeadlineExceeded   `timeout`             the deadline passed
    NoRuntime          `no_runtime`          nobody answers at the endpoint
    TierUnavailable    `tier_unavailable`    a cache tier is down, full or read-only
    DecodeTimeout      `decode_timeout`      one step took longer than `decode_budget_ms`
    DecodeFailed       `decode_failed`       llama.cpp refused a step of this request
  InternalError      `internal`            a bug in this package; the process that had it has a crash report

Anything else that escapes is a bug, and is left to crash its process.
"""

from typing import Any, ClassVar


class BarrelError(Exception):
    """Base class: catch this to catch everything expected.

    `code` is stable and also on the wire; `retryable` says whether the same call may succeed later;
    `hint` says what to do; `details` are the values behind the message.
    """

    code: ClassVar[str] = "internal"
    retryable: bool = False

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} — {self.hint}" if self.hint else self.message


class Refused(BarrelError):
    """The request can never succeed as it stands."""


class InvalidArgument(Refused):
    """An option or a prompt is wrong; change it."""

    code = "invalid_argument"


class NotFound(Refused):
    """No such model, key or process; `barrelctl ps` lists what there is."""

    code = "not_found"


class AlreadyLoaded(Refused):
    """The model id is taken; unload it first, or choose another id."""

    code = "already_loaded"


class BadModel(Refused):
    """The model file cannot be loaded; the text has llama.cpp's own reason."""

    code = "bad_model"


class ContextOverflow(Refused):
    """The prompt does not fit; shorten it, or load the model with a larger `context_opts.n_ctx`."""

    code = "context_overflow"


class NoSession(Refused):
    """The session was never started, was ended, or was reclaimed; send the whole prompt."""

    code = "no_session"


class TranscriptMismatch(Refused):
    """`expect_committed` differs from what the session holds; send the whole prompt."""

    code = "transcript_mismatch"


class GrammarFailed(Refused):
    """The grammar does not compile, or allows no token at some point."""

    code = "grammar_failed"


class NotSupported(Refused):
    """This model, or this build of llama.cpp, cannot do that."""

    code = "not_supported"


class ProtocolError(Refused):
    """The peer sent bytes that we do not accept; client and runtime may differ in version."""

    code = "protocol_error"


class ModelFailed(Refused):
    """The model died again and again; look at `barrelctl doctor`, then load it anew."""

    code = "model_down"


class Unavailable(BarrelError):
    """The request was fine; the moment was not."""

    retryable = True


class StickyBusy(Unavailable):
    """The session has a request in flight; wait for it, or start another session."""

    code = "sticky_busy"


class SeqCapacity(Unavailable):
    """Every sequence is in use and the caller asked not to wait."""

    code = "seq_capacity"


class ModelDown(Unavailable):
    """The model process died while it had the request; it is being restarted."""

    code = "model_down"


class Overloaded(Unavailable):
    """A limit on requests or memory was reached; send less at once."""

    code = "overloaded"


class DeadlineExceeded(Unavailable):
    """The deadline passed before an answer came."""

    code = "timeout"


class NoRuntime(Unavailable):
    """Nobody answers at the endpoint; start a runtime with `barrelctl start`."""

    code = "no_runtime"


class TierUnavailable(Unavailable):
    """A cache tier is down, full or read-only."""

    code = "tier_unavailable"


class DecodeTimeout(Unavailable):
    """One step took longer than `context_opts.decode_budget_ms`."""

    code = "decode_timeout"


class DecodeFailed(Unavailable):
    """llama.cpp refused a step of this request."""

    code = "decode_failed"


class InternalError(BarrelError):
    """A bug in this package; the process that had it wrote a crash report (`barrelctl doctor`)."""

    code = "internal"


_BY_CODE: dict[str, type[BarrelError]] = {
    error.code: error
    for error in (
        InvalidArgument, NotFound, AlreadyLoaded, BadModel, ContextOverflow, NoSession, TranscriptMismatch,
        GrammarFailed, NotSupported, ProtocolError, StickyBusy, SeqCapacity, ModelDown, Overloaded,
        DeadlineExceeded, NoRuntime, TierUnavailable, DecodeTimeout, DecodeFailed, InternalError,
    )
}  # fmt: skip


def from_wire(
    code: str, message: str, *, hint: str | None = None, retryable: bool = False, details: dict[str, Any] | None = None
) -> BarrelError:
    """The exception for what a peer reported; a code of a newer version becomes an `InternalError` that names it."""
    cls = _BY_CODE.get(code)
    if cls is None:
        return InternalError(f"{code}: {message}", hint=hint, **(details or {}))
    if cls is ModelDown and not retryable:
        cls = ModelFailed
    return cls(message, hint=hint, **(details or {}))
