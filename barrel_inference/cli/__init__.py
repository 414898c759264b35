"""barrelctl: arguments, exit codes, printing; no logic of its own.

`main` builds the application and turns errors into exit codes; `failure` says how; `output` prints; `context` has what all
commands share. Then one file per group of commands: `lifecycle`, `models`, `generate`, `logs`, `cache`, `pressure`,
`configuration`, `doctor`.
"""
