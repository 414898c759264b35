"""The messages: what each process says to which, as frozen values. Pure.

Every message has three frames: route, header, body. The header is a `Header`; the body is one of the structs below, as a
msgpack map. `CALLS` and `CASTS` map the header's verb to the body's type. A call gets one reply (`done` or `error`),
or numbered events that end with exactly one of them. A cast gets nothing.

Route: empty between processes. From a client it is the target's id (`router`, `model:tiny`); from the router to a worker
it is an encoded `Route`, which the worker returns unopened in every answer.

The structs are in `barrel_inference.messages`, by the process that answers; all of them can be imported from here.
"""

from barrel_inference.messages.base import *
from barrel_inference.messages.index import *
from barrel_inference.messages.model import *
from barrel_inference.messages.pressure import *
from barrel_inference.messages.router import *
from barrel_inference.messages.tiers import *
from barrel_inference.messages.tree import *

# verb -> (body of the call, body of `done`)
CALLS: dict[str, tuple[type[Message], type[Message]]] = {
    "start_child": (StartChild, Ok),
    "stop_child": (StopChild, Ok),
    "restart_child": (RestartChild, Ok),
    "change_boot": (ChangeBoot, Ok),
    "stop_tree": (StopTree, Ok),
    "tree_status": (TreeStatus, TreeRows),
    "reload": (Reload, Reloaded),
    "greet": (Greet, Greeting),
    "load_model": (LoadModel, Loaded),
    "unload": (Unload, Ok),
    "models": (Models, ModelRows),
    "status": (Status, StatusReply),
    "recent_requests": (RecentRequests, RecentRows),
    "complete": (Complete, Completed),
    "end_session": (EndSession, Ok),
    "tokenize": (Tokenize, TokenIds),
    "detokenize": (Detokenize, Text),
    "apply_template": (ApplyTemplate, TokenIds),
    "embed": (Embed, Vector),
    "set_adapters": (SetAdapters, AdapterList),
    "adapters": (Adapters, AdapterList),
    "release_idle": (ReleaseIdle, Evicted),
    "lookup": (Lookup, Match),
    "save_plan": (SavePlan, Planned),
    "reserve": (Reserve, Grants),
    "check_reservation": (CheckReservation, Ok),
    "publish": (Publish, Ok),
    "add_mark": (AddMark, Ok),
    "counters": (Counters, CounterValues),
    "dump": (Dump, DumpRows),
    "cache_stats": (CacheStats, CacheStatsReply),
    "evict": (Evict, Evicted),
    "replay": (Replay, Ok),
    "quota": (Quota, Ok),
    "room": (Room, Roomed),
    "adopt": (Adopt, Ok),
    "write": (Write, Written),
    "pressure": (PressureCommand, PressureReply),
}

CASTS: dict[str, type[Message]] = {
    "hello": Hello,
    "ready": Ready,
    "beat": Beat,
    "cannot_start": CannotStart,
    "up": Up,
    "down": Down,
    "reconfigured": Reconfigured,
    "model_row": ModelRow,
    "load_progress": LoadProgress,
    "request_ended": RequestEnded,
    "cancel": Cancel,
    "credit": Credit,
    "gone": Gone,
    "thread_share": ThreadShare,
    "check_in": CheckIn,
    "handed": Handed,
    "abort": Abort,
    "counted": Counted,
    "free": Free,
    "committed": Committed,
    "touch": Touch,
    "lost": Lost,
}

VERB_OF: dict[type[Message], str] = {body: verb for verb, (body, _) in CALLS.items()} | {
    body: verb for verb, body in CASTS.items()
}

# What clients may ask, by the group of the process that answers. Everything else is between processes.
CLIENT_VERBS: dict[str, frozenset[str]] = {
    "router": frozenset({"greet", "load_model", "unload", "models", "status", "recent_requests", "cancel"}),
    "supervisor": frozenset({"tree_status", "restart_child"}),
    "index": frozenset({"counters", "dump", "cache_stats", "evict"}),
    "pressure": frozenset({"pressure"}),
    "model": frozenset(
        {
            "complete", "cancel", "credit", "end_session", "tokenize", "detokenize", "apply_template", "embed",
            "set_adapters", "adapters",
        }
    ),
}  # fmt: skip

# Event kinds of `complete` and the type of their bodies.
EVENTS: dict[str, type[Message]] = {
    "token": TokenEvent,
    "thinking": TokenEvent,
    "thinking_end": TokenEvent,
    "tool_call": TokenEvent,
    "tool_call_end": TokenEvent,
    "progress": Progress,
    "load_progress": LoadProgress,
}
