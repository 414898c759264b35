"""The options of `load_model`, checked and completed. Pure.

`parse` is run twice on the same values: by the router, so that a bad option is refused before a process starts, and by the
model process itself. It reads no file and needs no llama.cpp. Every error is an `InvalidArgument` that names the dotted key
and the value.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from barrel_inference.errors import InvalidArgument
from barrel_inference.protocol import Tier
from barrel_inference.tiers import policy as policies
from barrel_inference.workers.model.cores import MAX_THREADS

LLAMA_SEQUENCES = 256  # llama.cpp has room for so many sequence ids
HELPER_SEQUENCES = 2  # the spare that cells go out and in through, and one that is always empty
MAX_SEQUENCES = LLAMA_SEQUENCES - HELPER_SEQUENCES
# Rows of one micro-batch that may want logits; llama.cpp sizes its output graph by it, by default for every row, which for
# a vocabulary of 262,144 tokens and 512 rows is half a gigabyte. More is an assert that ends the process.
MIN_OUTPUTS = 16
MAX_DEVICES = 16  # llama_max_devices(): entries of `tensor_split`

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NotNegative: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Threads: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_THREADS)]
KvType: TypeAlias = Literal["f16", "f32", "bf16", "q4_0", "q5_0", "q5_1", "q8_0"]
Scale: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
S = TypeVar("S", bound=msgspec.Struct)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every group of options."""


class LlamaModelOpts(Options, frozen=True):
    """`model_opts` of the llama backend."""

    n_gpu_layers: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = 0  # -1, and anything large: all
    split_mode: Literal["none", "layer", "row"] = "layer"  # how several GPUs share a model
    main_gpu: Annotated[int, msgspec.Meta(ge=0, lt=MAX_DEVICES)] = 0  # with split_mode none, or for what is not split
    tensor_split: Annotated[tuple[Scale, ...], msgspec.Meta(max_length=MAX_DEVICES)] = ()  # shares of the GPUs
    use_mmap: bool = True  # map the file instead of reading it into memory of our own
    use_mlock: bool = False  # lock the weights in memory
    prefetch: bool = True  # false: a page is read when it is first used
    pin_resident_after_first_request: bool = False  # then lock the pages that it used
    vocab_only: bool = False  # the tokenizer and nothing else


class StubModelOpts(Options, frozen=True):
    """`model_opts` of the stub backend: how slow it is, and which faults it has. Decode calls are counted from 1."""

    step_ms: Scale = 0.0  # time of one decode call; `interrupt` ends it early
    bytes_per_token: Annotated[int, msgspec.Meta(ge=24, le=1 << 20)] = 24  # KV of one token
    load_ms: Scale = 0.0
    decode_failed_at: Positive | None = None  # this decode call fails with code 1
    decode_timeout_at: Positive | None = None  # this decode call lasts until it is interrupted
    fail_on_token: NotNegative | None = None  # a decode call with this token fails with code -1
    crash_on_token: NotNegative | None = None  # a decode call with this token kills the process
    hang_on_token: NotNegative | None = None  # a decode call with this token never ends, interrupted or not
    crash_at_load: bool = False  # the process is killed while it loads
    poisoned_imports: bool = False  # cells are imported without complaint, then every decode call that uses them fails
    thinking_tokens: NotNegative = 0  # a reply begins with this many tokens between the thinking markers
    vocab_only: bool = False


