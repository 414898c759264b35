"""From results to a table and plots."""

import statistics
from pathlib import Path
from typing import Any

# (row, scenario, ours, against, target, bigger is better)
ROWS = (
    ("exact hit, 2,048 tokens, RAM: TTFT", "exact 2048", "ram", "floor", 1.25, False),
    ("  against llama-server's host-memory cache", "exact 2048", "ram", "llama-server RAM", 1.0, False),
    ("  with `policy.store_logits`", "exact 2048", "ram, store_logits", "floor", 1.25, False),
    ("  with it, against llama-server's", "exact 2048", "ram, store_logits", "llama-server RAM", 1.0, False),
    ("  live, against llama-server's same slot", "exact 2048", "live", "llama-server slot", 1.0, False),
    ("  from ram_file", "exact 2048", "ram_file", "floor", 1.4, False),
    ("  from disk (page cache warm)", "exact 2048", "disk", "floor", 1.6, False),
    ("after a restart of the runtime, from disk", "restart 2048", "ours", "floor", 2.0, False),
    ("cold prefill, 2,048 tokens, saves on", "cold 2048", "ours", "floor", 1.03, False),
    ("decode, 1 stream", "decode 1", "ours", "floor", 0.97, True),
    ("  1 stream, against llama-server", "decode 1", "ours", "llama-server", 1.0, True),
    ("decode, 4 streams", "decode 4", "ours", "floor", 0.95, True),
    ("  4 streams, against llama-server", "decode 4", "ours", "llama-server", 1.0, True),
    ("decode, 8 streams", "decode 8", "ours", "floor", 0.95, True),
    ("  8 streams, against llama-server", "decode 8", "ours", "llama-server", 1.0, True),
    ("  against llama-cpp-python's RAM cache", "exact 2048", "ram", "llama-cpp-python RAM", 1.0, False),
    ("  from disk, against llama-cpp-python's disk cache", "exact 2048", "disk", "llama-cpp-python disk", 1.0, False),
    ("decode while a save is written", "decode beside", "a save", "nothing", 0.9, True),
    ("decode while another process starts", "decode beside", "a start", "nothing, again", 0.9, True),
    ("pack of a saved node of 256 tokens: export and checksum", "pack of a node", "ours", "floor", 1.3, False),
    ("two chats in turns: tokens prefilled, against the unique ones", "chat prefilled", "ours", "unique", 1.05, False),
    ("  against llama-server", "chat prefilled", "ours", "llama-server", 1.0, False),
    ("herd: tokens prefilled, against llama-server", "herd prefilled", "ours", "llama-server", 0.3, False),
    ("herd: time, against llama-server", "herd time", "ours", "llama-server", 1.0, False),
    ("prompts that hit nothing, cache on against saves off", "miss 512", "cache on", "saves off", 1.01, False),
    ("two models decoding, against one alone", "two models", "both together", "one alone", 0.8, True),
    ("decode with metrics scraped every 2 s, against without", "metrics", "on", "off", 0.99, True),
    ("control call, against a bare ZeroMQ echo", "control call", "ours", "bare echo", 3.0, False),
)
# (row, scenario, who, limit)
LIMITS = (
    ("start of the tree without models", "tree start", "ours", 1500.0),
    ("load, more than a bare script that loads", "load", "more than a bare script", 500.0),
    ("helper: killed to ready", "helper restart", "ours", 500.0),
    ("router, 64 streams at 100 tokens/s", "64 streams", "router", 50.0),
)


