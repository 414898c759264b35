"""install-service and keys: what they write, without a systemd or a runtime."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from barrel_inference import curve
from barrel_inference.cli import unit
from barrel_inference.cli.main import main
from barrel_inference.transport import local_user

DEPLOY = Path(__file__).parents[2] / "deploy"
PATHS = unit.Paths("/opt/barrel-inference/bin", "/etc/barrel-inference/sys.toml")


def test_the_shipped_unit_is_the_installed_one() -> None:
    """`deploy/` has what install-service writes for the documented paths."""
    assert (DEPLOY / "barrel-inference.service").read_text() == unit.system_unit(PATHS)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(("scope", "exposure"), [("system", 3.0), ("user", 6.5)])
def test_systemd_accepts_the_units(tmp_path: Path, scope: str, exposure: float) -> None:
    """systemd knows every setting, and the exposure is small; what a user's manager cannot restrict without rights is left."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name in ("barreld", "barrelctl"):
        (bin_dir / name).write_text("#!/bin/sh\n")
        (bin_dir / name).chmod(0o755)
    make = unit.system_unit if scope == "system" else unit.user_unit
    path = tmp_path / "barrel-inference.service"
    path.write_text(make(unit.Paths(str(bin_dir), "/etc/sys.toml")))
    verified = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    about_us = [line for line in verified.stderr.splitlines() if "barrel-inference" in line]
    assert (verified.returncode, about_us) == (0, [])
    subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={exposure * 10:.0f}", "--no-pager", str(path)],
        check=True, capture_output=True,
    )  # fmt: skip


def test_install_writes_below_a_root(tmp_path: Path) -> None:
    """With --root the unit and its user are written there, and no command is run."""
    assert main(["install-service", "--system", "--root", str(tmp_path)]) == 0
    text = (tmp_path / "etc/systemd/system/barrel-inference.service").read_text()
    assert "Type=notify\n" in text
    assert (tmp_path / "etc/sysusers.d/barrel-inference.conf").read_text() == unit.SYSUSERS
    config = tmp_path / "etc/barrel-inference/sys.toml"
    assert "--config /etc/barrel-inference/sys.toml " in text
    assert tomllib.loads(config.read_text()) == {}
    config.write_text('[log]\nlevel = "debug"\n')
    assert main(["install-service", "--system", "--root", str(tmp_path)]) == 0
    assert "debug" in config.read_text()


def test_dry_run_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--dry-run prints the unit and says which files and commands there would be."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert main(["install-service", "--user", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("[Unit]\n")
    assert f"would write {tmp_path}/config/systemd/user/barrel-inference.service" in said.err
    assert "would run: systemctl --user enable barrel-inference.service" in said.err
    assert "would run: systemctl --user restart barrel-inference.service" in said.err
    assert list(tmp_path.iterdir()) == []


def test_keys_are_what_the_runtime_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """init and add write what both sides load; a secret is readable by this user only; remove takes the name away."""
    server, alice = tmp_path / "server", tmp_path / "alice"
    assert main(["keys", "init", str(server)]) == 0
    assert main(["keys", "add", str(server), "alice", "--out", str(alice)]) == 0
    monkeypatch.setenv("BARREL_CURVE", str(alice))
    client = curve.client_keys("tcp://127.0.0.1:1")
    assert client is not None
    assert client.server == curve.server_keys(server).public
    assert curve.tenants(server) == {client.public: "alice"}
    secrets = [server / "server.key_secret", alice / "client.key_secret"]
    assert [path.stat().st_mode & 0o777 for path in secrets] == [0o600, 0o600]
    assert main(["keys", "add", str(server), "alice", "--out", str(tmp_path / "again")]) == 2
    assert main(["keys", "add", str(server), "a/b"]) == 2
    assert main(["keys", "remove", str(server), "alicf", "--yes"]) == 4
    assert main(["keys", "remove", str(server), "alice", "--yes"]) == 0
    assert curve.tenants(server) == {}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to another user")
def test_keys_belong_to_the_directorys_owner(tmp_path: Path) -> None:
    """What root adds for a service can be read by the service, whose directory it is."""
    server = tmp_path / "server"
    server.mkdir()
    os.chown(server, 12345, 12346)
    assert main(["keys", "init", str(server)]) == 0
    assert main(["keys", "add", str(server), "alice", "--out", str(tmp_path / "alice")]) == 0
    made = [server / "clients", server / "server.key", server / "server.key_secret", server / "clients" / "alice.key"]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(12345, 12346)}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["init", "FILE/x"], 1), (["ls", "."], 2), (["add", ".", "alice"], 2), (["remove", ".", "alice", "--yes"], 2)],
)
def test_a_directory_without_keys(
    tmp_path: Path, arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said in one line, also when the system says it."""
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["keys", *arguments]) == code
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines()), said.err[:7]) == ("", 1, "error: ")


def test_the_documented_drop_in_opens_the_network_and_nothing_else() -> None:
    """For TCP it changes the settings that close the network; the command of the unit, which names the group, stays."""
    page = (DEPLOY.parent / "docs" / "how-to" / "remote.md").read_text()
    drop_in = dict(
        line.split("=", 1) for line in page.partition("```ini\n[Service]\n")[2].partition("```")[0].splitlines()
    )
    # libzmq asks for the network's interfaces, over netlink, before it listens.
    assert set(drop_in.pop("RestrictAddressFamilies").split()) == {"AF_INET", "AF_INET6", "AF_NETLINK"}
    assert drop_in == {"PrivateNetwork": "no", "IPAddressAllow": "192.0.2.0/24"}


@pytest.mark.parametrize(
    ("address", "user"),
    [
        ("localhost:1000:1000:77", ""),
        ("localhost:0:0:77", ""),
        ("localhost:1001:1000:77", "uid:1001"),
        ("127.0.0.1", None),
        ("::1", None),
        ("fe80::1:2:3", None),
    ],
)
def test_who_is_at_the_socket(address: str, user: str | None) -> None:
    """This user and root have no tenant, other users of the machine are told apart, TCP peers are not of this machine."""
    assert local_user(address, 1000) == user
