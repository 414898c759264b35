"""What the router knows: loaded models as observers see them, requests under way, limits. Pure.

Events come in as method calls (a row arrived, a process is down); questions are named as questions. Nothing here sends,
waits or looks at a clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from barrel_inference.errors import BarrelError, ModelDown, ModelFailed, NotFound, Overloaded
from barrel_inference.protocol import ChildRow, Down, ModelRow, Phase

MODEL_PREFIX = "model:"

# Incarnations that were declared down, remembered so that a late message of theirs is dropped.
_REMEMBERED_DEAD = 1024


def target_of(model_id: str) -> str:
    """The process id of a model."""
    return MODEL_PREFIX + model_id


def model_of(process_id: str) -> str | None:
    """The model id of a process id; None for a helper."""
    return process_id.removeprefix(MODEL_PREFIX) if process_id.startswith(MODEL_PREFIX) else None


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Entry:
    """One model. `is_loading`: its first start has not ended yet; `is_leaving`: an unload is under way."""

    row: ModelRow
    restarts: int = 0
    is_loading: bool = False
    is_leaving: bool = False


class Registry:
    """The models by id, each with the row that observers get."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._dead: dict[str, int] = {}

    # --- questions

    def rows(self) -> list[ModelRow]:
        """Every model, in the order they were loaded."""
        return [self._seen(entry) for entry in self._entries.values()]

    def row(self, model_id: str) -> ModelRow:
        """One model's row, or `NotFound`."""
        entry = self._entries.get(model_id)
        if entry is None:
            raise self.unknown(model_id)
        return self._seen(entry)

    def is_taken(self, model_id: str) -> bool:
        """Does the id name a model that is loaded, being loaded, or coming back?"""
        entry = self._entries.get(model_id)
        return entry is not None and entry.row.phase is not Phase.FAILED

    def is_known(self, model_id: str) -> bool:
        """Is there any row, a failed one included?"""
        return model_id in self._entries

    def is_leaving(self, model_id: str) -> bool:
        """Is it being unloaded?"""
        entry = self._entries.get(model_id)
        return entry is not None and entry.is_leaving

    def computing_models(self) -> int:
        """How many models prefill or generate now."""
        return sum(entry.row.phase in (Phase.PREFILLING, Phase.GENERATING) for entry in self._entries.values())

    def refusal(self, model_id: str) -> BarrelError:
        """Why a request for this model, whose process does not serve, is refused.

        `details["accepted"]` is False: the request was never handed to the model, so it cannot be what killed it.
        """
        entry = self._entries.get(model_id)
        if entry is None or entry.is_leaving:
            return self.unknown(model_id)
        process = target_of(model_id)
        if entry.row.phase is Phase.FAILED:
            return ModelFailed(
                f"model {model_id!r} failed: {entry.row.reason or 'it died again and again'}",
                hint="see `barrelctl doctor`, then load it again", process=process, accepted=False,
            )  # fmt: skip
        state = "is being loaded" if entry.row.phase is Phase.LOADING else "is being restarted"
        return ModelDown(
            f"model {model_id!r} {state}",
            hint="try again in a moment",
            process=process,
            accepted=False,
            restarting=True,
        )

    def unknown(self, model_id: str) -> NotFound:
        """The error for an id that names no model."""
        loaded = [name for name, entry in self._entries.items() if not entry.is_leaving]
        return NotFound(
            f"no model {model_id!r} is loaded",
            hint=f"loaded: {', '.join(loaded)}" if loaded else "load one with `barrelctl load`",
            known=loaded,
        )

    def new_id(self, number: int) -> str:
        """The first free generated id from `number` on."""
        while f"barrel_inference_model_{number}" in self._entries:
            number += 1
        return f"barrel_inference_model_{number}"

    # --- events

    def load_began(self, model_id: str, *, backend: str, context_size: int, tier: str) -> None:
        """A load was accepted."""
        row = _blank(model_id, Phase.LOADING, backend=backend, context_size=context_size, tier=tier)
        self._entries[model_id] = Entry(row, is_loading=True)

    def load_ended(self, model_id: str) -> None:
        """The process serves."""
        if (entry := self._entries.get(model_id)) is not None:
            entry.is_loading = False
            if entry.row.phase is Phase.LOADING:
                entry.row = msgspec.structs.replace(entry.row, phase=Phase.IDLE)

    def unload_began(self, model_id: str) -> None:
        """From now on it takes no requests."""
        self._entries[model_id].is_leaving = True

    def unload_failed(self, model_id: str) -> None:
        """It stays."""
        if (entry := self._entries.get(model_id)) is not None:
            entry.is_leaving = False

    def forget(self, model_id: str) -> None:
        """The model is gone: unloaded, or its load failed."""
        entry = self._entries.pop(model_id, None)
        if entry is not None and entry.row.incarnation:
            self._note_dead(model_id, entry.row.incarnation)

    def row_came(self, row: ModelRow) -> bool:
        """Take a model's own row; False if it is from an incarnation that is dead."""
        if self._dead.get(row.model_id) == row.incarnation:
            return False
        entry = self._entries.get(row.model_id)
        if entry is None:
            self._entries[row.model_id] = Entry(row)
            return True
        if row.phase is Phase.LOADING and not entry.is_loading:
            row = msgspec.structs.replace(row, phase=Phase.RESTARTING, reason=entry.row.reason)
        entry.row = row
        return True

    def up(self, model_id: str, incarnation: int) -> None:
        """Its process serves. The model's own row follows; until then it counts as idle."""
        entry = self._entries.get(model_id)
        if entry is None:
            self._entries[model_id] = Entry(_blank(model_id, Phase.IDLE, incarnation=incarnation))
        elif entry.row.phase in (Phase.LOADING, Phase.RESTARTING, Phase.FAILED):
            entry.row = msgspec.structs.replace(entry.row, phase=Phase.IDLE, incarnation=incarnation, reason=None)

    def down(self, down: Down) -> None:
        """Its process died."""
        model_id = model_of(down.id)
        if model_id is None:
            return
        self._note_dead(model_id, down.incarnation)
        entry = self._entries.get(model_id)
        if entry is None or entry.is_loading or entry.is_leaving or entry.row.incarnation > down.incarnation:
            return  # whoever asked for the load or the unload ends it; or a newer incarnation has spoken already
        entry.restarts += down.restarting
        entry.row = msgspec.structs.replace(
            entry.row, phase=Phase.RESTARTING if down.restarting else Phase.FAILED, reason=down.reason,
            pending_len=0, running=0, available_seqs=0, pinned_idle_seqs=0, tokens_per_s=0.0,
        )  # fmt: skip

    def learn(self, children: Iterable[ChildRow]) -> None:
        """Take what the supervisor says: models of which we know nothing (the router was restarted), and restarts that failed.

        `Down` is only sent of processes that served; that a restart came to nothing is in these rows alone.
        """
        found = {model_id: child for child in children if (model_id := model_of(child.id)) is not None}
        for model_id, child in found.items():
            entry = self._entries.get(model_id)
            phase = _phase_of(child)
            if entry is None:
                row = _blank(model_id, phase, incarnation=child.incarnation, reason=child.reason)
                entry = self._entries[model_id] = Entry(row, is_leaving=child.state == "stopping")
            elif phase is Phase.FAILED and not entry.is_loading:
                entry.row = msgspec.structs.replace(entry.row, phase=phase, reason=child.reason)
            entry.restarts = max(entry.restarts, child.restarts)
        for model_id, entry in list(self._entries.items()):
            if model_id not in found and entry.row.phase is Phase.RESTARTING:
                del self._entries[model_id]  # stopped while it waited for its restart

    def is_waiting(self) -> bool:
        """Is any model coming back, whose failure only the supervisor's rows would tell?"""
        return any(
            entry.row.phase in (Phase.RESTARTING, Phase.LOADING) and not entry.is_loading
            for entry in self._entries.values()
        )

    def _seen(self, entry: Entry) -> ModelRow:
        return msgspec.structs.replace(entry.row, restarts=entry.restarts)

    def _note_dead(self, model_id: str, incarnation: int) -> None:
        self._dead.pop(model_id, None)
        self._dead[model_id] = incarnation
        if len(self._dead) > _REMEMBERED_DEAD:
            del self._dead[next(iter(self._dead))]