def write(folder: Path, result: dict[str, Any]) -> str:
    """Write `table.md` and the plots; returns the table."""
    cells, machine = result["cells"], result["machine"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, llama-cpp-python {machine['llama_cpp_python']}, SmolLM2-135M Q4_1; "
        f"load {machine['load_1m']:.1f} at the start. Medians; ratios within one run.", "",
        "| | ours | against | ratio | target | |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for label, scenario, who, other, target, bigger in ROWS:
        cell = cells.get(scenario, {})
        if who not in cell or other not in cell:
            continue
        a, b = cell[who], cell[other]
        ratio = _ratio(a, b)
        met = ratio >= target if bigger else ratio <= target
        sign = "≥" if bigger else "≤"
        lines.append(
            f"| {label} | {a['median']:.4g} {a['unit']} | {other} {b['median']:.4g} {b['unit']} | {ratio:.2f} "
            f"| {sign} {target} | {'met' if met else '**missed**'} |"
        )
    for label, scenario, who, limit in LIMITS:
        if scenario in cells:
            median, unit = cells[scenario][who]["median"], cells[scenario][who]["unit"]
            lines.append(
                f"| {label} | {median:.4g} {unit} | | | ≤ {limit:.0f} {unit} | {'met' if median <= limit else '**missed**'} |"
            )
    lines += _flat_row(cells)
    table = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(table)
    _plots(folder, cells)
    return table


def _ratio(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Of samples taken in turns: pair by pair, which holds when the machine's speed drifts during the run."""
    if len(a["values"]) == len(b["values"]):
        return statistics.median(x / y for x, y in zip(a["values"], b["values"], strict=True))
    return float(a["median"] / b["median"])


def _flat_row(cells: dict[str, Any]) -> list[str]:
    """TTFT of the longest against the shortest exact hit, in units of what the floor needs more for the copy."""
    lengths = sorted(int(name.split()[1]) for name in cells if name.startswith("exact "))
    if len(lengths) < 2 or not all("ram" in cells[f"exact {n}"] for n in lengths):
        return []
    short, long = cells[f"exact {lengths[0]}"], cells[f"exact {lengths[-1]}"]
    more_ms = long["ram"]["median"] - short["ram"]["median"]
    floor_ms = long["floor"]["median"] - short["floor"]["median"]
    met = more_ms <= 1.3 * floor_ms
    return [
        f"| exact, {lengths[-1]:,} against {lengths[0]:,} tokens: more time | {more_ms:.3g} ms | floor {floor_ms:.3g} ms "
        f"| {more_ms / floor_ms:.2f} | ≤ 1.3 | {'met' if met else '**missed**'} |"
    ]


def _plots(folder: Path, cells: dict[str, Any]) -> None:
    """One SVG each: TTFT against prompt length, the herd, the chat, disk bytes by turn."""
    import matplotlib as mpl

    mpl.use("svg")
    _plot_first_tokens(folder, cells)
    for name, title, unit in (
        ("herd prefilled", "Four requests with one head: tokens prefilled", "tokens"),
        ("chat prefilled", "Two chats in turns: tokens prefilled", "tokens"),
    ):
        if name in cells:
            _bars(
                folder / f"{name.replace(' ', '_')}.svg",
                {who: s["median"] for who, s in cells[name].items()},
                title,
                unit,
            )
    if "chat disk" in cells:
        _plot_disk(folder, cells["chat disk"])


def _bars(path: Path, bars: dict[str, float], title: str, unit: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 2.4))
    shown = axes.barh(list(bars), list(bars.values()))
    axes.bar_label(shown, fmt="{:,.0f}", padding=3)
    axes.set(xlabel=unit, title=title)
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _plot_disk(folder: Path, cell: dict[str, Any]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3))
    turns = cell["ours"]["values"]
    axes.plot(range(1, len(turns) + 1), turns, marker="o", label="on disk")
    axes.axhline(cell["KV of the unique tokens"]["median"], linestyle="--", label="KV of the unique tokens at the end")
    axes.set(xlabel="turn of both chats", ylabel="MiB", title="What two chats leave on disk", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "chat_disk.svg")
    pyplot.close(figure)


def _plot_first_tokens(folder: Path, cells: dict[str, Any]) -> None:
    from matplotlib import pyplot

    lengths = sorted(int(name.split()[1]) for name in cells if name.startswith("exact "))
    if not lengths:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for who, scenario in (
        ("ours", "cold"), ("llama-server", "cold"), ("ram", "exact"), ("ram_file", "exact"), ("disk", "exact"),
        ("live", "exact"), ("floor", "exact"), ("llama-server RAM", "exact"),
    ):  # fmt: skip
        points = [
            (n, cells[f"{scenario} {n}"][who]["median"]) for n in lengths if who in cells.get(f"{scenario} {n}", {})
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{who}, {scenario}")
    axes.set(xlabel="prompt tokens", ylabel="time to first token, ms", yscale="log", title="Time to first token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "ttft.svg")
    pyplot.close(figure)
