"""The systemd units, as text. Pure. `deploy/barrel-inference.service` is the system unit for /opt/barrel-inference."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paths:
    """What a unit names."""

    bin_dir: str  # where barreld and barrelctl are
    config: str  # laid over the packaged sys.toml


NAME = "barrel-inference"  # of the unit, the user, the group and the directories

_HEAD = """\
[Unit]
Description=Barrel Inference: local LLMs with a tiered KV cache
Documentation=https://github.com/barrel-inference/barrel-inference
# Five starts in five minutes that come to nothing, and systemd leaves it at that.
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={start}
# Says what changed and what waits; fails, and changes nothing, if the configuration is wrong.
ExecReload={reload}
Restart=on-failure
RestartSec=2
# 78: wrong configuration, or a process that cannot start. Starting again will not help.
RestartPreventExitStatus=78
WatchdogSec=30
# The runtime asks for more while models load (EXTEND_TIMEOUT_USEC). A stop saves what models hold first.
TimeoutStartSec=90
TimeoutStopSec=60
# SIGTERM goes to the supervisor, which stops the others in order; SIGKILL at the end goes to all.
KillMode=mixed
# One process that ran out of memory is replaced by the supervisor; it does not take the service along.
OOMPolicy=continue
LimitNOFILE=65536
UMask=0077
NoNewPrivileges=yes
# These need no rights and no namespaces, so that a user's own manager can apply them as well.
LockPersonality=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
"""

_SYSTEM = """
User={name}
Group={name}
RuntimeDirectory={name}
# Members of the group reach the one socket that is theirs; nothing else can be listed or opened.
RuntimeDirectoryMode=0710
StateDirectory={name}
StateDirectoryMode=0700
# A log of every process, which `barrelctl logs` reads; the supervisor's is in the journal as well.
LogsDirectory={name}
LogsDirectoryMode=0700
ConfigurationDirectory={name}
LimitMEMLOCK=infinity
MemoryHigh=85%
MemoryMax=92%

# The ram_file tier lies in /dev/shm and is meant to survive a restart: RemoveIPC would delete it.
RemoveIPC=no
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
# GPUs are devices, so PrivateDevices= cannot be used; nothing but them is allowed. Their kernel modules have to be loaded
# before (nvidia-persistenced or nvidia-modprobe), because the service may not.
DevicePolicy=closed
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidia-caps rw
DeviceAllow=char-drm rw
DeviceAllow=/dev/kfd rw
CapabilityBoundingSet=
AmbientCapabilities=
# For runtime.tcp add a drop-in: PrivateNetwork=no, RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK, IPAddressAllow=...
PrivateNetwork=yes
IPAddressDeny=any
RestrictAddressFamilies=AF_UNIX
# Not ProcSubset=pid: memory figures and GPU drivers are in /proc. Not PrivateUsers=yes: it hides the UIDs of clients, which
# are tenants. Not MemoryDenyWriteExecute=yes: GPU drivers compile kernels.
ProtectProc=invisible
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
KeyringMode=private

[Install]
WantedBy=multi-user.target
"""

_USER = """
# For runtime.tcp and metrics.listen; libzmq asks for the interfaces over netlink.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
# Sockets are in $XDG_RUNTIME_DIR/barrel-inference, state in ~/.local/state/barrel-inference: where clients look.

[Install]
WantedBy=default.target
"""

# sysusers.d(5): the user and group of the system unit.
SYSUSERS = f'u {NAME} - "Barrel Inference" /var/lib/{NAME}\n'


# What a service begins with.
EMPTY_CONFIG = """\
# Laid over the defaults, key by key: `barrelctl config show` prints them all.
# A reload of the service takes up what can change while it runs, and names what waits for a restart.
"""


def system_unit(paths: Paths) -> str:
    """The unit for a machine."""
    more = [f"--set runtime.socket_group={NAME}"]
    return _unit(paths, more, f" --endpoint ipc:///run/{NAME}/router", _SYSTEM.format(name=NAME))


def user_unit(paths: Paths) -> str:
    """The unit for one user."""
    return _unit(paths, [], "", _USER)


def _unit(paths: Paths, more: list[str], endpoint: str, tail: str) -> str:
    start = " ".join([f"{paths.bin_dir}/barreld", "--config", paths.config, *more])
    return _HEAD.format(start=start, reload=f"{paths.bin_dir}/barrelctl{endpoint} reload") + tail
