"""Loading and unloading for the router: check the options, ask the supervisor, tell the caller how far it is.

The supervisor alone starts processes; this turns a client's options into a child specification and its outcome into the
registry's rows.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from barrel_inference import codec, protocol
from barrel_inference.actor import Actor, Request
from barrel_inference.errors import AlreadyLoaded, BarrelError, InvalidArgument, NotFound, Overloaded
from barrel_inference.protocol import ChildSpec, Loaded, LoadModel, LoadProgress, Ok
from barrel_inference.supervisor.spec import MODEL_ENVIRONMENT
from barrel_inference.transport import Unreachable, ipc_endpoint
from barrel_inference.workers.model import model_path, options
from barrel_inference.workers.model.memory_room import room_for
from barrel_inference.workers.model.options import LoadOptions
from barrel_inference.workers.registry import Registry, target_of

MODEL_MODULE = "barrel_inference.workers.model.process"

# Besides the shutdown save, a stopping model ends its streams and frees the context.
SHUTDOWN_MARGIN_MS = 5000

# The id is also the name of a socket.
_ID = re.compile(r"[\w.:+-]{1,180}", re.ASCII)

# A caller of load_model is told of progress in steps of this size: fewer events than the credit it grants.
PROGRESS_STEP = 0.04


@dataclass(slots=True)
class _Load:
    """One load under way and who waits for it."""

    request: Request
    told: float = -1.0


class Loader:
    """Answers `load_model` and `unload`."""

    def __init__(self, actor: Actor, registry: Registry, is_busy: Callable[[str], bool]) -> None:
        self.actor = actor
        self._is_busy = is_busy  # has a process, by its id, a request that it has not answered?
        self.registry = registry
        self.settings: dict[str, Any] = actor.boot.settings
        self._loads: dict[str, _Load] = {}
        self._generated = 0
        actor.on(LoadModel, self.load)
        actor.on(protocol.Unload, self.unload)

    # --- load

    async def load(self, message: LoadModel, request: Request) -> Loaded:
        """Start a model process; returns when it serves."""
        name, given, parsed = self._checked(message)
        if message.dry_run:
            return Loaded(model_id=name, estimate=await asyncio.to_thread(_estimate, parsed))
        self._loads[name] = _Load(request)
        try:
            await self._start(name, self._spec(name, given, force=message.force), parsed)
        finally:
            self._loads.pop(name, None)
        return Loaded(model_id=name)

    def _checked(self, message: LoadModel) -> tuple[str, dict[str, Any], LoadOptions]:
        given, parsed = self._parse(message.options)
        configured = message.options.get("model_path")
        self.check_roots(configured, message.options.get("adapters") or [])
        name = message.model_id
        if name is None and self._is_configured(configured):
            name = str(configured)
        if name is None:
            self._generated += 1
            name = self.registry.new_id(self._generated)
        self._check_id(name)
        return name, given, parsed

    def check_roots(self, path: object, adapters: list[tuple[str, float]]) -> None:
        """Raise if a caller names a file outside `limits.model_roots`; what the configuration names may lie anywhere."""
        named = [model_path.from_text(adapter_path) for adapter_path, _scale in adapters]
        if isinstance(path, str) and not self._is_configured(path) and not path.startswith("pkg:"):
            first = Path(os.path.abspath(model_path.from_text(path)))  # as it will be loaded
            named += [str(first.parent / part) for part in model_path.part_names(first.name)]
        if outside := outside_roots(named, self.settings["limits"].get("model_roots", [])):
            raise InvalidArgument(
                f"{outside[0]!r} is in none of limits.model_roots", hint="move it there, or name it in [models]"
            )

    def _is_configured(self, path: object) -> bool:
        return isinstance(path, str) and path in self.settings.get("models", {})

    def _parse(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], LoadOptions]:
        """The options as they go to the model process, and checked. A bare name of `[models]` brings that table's options."""
        path = given.get("model_path")
        if self._is_configured(path):
            table = {key: value for key, value in self.settings["models"][path].items() if key != "autoload"}
            given = {**table, **{key: value for key, value in given.items() if key != "model_path"}}
        plain = {key: value.hex() if isinstance(value, bytes) else value for key, value in given.items()}
        parsed = options.parse(plain, self.settings)
        if parsed.backend != "stub":
            self._check_name(parsed.model_path)
            plain["model_path"] = model_path.as_text(os.path.abspath(model_path.resolve(parsed.model_path)))
        return plain, parsed

    def _check_name(self, path: str) -> None:
        """A path from another working directory is of no use here: what is not absolute has to be a name we know."""
        if not os.path.isabs(path) and not path.startswith(("pkg:", "file:///")):
            names = sorted(self.settings.get("models", {}))
            raise NotFound(
                f"no model {path!r}: it is neither a file nor a name from [models]",
                hint=f"[models] has {', '.join(names)}" if names else "give the path of a GGUF file",
                known=names,
            )

    def _check_id(self, model_id: str) -> None:
        if not _ID.fullmatch(model_id):
            raise InvalidArgument(
                f"model_id = {model_id!r} cannot name a process", hint="use letters, digits and any of . _ : + -",
                key="model_id",
            )  # fmt: skip
        try:
            ipc_endpoint(self.actor.runtime_dir / f"{target_of(model_id)}.arena")
        except InvalidArgument as long:
            raise InvalidArgument(
                f"model_id = {model_id!r} is too long: {long.message}", hint="use a shorter one", key="model_id"
            ) from None
        if self.registry.is_leaving(model_id):
            raise AlreadyLoaded(f"model {model_id!r} is being unloaded", hint="wait until that is done")
        if self.registry.is_taken(model_id):
            raise AlreadyLoaded(f"model {model_id!r} is loaded already", hint="unload it first, or choose another id")

    async def _start(self, name: str, spec: ChildSpec, parsed: LoadOptions) -> None:
        has_failed = self.registry.is_known(name)
        self.registry.load_began(
            name, backend=parsed.backend, context_size=parsed.context.n_ctx, tier=parsed.tier.value
        )
        try:
            if parsed.backend != "stub":  # what is no model file is refused before a process is started for it
                await asyncio.to_thread(model_path.files_of, model_path.resolve(parsed.model_path))
            if has_failed:  # its specification makes room for the new one
                await self._stop_child(name)
            await self.actor.supervisor.call(
                protocol.StartChild(spec=spec), Ok,
                on_event=lambda _kind, body: self._progress(name, codec.decode(body, LoadProgress)),
            )  # fmt: skip
        except BarrelError:
            await self._stop_child(name)
            self.registry.forget(name)
            raise
        self.registry.load_ended(name)

    def _spec(self, name: str, given: dict[str, Any], *, force: bool) -> ChildSpec:
        return ChildSpec(
            id=target_of(name), module=MODEL_MODULE, boot={"model_id": name, "options": given, "force": force},
            restart="transient",
            shutdown_ms=self.settings["cache"]["evict_save_timeout_ms"] + SHUTDOWN_MARGIN_MS,
            ready_ms=0,  # a large model on a slow disk takes as long as it takes; whoever waits can cancel
            group="model", environment=MODEL_ENVIRONMENT,
        )  # fmt: skip

    def _progress(self, name: str, message: LoadProgress) -> None:
        load = self._loads.get(name)
        if load is None or not load.request.credit:
            return
        if message.fraction < 1.0 and message.fraction - load.told < PROGRESS_STEP:
            return
        load.told = message.fraction
        with contextlib.suppress(Unreachable):  # the caller went away; the model is loaded all the same
            load.request.event("load_progress", message)

    def cancel(self, request_id: str) -> None:
        """Give up the load that this request asked for, if there is one."""
        for name, load in self._loads.items():
            if load.request.id == request_id:
                self.actor.spawn(self._stop_child(name))

    # --- unload

    async def unload(self, message: protocol.Unload, _request: Request) -> Ok:
        """Stop a model's process; returns when its shutdown save is done and it is gone."""
        name = message.model_id
        if not self.registry.is_known(name) or self.registry.is_leaving(name):
            raise self.registry.unknown(name)
        if message.if_idle and self._is_busy(target_of(name)):
            raise Overloaded(f"model {name!r} has requests under way", hint="try again when they have ended")
        self.registry.unload_began(name)
        try:
            await self.actor.supervisor.call(protocol.StopChild(id=target_of(name)), Ok)
        except NotFound:
            pass  # gone already, which is what was asked for
        except BarrelError:
            self.registry.unload_failed(name)
            raise
        self.registry.forget(name)
        return Ok()

    async def _stop_child(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            await self.actor.supervisor.call(protocol.StopChild(id=target_of(name)), Ok)


def outside_roots(paths: list[str], roots: list[str]) -> list[str]:
    """Those of `paths` that lead, links followed, out of all `roots`; without roots none does."""
    allowed = [Path(os.path.realpath(root)) for root in roots]
    return [
        path for path in paths if roots and not any(Path(os.path.realpath(path)).is_relative_to(a) for a in allowed)
    ]


def _estimate(parsed: LoadOptions) -> dict[str, int]:
    """Bytes by the names of `ModelInfo.memory_bytes`, and what is needed and left."""
    room = room_for(parsed)
    return {**room.estimate.as_dict(), "needed": room.needed, "available": room.available}