class ContextOpts(Options, frozen=True):
    """`context_opts`. None: the default that depends on another option, see `completed`."""

    n_ctx: Positive = 2048  # tokens of one request at most, prompt and reply
    n_batch: Positive = 512  # tokens of one decode call at most
    n_ubatch: Positive | None = None  # n_batch
    n_seq_max: Positive = 1  # requests that run at once, at most 254: llama.cpp has 256 sequences, two are helpers
    kv_cells: Positive | None = None  # n_ctx
    warm_cells: NotNegative | None = None  # half of kv_cells
    n_threads: Threads | None = None  # what this process may use: affinity and cgroup quota
    n_threads_batch: Threads | None = None  # n_threads
    flash_attn: bool | Literal["auto"] = "auto"  # auto: llama.cpp decides
    type_k: KvType = "f16"  # of the cells' keys
    type_v: KvType = "f16"  # of the cells' values; quantised only with flash attention
    swa_full: bool = True  # cells for every position in layers with a sliding window too
    deterministic: bool = False  # greedy text depends on prompt and options only; requests take turns
    decode_budget_ms: NotNegative = 0  # 0 = no limit
    offload_kqv: bool = True  # cells on the GPU
    op_offload: bool = True  # computations of layers on the CPU on the GPU
    rope_scaling: Literal["auto", "none", "linear", "yarn", "longrope"] = "auto"
    rope_freq_base: Scale = 0.0  # 0 = the model's own, here and below
    rope_freq_scale: Scale = 0.0
    yarn_ext_factor: float = -1.0  # negative = the model's own
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_orig_ctx: NotNegative = 0

    @property
    def cells(self) -> int:
        """KV cells that all sequences share."""
        return self.kv_cells or self.n_ctx

    @property
    def warm(self) -> int:
        """Cells that idle sequences may keep."""
        return self.cells // 2 if self.warm_cells is None else self.warm_cells

    @property
    def ubatch(self) -> int:
        """Rows that are computed at once."""
        return self.n_ubatch or self.n_batch


class Markers(Options, frozen=True):
    """The texts that open and close a span of a reply."""

    start: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    end: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


STUB_THINKING = Markers(start="<think>", end="</think>")  # what the stub's own marker tokens spell


class _Given(Options, frozen=True):
    """The options as they arrive."""

    model_path: Annotated[
        str, msgspec.Meta(min_length=1, max_length=4096)
    ]  # a file, a name from `[models]`, or pkg:DISTRIBUTION; any text for the stub
    backend: Literal["llama", "stub"] = "llama"
    model_opts: dict[str, Any] | None = None
    context_opts: dict[str, Any] | None = None
    fingerprint: Any = None  # 32 bytes, or 64 hexadecimal digits; compared with what `fingerprint_mode` finds
    fingerprint_mode: Literal["safe", "gguf_chunked", "fast_unsafe"] | None = None  # default: `cache.fingerprint_mode`
    quant_type: Annotated[str, msgspec.Meta(min_length=1, max_length=40)] | None = None  # has to be the file's
    quant_bits: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None  # likewise
    ctx_params_hash: Any = None  # separates caches further; the context's own parameters always do
    context_size: Positive | None = None  # the same as context_opts.n_ctx
    tier: Tier = Tier.RAM  # where saves go
    tier_srv: str | None = None  # a tier server by name, when there are several of a kind
    policy: dict[str, Any] | None = None  # gates of `[cache.policy]` for this model
    adapters: list[tuple[str, float]] | None = None  # LoRA files with a scale each
    thinking_markers: Any = None  # the texts around what the model thinks: a pair
    tool_call_markers: Any = None  # the texts around a tool call: a pair


class LoadOptions(Options, frozen=True):
    """Every option of one load, checked. `llama` or `stub` is set, by backend."""

    model_path: str
    backend: str
    llama: LlamaModelOpts | None
    stub: StubModelOpts | None
    context: ContextOpts
    fingerprint: bytes | None
    fingerprint_mode: str
    quant_type: str | None
    quant_bits: int | None
    ctx_params_hash: bytes | None
    tier: Tier
    tier_server: str  # id of the tier process that saves go to, "tier:ram"
    policy: dict[str, Any]  # the configured gates with the given ones over them
    adapters: tuple[tuple[str, float], ...]
    thinking_markers: Markers | None
    tool_call_markers: Markers | None

    @property
    def vocab_only(self) -> bool:
        """Is only the tokenizer loaded?"""
        opts = self.llama or self.stub
        return opts is not None and opts.vocab_only