def _phase_of(child: ChildRow) -> Phase:
    match child.state:
        case "starting":
            return Phase.RESTARTING if child.restarts else Phase.LOADING
        case "backoff":
            return Phase.RESTARTING
        case "failed":
            return Phase.FAILED
        case _:
            return Phase.IDLE


def _blank(
    model_id: str, phase: Phase, *, incarnation: int = 0, backend: str = "", context_size: int = 0, tier: str = "",
    reason: str | None = None,
) -> ModelRow:  # fmt: skip
    """A row before the model has told us about itself."""
    return ModelRow(
        model_id=model_id, incarnation=incarnation, backend=backend, phase=phase, pending_len=0, running=0,
        last_cache_hit=None, context_size=context_size, quant_type="", quant_bits=0, fingerprint=b"", tier=tier,
        n_seq_max=0, available_seqs=0, pinned_idle_seqs=0, memory_bytes={}, loaded_at=0.0, reason=reason,
    )  # fmt: skip


# --- requests -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """How many requests may be under way."""

    max_requests_per_client: int
    max_requests: int


@dataclass(frozen=True, slots=True)
class Pending:
    """One call of a client that has no answer yet."""

    client: bytes
    request_id: str
    target: str  # id of the process that has it
    tenant: str = ""
    verb: str = ""


