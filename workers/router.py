"""The front door: clients connect here, and observers get their answers here without touching a model.

Run as `python -P -m barrel_inference.workers.router router`. Restart: always. While it is down nobody gets in: clients see
their connection break, wait, and send again; models end the requests that came through it. It keeps nothing on disk: after
a restart the supervisor says which processes there are, and the models send their rows again.

A client's message is [target, header, body]. The router reads the header, checks that this target takes this verb from
clients, and hands header and body on unopened. The answer comes back with the `Route` that was sent along.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from barrel_inference import codec, curve, protocol
from barrel_inference.actor import Actor, Peer, Request, run
from barrel_inference.curve import Gatekeeper
from barrel_inference.errors import BarrelError, ModelDown, ModelFailed, NotFound, NotSupported, ProtocolError
from barrel_inference.protocol import Down, Gone, Header, Kind, ModelRow, Route, ThreadShare
from barrel_inference.transport import Frames, Unreachable, open_to_group
from barrel_inference.workers import blackbox
from barrel_inference.workers.loading import Loader
from barrel_inference.workers.observing import Observers
from barrel_inference.workers.registry import Limits, Pending, PendingTable, Registry, model_of

if TYPE_CHECKING:
    from barrel_inference.workers.metrics import Metrics

# What other processes may send to the router; a client cannot pose as the supervisor by leaving its target empty.
PEER_VERBS = frozenset({"model_row", "load_progress", "request_ended"}) | protocol.CLIENT_VERBS["router"]

TREE_DEADLINE_S = 2.0

# Requests whose way through the processes can be followed by their id in the logs; the rest is over in a moment.
LOGGED_VERBS = frozenset({"complete"})

# How often the supervisor is asked about a model that is coming back.
LEARN_S = 0.3

# This user and root. Others come in through the socket of a group, named by their UID, or over TCP, named by their key.
LOCAL = ""

# What a tenant may ask: its own requests. Loading, evicting, and looking at what others do are for this user.
REMOTE_VERBS = {
    "router": frozenset({"greet", "models", "cancel"}),
    "model": protocol.CLIENT_VERBS["model"] - {"set_adapters"},
}


class ClientRequest(Request):
    """A request whose sender's tenant is known."""

    __slots__ = ("tenant",)

    def __init__(self, actor: Actor, peer: bytes, header: Header, tenant: str) -> None:
        super().__init__(actor, peer, b"", header)
        self.tenant = tenant


