"""The peer: llama-server built from the sdist of the very llama-cpp-python that we run, with the same options."""

import atexit
import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workload import N_BATCH, N_CTX, THREADS

from barrel_inference.supervisor.spec import THREADS_ENVIRONMENT

ROOT = Path(__file__).parent / "peers"
VERSION = "0.3.36"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
)  # fmt: skip
START_S = 120


def find() -> Path | None:
    """The built server: $LLAMA_SERVER, or our own build."""
    given = os.environ.get("LLAMA_SERVER")
    built = ROOT / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp" / "build" / "bin" / "llama-server"
    return Path(given) if given else built if built.exists() else None


def build() -> Path:
    """Build it from the sdist; 6 minutes and more on 2 cores."""
    ROOT.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*pip, f"llama-cpp-python=={VERSION}", "-d", str(ROOT)], check=True)
    shutil.unpack_archive(next(ROOT.glob("llama_cpp_python-*.tar.gz")), ROOT)
    source = ROOT / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    subprocess.run(["cmake", "-B", "build", *FLAGS], cwd=source, check=True)
    subprocess.run(["cmake", "--build", "build", "--target", "llama-server", "-j", "2"], cwd=source, check=True)
    found = find()
    assert found is not None
    return found


class Server:
    """One running llama-server."""

    def __init__(self, binary: Path, model_path: str, *, parallel: int, cache_mib: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LLAMA_ARG_")}
        self.process = subprocess.Popen(
            [
                str(binary), "--model", model_path, "--ctx-size", str(N_CTX), "--batch-size", str(N_BATCH),
                "--ubatch-size", str(N_BATCH), "--threads", str(THREADS), "--threads-batch", str(THREADS),
                "--cpu-range", f"0-{THREADS - 1}", "--cpu-strict", "1", "--parallel", str(parallel), "--flash-attn", "on", "--gpu-layers", "0", "--fit", "off",
                "--cache-reuse", "0", "--slot-prompt-similarity", "0.0", "--no-context-shift", "--cache-ram", str(cache_mib),
                "--host", "127.0.0.1", "--port", str(self.port), "--threads-http", "2", "--offline",
                *(["--kv-unified"] if parallel > 1 else []),
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment | THREADS_ENVIRONMENT,
        )  # fmt: skip
        atexit.register(self.process.kill)  # also when a scenario fails
        self._wait()

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError("llama-server did not start")

    def events(self, tokens: list[int], predict: int, **more: Any) -> Iterator[dict[str, Any]]:
        """The events of one streamed completion."""
        body = {
            "prompt": tokens, "n_predict": predict, "temperature": 0, "top_k": 1, "seed": 1, "cache_prompt": True,
            "stream": True, "return_tokens": True, "ignore_eos": predict > 1,
        } | more  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
        connection.close()

    def first_token(self, tokens: list[int]) -> tuple[float, int]:
        """Seconds from the request to the first token, and how many tokens came from its cache."""
        began_s = time.perf_counter()
        arrived_s, cached = 0.0, 0
        for event in self.events(tokens, 1):
            arrived_s = arrived_s or time.perf_counter() - began_s
            cached = event.get("timings", {}).get("cache_n", cached)
        return arrived_s, cached

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()
