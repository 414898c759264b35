"""barrelctl: arguments, exit codes, printing; no logic of its own."""