class Router:
    """Frames in, frames out; the registry and the pending table say where to."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.pending = PendingTable()
        self.registry = Registry()
        self.loader = Loader(actor, self.registry, self.pending.has_target)
        self.observers = Observers(actor, self.registry)
        self._computing = 1  # models that share the cores
        self._uncounted_restarts = 0
        self._metrics: Metrics | None = None
        self._gatekeeper: Gatekeeper | None = None  # set: we listen on TCP too, and each message says who sent it
        self._boxes: dict[str, blackbox.Reading] = {}  # of the models that serve
        self._helpers: set[str] = set()  # processes that this runtime has, whether they serve now or not
        # What clients send before the registry knows which models there are; answered as soon as it does.
        self._early: list[tuple[Frames, str]] | None = []
        actor.routed_handler = self._on_frames
        actor.on_up(self._up)
        actor.on_down(self._down)
        actor.on_reconfigured(self._read_clients)
        actor.on(protocol.Greet, self._greet)
        actor.on(ModelRow, self._row)
        actor.on(protocol.Counted, self._counted)
        actor.on(protocol.Cancel, self._cancel)

    async def serve(self, _actor: Actor) -> dict[str, Any]:
        """Learn from the supervisor which models there are; it matters after a restart of the router."""
        own = [child for child in await self._learn() if child.id == self.actor.id]
        self._uncounted_restarts = sum(child.restarts > 0 for child in own)  # this start is one, if it is not the first
        self.actor.every(LEARN_S, self._learn_if_waiting)
        self._open_doors(self.actor.boot.settings["runtime"])
        if listen := self.actor.boot.settings["metrics"]["listen"]:
            await self._open_metrics(listen)
        early, self._early = self._early or [], None
        for frames, tenant in early:
            self._on_message(frames, tenant)
        return {}

    def _open_doors(self, runtime: dict[str, str]) -> None:
        if group := runtime.get("socket_group"):
            self.actor.server.tell_users()
            open_to_group(self.actor.runtime_dir / self.actor.id, group)
        if not runtime.get("tcp"):
            return
        directory = Path(runtime["curve"])
        keys = curve.server_keys(directory)
        self._gatekeeper = Gatekeeper(self.actor.context, curve.tenants(directory))
        self.actor.server.bind_curve(runtime["tcp"], public=keys.public, secret=keys.secret, domain=curve.DOMAIN)

    def _read_clients(self) -> None:
        """A reload also takes up which keys may come in; with one that cannot be read the old list stays."""
        if self._gatekeeper is None:
            return
        try:
            self._gatekeeper.admit(curve.tenants(Path(self.actor.boot.settings["runtime"]["curve"])))
        except BarrelError as bad:
            self.actor.log.error("clients.unreadable", reason=str(bad))

    async def _open_metrics(self, listen: str) -> None:
        from barrel_inference.workers.metrics import Figures, Metrics  # here: off by default, and then not paid for

        async def look() -> Figures:
            status, counters = await asyncio.gather(self.observers.look(), self.observers.counters())
            return Figures(status, counters)

        self._metrics = Metrics(look)
        await self._metrics.open(listen)
        self.observers.on_ended = self._metrics.requests.ended

    async def drain(self, _actor: Actor) -> None:
        """Leave nothing behind."""
        if self._metrics is not None:
            await self._metrics.close()

    async def _learn(self) -> list[protocol.ChildRow]:
        try:
            tree = await self.actor.supervisor.call(
                protocol.TreeStatus(), protocol.TreeRows, deadline_s=TREE_DEADLINE_S
            )
        except BarrelError as unknown:
            self.actor.log.warning("router.tree_unknown", reason=str(unknown))
        else:
            self.registry.learn(tree.children)
            self._helpers |= {child.id for child in tree.children}
            return tree.children
        return []

    def _learn_if_waiting(self) -> None:
        if self.registry.is_waiting():
            self.actor.spawn(self._learn())

    # --- from clients and peers

    def _on_frames(self, frames: Frames) -> None:
        if not self.actor.server.tells_users:
            self._on_message(frames, LOCAL)
        else:
            *frames, tenant = frames
            self._on_message(frames, tenant.decode())

    def _on_message(self, frames: Frames, tenant: str) -> None:
        if len(frames) != 4:
            self.actor.rejected(f"{len(frames)} frames instead of 4")
            return
        sender, target, raw_header, body = frames
        if target and self._early is not None:
            self._early.append((frames, tenant))
            return
        try:
            header = codec.decode_header(raw_header)
            if header.kind not in (Kind.CALL, Kind.CAST):
                raise ProtocolError(f"unexpected {header.kind}")
            if header.kind is Kind.CALL and not header.request_id:
                raise ProtocolError("a call without a request id")
        except ProtocolError as bad:
            self.actor.rejected(f"{bad}")
            if request_id := codec.request_id_of(raw_header):
                self._answer_error(sender, request_id, bad)
            return
        request = ClientRequest(self.actor, sender, header, tenant)
        try:
            self._route(target, request, header, raw_header, body)
        except ProtocolError as bad:
            self.actor.rejected(f"{bad}")
            request.error(bad)
        except BarrelError as refused:
            request.error(refused)

    def _route(self, target: bytes, request: ClientRequest, header: Header, raw_header: bytes, body: bytes) -> None:
        """Hand a message to who answers it, or raise why nobody does."""
        if not target:
            if header.verb not in PEER_VERBS or request.tenant:
                raise ProtocolError(f"the router does not take {header.verb!r}")
            self.actor.dispatch(request, header, body)
            return
        process_id = target.decode("utf-8", "replace")
        group = "model" if model_of(process_id) is not None else process_id
        if group not in protocol.CLIENT_VERBS:
            raise NotFound(f"no process {process_id[:200]!r} takes requests from clients")
        if header.verb not in protocol.CALLS and header.verb not in protocol.CASTS:
            raise ProtocolError(f"unknown verb {header.verb[:100]!r}")
        if header.verb not in protocol.CLIENT_VERBS[group]:
            raise NotSupported(f"{process_id[:200]} does not take {header.verb!r} from clients")
        if request.tenant and header.verb not in REMOTE_VERBS.get(group, ()):
            raise NotSupported(f"{header.verb!r} is for the user who runs this runtime", hint="ask as that user")
        if header.verb == "set_adapters":
            self.loader.check_roots(None, codec.decode(body, protocol.SetAdapters).adapters)
        if group == "router":
            self.actor.dispatch(request, header, body)
        elif group == "supervisor":
            self.actor.spawn(self._ask_supervisor(request, codec.decode_request(header, body)))
        else:
            self._forward(process_id, request, raw_header, body)

    def _forward(self, process_id: str, request: ClientRequest, raw_header: bytes, body: bytes) -> None:
        is_call = request.kind is Kind.CALL
        peer = self.actor.peers.get(process_id)
        model_id = model_of(process_id)
        if peer is None or (model_id is not None and self.registry.is_leaving(model_id)):
            if is_call:
                raise self._absent(process_id)
            return
        if is_call and (full := self.pending.refusal(request.peer, request.id, self._limits())) is not None:
            raise full
        route = codec.encode(Route(client=request.peer, tenant=request.tenant))
        try:
            peer.socket.send([route, raw_header, body])
        except Unreachable:
            if is_call:
                raise self._absent(process_id) from None
            return
        if is_call:
            self.pending.add(Pending(request.peer, request.id, process_id, request.tenant, request.verb))
            if request.verb in LOGGED_VERBS:
                self.actor.log.info("request.forwarded", request=request.id, target=process_id)

    def _limits(self) -> Limits:
        """Asked each time: a reload of the configuration may have moved them."""
        limits = self.actor.boot.settings["limits"]
        return Limits(limits["max_requests_per_client"], limits["max_requests"])

    def _absent(self, process_id: str) -> BarrelError:
        model_id = model_of(process_id)
        if model_id is not None:
            return self.registry.refusal(model_id)
        if process_id not in self._helpers:
            return NotFound(
                f"this runtime has no process {process_id!r}", hint="it is switched off in the configuration"
            )
        return ModelDown(
            f"{process_id} is being restarted", hint="try again in a moment", process=process_id, accepted=False
        )

    async def _ask_supervisor(self, request: Request, message: protocol.Message) -> None:
        reply_type = protocol.CALLS[request.verb][1]
        try:
            request.done(await self.actor.supervisor.call(message, reply_type))
        except BarrelError as refused:
            request.error(refused)

    def _answer_error(self, client: bytes, request_id: str, error: BarrelError) -> None:
        header = Header(protocol.VERSION, Kind.ERROR, "", request_id)
        try:
            self.actor.server.send([client, b"", codec.encode(header), codec.encode(codec.error_body(error))])
        except Unreachable:
            self._client_gone(client)

    # --- from workers, back to clients

    def _on_answer(self, peer: Peer, frames: Frames) -> None:
        """Pass one event, reply or error on to the client that waits for it; the worker learns when nobody does."""
        raw_route, raw_header, body = frames
        client = codec.decode(raw_route, Route).client
        header = codec.decode_header(raw_header)
        if not self.pending.holds(client, header.request_id):
            return
        answered = None
        if header.kind in (Kind.DONE, Kind.ERROR):
            answered = self.pending.remove(client, header.request_id)
        try:
            self.actor.server.send([client, b"", raw_header, body])
        except Unreachable:
            peer.cast(Gone(client=client))
            self._client_gone(client)
            return
        if answered is not None:
            self._log_answered(answered, header.kind)

    def _log_answered(self, pending: Pending, kind: Kind) -> None:
        if pending.verb in LOGGED_VERBS:
            self.actor.log.info("request.answered", request=pending.request_id, target=pending.target, kind=kind.value)

    def _client_gone(self, client: bytes) -> None:
        for target in {pending.target for pending in self.pending.take_client(client)}:
            self.actor.cast(target, Gone(client=client))

    def _cancel(self, message: protocol.Cancel, request: Request) -> None:
        """Cancel by request id alone, whoever has it; only a tenant's own."""
        tenant = request.tenant if isinstance(request, ClientRequest) else LOCAL
        if tenant == LOCAL:
            self.loader.cancel(message.request_id)
        for pending in self.pending.find(message.request_id, tenant):
            self.actor.cast(pending.target, message)

    # --- processes come and go

    def _up(self, peer: Peer) -> None:
        peer.on_routed = self._on_answer
        if model_of(peer.id) is not None:
            self._open_box(peer.id)
        self._helpers.add(peer.id)
        if peer.id == "index":
            self._count_restarts(0)
        model_id = model_of(peer.id)
        if model_id is not None:
            self.registry.up(model_id, peer.incarnation)
            if (row := peer.about.get("row")) is not None:  # a loaded model has a true row from its first moment
                self.registry.row_came(msgspec.convert(row, ModelRow))
            peer.cast(ThreadShare(computing_models=self._computing))

    def _down(self, down: Down) -> None:
        self.registry.down(down)
        model_id = model_of(down.id)
        box = self._boxes.pop(down.id, None)
        computing = box.computing() if box is not None else None
        for pending in self.pending.take_target(down.id):
            is_suspect = computing is None or blackbox.names(computing, pending.request_id)
            self._answer_error(pending.client, pending.request_id, _died(down, model_id, is_suspect=is_suspect))
            self._log_answered(pending, Kind.ERROR)
        if box is not None:
            box.close()
        self._share_threads()
        self._count_restarts(int(down.restarting))

    def _open_box(self, process_id: str) -> None:
        """While it lives: its file goes with it."""
        try:
            box = blackbox.Reading(blackbox.path_of(self.actor.runtime_dir, process_id))
        except (OSError, ValueError) as absent:
            self.actor.log.warning("blackbox.absent", model=process_id, reason=str(absent))
            return
        if (old := self._boxes.pop(process_id, None)) is not None:
            old.close()
        self._boxes[process_id] = box

    def _count_restarts(self, more: int) -> None:
        """The counters are the index's; what happens while it is down is counted when it is back."""
        self._uncounted_restarts += more
        counted = protocol.Counted(deltas={"restarts": self._uncounted_restarts})
        if self._uncounted_restarts and self.actor.cast("index", counted):
            self._uncounted_restarts = 0

    def _row(self, row: ModelRow, _request: Request) -> None:
        if self.registry.row_came(row):
            self._share_threads()

    def _counted(self, counted: protocol.Counted, _request: Request) -> None:
        """Hand on what a model has counted: ahead of the call of a client who asks next."""
        self.actor.cast("index", counted)

    def _share_threads(self) -> None:
        """Tell the models how many of them compute, when that has changed."""
        computing = max(1, self.registry.computing_models())  # nobody shares with a model that rests
        if computing == self._computing:
            return
        self._computing = computing
        for peer in self.actor.peers.values():
            if model_of(peer.id) is not None:
                peer.cast(ThreadShare(computing_models=computing))

    # --- own calls

    def _greet(self, _greet: protocol.Greet, _request: Request) -> protocol.Greeting:
        return protocol.Greeting(
            version=protocol.VERSION, incarnation=self.actor.incarnation,
            max_message_bytes=protocol.MAX_MESSAGE_BYTES, max_text_bytes=protocol.MAX_TEXT_BYTES,
        )  # fmt: skip


def _died(down: Down, model_id: str | None, *, is_suspect: bool) -> BarrelError:
    """What a request gets whose process died while it had it; a suspect was being computed. Pure."""
    name = down.id if model_id is None else f"model {model_id!r}"
    details = {"process": down.id, "accepted": True, "computing": is_suspect, "restarting": down.restarting}
    if down.restarting:
        return ModelDown(f"{name} died ({down.reason})", hint="it is being restarted, try again", **details)
    return ModelFailed(f"{name} is down ({down.reason})", hint="see `barrelctl doctor`, then load it again", **details)


def main() -> int:
    """Run until told to stop; the value is the process's exit status."""
    router: list[Router] = []

    def make(actor: Actor) -> Callable[[Actor], Awaitable[dict[str, Any]]]:
        router.append(Router(actor))
        return router[0].serve

    return run(make, drain=lambda actor: router[0].drain(actor))


if __name__ == "__main__":
    sys.exit(main())