def parse(options: Mapping[str, Any], settings: Mapping[str, Any]) -> LoadOptions:
    """The load options, completed from the configuration (`Boot.settings`).

    Raises:
        InvalidArgument: names the dotted key and its value.
    """
    given = _convert(dict(options), _Given, "")
    stub = _convert(given.model_opts or {}, StubModelOpts, "model_opts.") if given.backend == "stub" else None
    thinking = _markers(given.thinking_markers, "thinking_markers")
    return LoadOptions(
        model_path=given.model_path,
        backend=given.backend,
        llama=None if stub else _llama(given.model_opts or {}),
        stub=stub,
        context=_context(given),
        fingerprint=_digest(given.fingerprint, "fingerprint"),
        fingerprint_mode=given.fingerprint_mode or settings["cache"]["fingerprint_mode"],
        quant_type=given.quant_type,
        quant_bits=given.quant_bits,
        ctx_params_hash=_digest(given.ctx_params_hash, "ctx_params_hash"),
        tier=given.tier,
        tier_server=_tier_server(given, settings["tiers"]),
        policy=_policy(given.policy or {}, settings["cache"]),
        adapters=_adapters(given.adapters or []),
        thinking_markers=STUB_THINKING if stub and stub.thinking_tokens and thinking is None else thinking,
        tool_call_markers=_markers(given.tool_call_markers, "tool_call_markers"),
    )


def _llama(given: dict[str, Any]) -> LlamaModelOpts:
    opts = _convert(given, LlamaModelOpts, "model_opts.")
    if opts.tensor_split and not any(opts.tensor_split):
        raise _wrong("model_opts.tensor_split", list(opts.tensor_split), "needs one number above 0")
    return opts


def _context(given: _Given) -> ContextOpts:
    values = dict(given.context_opts or {})
    if given.context_size is not None:
        values.setdefault("n_ctx", given.context_size)
        if values["n_ctx"] != given.context_size:
            raise _wrong("context_size", given.context_size, f"differs from context_opts.n_ctx = {values['n_ctx']!r}")
    opts = _convert(values, ContextOpts, "context_opts.")
    if opts.n_seq_max > MAX_SEQUENCES:
        why = f"llama.cpp has {LLAMA_SEQUENCES} sequences, and {HELPER_SEQUENCES} of them carry cells in and out"
        raise _wrong("context_opts.n_seq_max", opts.n_seq_max, f"is more than {MAX_SEQUENCES}: {why}")
    if opts.ubatch > opts.n_batch:
        raise _wrong("context_opts.n_ubatch", opts.ubatch, f"is more than n_batch = {opts.n_batch}")
    if opts.cells < opts.n_ctx:
        raise _wrong(
            "context_opts.kv_cells", opts.cells, f"is less than n_ctx = {opts.n_ctx}, which one request may use"
        )
    if opts.warm > opts.cells:
        raise _wrong("context_opts.warm_cells", opts.warm, f"is more than kv_cells = {opts.cells}")
    if opts.flash_attn is False and opts.type_v not in ("f16", "f32", "bf16"):
        raise _wrong("context_opts.type_v", opts.type_v, "needs flash attention, and flash_attn is false")
    return opts


