"""What a disk that takes seconds for each write costs a model that generates, and those who observe it.

python bench/slow_disk.py [--delay-s 5] [--pairs 5] [--tokens 200]

Two runtimes side by side, the same prompts in turns: one whose writes take that much longer, one whose do not. Every prompt is
new and long enough to be saved, so in the slow one each run generates while writes are under way. Prints the rates, their
ratio, and how long an observer waits for its answer.
"""

import argparse
import os
import statistics
import time

import ours
from workload import prompt

from barrel_inference import Client, Runtime

PROMPT_TOKENS = 600
SETTINGS = {"cache": {"policy": {"boundary_align_tokens": 256}}}


def runtime(delay_s: float) -> Runtime:
    """A runtime whose writers take so much longer for every file."""
    os.environ["BARREL_TEST_WRITE_DELAY_S"] = str(delay_s)
    try:
        return Runtime(SETTINGS).__enter__()
    finally:
        del os.environ["BARREL_TEST_WRITE_DELAY_S"]


def decode(client: Client, model: str, seed: int, tokens: int) -> tuple[float, float]:
    """Tokens per second after the first one, and the longest wait of an observer for `phase` meanwhile, in ms."""
    arrived_s: list[float] = []
    observed_ms: list[float] = []
    with client.stream(model, prompt(PROMPT_TOKENS, seed=seed), response_tokens=tokens) as stream:
        for event in stream:
            arrived_s += [time.perf_counter()] * len(event.token_ids)
            if len(arrived_s) % 50 == 0:
                began_s = time.perf_counter()
                client.phase(model)
                observed_ms.append((time.perf_counter() - began_s) * 1000)
    return (len(arrived_s) - 1) / (arrived_s[-1] - arrived_s[0]), max(observed_ms)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--delay-s", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"quick": [], "slow": []}
    waits: dict[str, list[float]] = {"quick": [], "slow": []}
    runtimes = {"quick": runtime(0.0), "slow": runtime(options.delay_s)}
    try:
        clients = {name: one.client() for name, one in runtimes.items()}
        models = {name: ours.load(client, name, tier="disk") for name, client in clients.items()}
        for pair in range(options.pairs + 1):
            for name in ("quick", "slow") if pair % 2 else ("slow", "quick"):
                rate, wait_ms = decode(clients[name], models[name], 500 + pair, options.tokens)
                if pair:  # the first pair warms both up
                    rates[name].append(rate)
                    waits[name].append(wait_ms)
        writing = any(row.status == "writing" for row in clients["slow"].cache.dump())
        for name in rates:
            print(f"{name:6} {statistics.median(rates[name]):7.1f} tokens/s, `phase` within {max(waits[name]):.1f} ms")
        print(f"ratio  {statistics.median(rates['slow']) / statistics.median(rates['quick']):7.3f}")
        print(f"writes under way at the end: {writing}")
    finally:
        for one in runtimes.values():
            one.__exit__(None, None, None)


if __name__ == "__main__":
    main()