class PendingTable:
    """The calls under way, by client and request id."""

    def __init__(self) -> None:
        self._by_client: dict[bytes, dict[str, Pending]] = {}
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def holds(self, client: bytes, request_id: str) -> bool:
        """Does this call still wait for its answer?"""
        return request_id in self._by_client.get(client, ())

    def refusal(self, client: bytes, request_id: str, limits: Limits) -> Overloaded | None:
        """Why one more call of this client is too many; None if it may come. A repeated id takes its own place."""
        if self.holds(client, request_id):
            return None
        own = len(self._by_client.get(client, ()))
        for count, limit, key in (
            (own, limits.max_requests_per_client, "max_requests_per_client"),
            (self._total, limits.max_requests, "max_requests"),
        ):
            if count >= limit:
                return Overloaded(
                    f"{count} requests are under way, limits.{key} is {limit}", hint="wait for some of them to end"
                )
        return None

    def add(self, pending: Pending) -> None:
        """A call was handed to its target."""
        self._total += not self.holds(pending.client, pending.request_id)
        self._by_client.setdefault(pending.client, {})[pending.request_id] = pending

    def remove(self, client: bytes, request_id: str) -> Pending | None:
        """A call has its answer; the value is the call, if it was there."""
        own = self._by_client.get(client, {})
        removed = own.pop(request_id, None)
        if removed is not None:
            self._total -= 1
            if not own:
                del self._by_client[client]
        return removed

    def has_target(self, target: str) -> bool:
        """Does a process have a call that it has not answered?"""
        return any(pending.target == target for own in self._by_client.values() for pending in own.values())

    def find(self, request_id: str, tenant: str) -> list[Pending]:
        """The calls of a tenant with this id, whichever of its clients made them."""
        found = [own[request_id] for own in self._by_client.values() if request_id in own]
        return [pending for pending in found if pending.tenant == tenant]

    def take_target(self, target: str) -> list[Pending]:
        """Remove and return what a dead process had."""
        return self._take(p for own in self._by_client.values() for p in own.values() if p.target == target)

    def take_client(self, client: bytes) -> list[Pending]:
        """Remove and return what a vanished client waited for."""
        return self._take(self._by_client.get(client, {}).values())

    def _take(self, found: Iterable[Pending]) -> list[Pending]:
        taken = list(found)
        for pending in taken:
            self.remove(pending.client, pending.request_id)
        return taken

    def check(self) -> None:
        """Assert the invariants."""
        assert self._total == sum(len(own) for own in self._by_client.values())
        assert all(self._by_client.values())