def _digest(value: Any, key: str) -> bytes | None:
    """32 bytes, also from 64 hexadecimal digits (configuration files and the command line have no bytes)."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = bytes.fromhex(value)
        except ValueError:
            raise _wrong(key, value, "is not 64 hexadecimal digits") from None
    if not isinstance(value, bytes):
        raise _wrong(key, value, "has to be 32 bytes or 64 hexadecimal digits")
    if len(value) != 32:
        raise _wrong(key, value, f"has {len(value)} bytes, a SHA-256 has 32")
    return value


def _tier_server(given: _Given, tiers: Mapping[str, Mapping[str, Any]]) -> str:
    name = (given.tier_srv or given.tier).removeprefix("tier:")
    key = "tier" if given.tier_srv is None else "tier_srv"
    if name not in tiers:
        raise _wrong(key, name, f"is not a tier of this runtime; there are {', '.join(sorted(tiers))}")
    kind = tiers[name].get("kind", name)
    if kind != given.tier:
        raise _wrong(key, name, f"is a tier of kind {kind}, and tier is {given.tier.value}")
    if not tiers[name].get("enabled", True):
        raise _wrong(key, name, f"is switched off (tiers.{name}.enabled = false)")
    return f"tier:{name}"


def _policy(given: dict[str, Any], cache: Mapping[str, Any]) -> dict[str, Any]:
    """The configured gates with the given ones laid over them."""
    gates = {**cache["policy"], "session_resume_wait_ms": cache.get("session_resume_wait_ms"), **given}
    if problems := policies.validate(gates):
        raise InvalidArgument("; ".join(problems), key="policy")
    return gates


def _adapters(given: list[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    for number, (path, scale) in enumerate(given):
        if not path:
            raise _wrong(f"adapters[{number}]", path, "is no path")
        if not abs(scale) < float("inf"):
            raise _wrong(f"adapters[{number}]", scale, "is no finite scale")
    return tuple(given)


def _markers(given: Any, key: str) -> Markers | None:
    """A pair of texts, as a list or as a table with `start` and `end`."""
    if given is None:
        return None
    if isinstance(given, (list, tuple)):
        if len(given) != 2:
            raise _wrong(key, given, "has to be a pair: the opening and the closing text")
        given = {"start": given[0], "end": given[1]}
    if not isinstance(given, dict):
        raise _wrong(key, given, "has to be a pair: the opening and the closing text")
    return _convert(given, Markers, f"{key}.")


def _convert(values: dict[str, Any], cls: type[S], prefix: str) -> S:
    """`values` as a struct; msgspec's complaint becomes ours, with the dotted key and the value."""
    unknown = [key for key in values if key not in cls.__struct_fields__]
    if unknown:
        close = difflib.get_close_matches(unknown[0], cls.__struct_fields__, 1)
        hint = f"did you mean {prefix}{close[0]}?" if close else f"there are {', '.join(cls.__struct_fields__)}"
        key = f"{prefix}{unknown[0]}"
        raise InvalidArgument(f"{key} = {values[unknown[0]]!r} is no option", hint=hint, key=key)
    for key, value in values.items():
        if value != value:  # NaN passes every comparison of a range check
            raise _wrong(f"{prefix}{key}", value, "is not a number")
    try:
        return msgspec.convert(values, cls, str_keys=True)
    except msgspec.ValidationError as bad:
        text, at, path = str(bad).rpartition(" - at `$.")
        if not at:  # only a missing field has no path
            raise InvalidArgument(f"{prefix.rstrip('.') or 'load_model'}: {str(bad).lower()}") from bad
        path = path.rstrip("`")
        key = path.split("[")[0].split(".")[0]
        choices = _choices(cls, key)
        why = f"is none of {', '.join(choices)}" if choices else f"is wrong: {text[:1].lower()}{text[1:]}"
        raise _wrong(f"{prefix}{path}", values[key], why) from bad


def _choices(cls: type[msgspec.Struct], key: str) -> list[str]:
    """The values an option may have, if they can be listed."""
    kind = next(field.type for field in msgspec.inspect.type_info(cls).fields if field.name == key)  # type: ignore[attr-defined]
    parts = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    out: list[str] = []
    for part in parts:
        if isinstance(part, msgspec.inspect.LiteralType):
            out += map(str, part.values)
        elif isinstance(part, msgspec.inspect.EnumType):
            out += [member.value for member in part.cls]
        elif isinstance(part, msgspec.inspect.BoolType) and len(parts) > 1:
            out += ["true", "false"]
    return out


def _wrong(key: str, value: Any, why: str) -> InvalidArgument:
    return InvalidArgument(f"{key} = {value!r} {why}", key=key)
