"""From results to a table and plots."""

from pathlib import Path
from typing import Any

# (row, scenario, ours, against, target, bigger is better)
ROWS = (
    ("exact hit, 2,048 tokens, RAM: TTFT", "exact 2048", "ram", "floor", 1.25, False),
    ("  against llama-server's host-memory cache", "exact 2048", "ram", "llama-server RAM", 1.0, False),
    ("  live, against llama-server's same slot", "exact 2048", "live", "llama-server slot", 1.0, False),
    ("  from ram_file", "exact 2048", "ram_file", "floor", 1.4, False),
    ("  from disk (page cache warm)", "exact 2048", "disk", "floor", 1.6, False),
    ("after a restart of the runtime, from disk", "restart 2048", "ours", "floor", 2.0, False),
    ("cold prefill, 2,048 tokens, saves on", "cold 2048", "ours", "floor", 1.03, False),
    ("decode, 1 stream", "decode 1", "ours", "floor", 0.97, True),
    ("decode, 4 streams", "decode 4", "ours", "floor", 0.95, True),
    ("decode, 8 streams", "decode 8", "ours", "floor", 0.95, True),
    ("  8 streams, against llama-server", "decode 8", "ours", "llama-server", 1.0, True),
    ("herd: tokens prefilled, against llama-server", "herd prefilled", "ours", "llama-server", 0.3, False),
    ("herd: time, against llama-server", "herd time", "ours", "llama-server", 1.0, False),
    ("prompts that hit nothing, cache on against saves off", "miss 512", "cache on", "saves off", 1.01, False),
    ("two models decoding, against one alone", "two models", "both together", "one alone", 0.8, True),
    ("control call, against a bare ZeroMQ echo", "control call", "ours", "bare echo", 3.0, False),
)
LIMITS = (
    ("start of the tree without models", "tree start", 1500.0),
    ("helper: killed to ready", "helper restart", 500.0),
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
        ratio = a["median"] / b["median"]
        met = ratio >= target if bigger else ratio <= target
        sign = "≥" if bigger else "≤"
        lines.append(
            f"| {label} | {a['median']:.4g} {a['unit']} | {other} {b['median']:.4g} {b['unit']} | {ratio:.2f} "
            f"| {sign} {target} | {'met' if met else '**missed**'} |"
        )
    for label, scenario, limit in LIMITS:
        if scenario in cells:
            median = cells[scenario]["ours"]["median"]
            lines.append(
                f"| {label} | {median:.4g} ms | | | ≤ {limit:.0f} ms | {'met' if median <= limit else '**missed**'} |"
            )
    table = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(table)
    _plot(folder, cells)
    return table


def _plot(folder: Path, cells: dict[str, Any]) -> None:
    """TTFT against prompt length, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
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
