"""The root supervisor: starts, watches and restarts every other process, and does nothing else.

Reading order: `spec` (what children there are), `restarts` (how many restarts are too many), `tree` (one-for-one: events in,
commands out), `spawn` (processes), `control` (its socket), `notify` (systemd), `runtime_dir` (its directory), `root` (the process).

It knows its children as dotted module names and imports none of them.
"""
