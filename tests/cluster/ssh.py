"""Keys, known hosts and configuration of ssh for one test cluster; the machine's own are neither read nor changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def find_sshd() -> str | None:
    """sshd starts itself again for each connection, so it wants its whole path."""
    return shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


@dataclass(frozen=True)
class SshFiles:
    """Files below `folder`, readable by root alone."""

    folder: Path

    @property
    def config(self) -> Path:
        """For `ssh -F`; inside the nodes it is /etc/ssh/ssh_config as well, so plain `ssh NAME` works there."""
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def user_key(self) -> Path:
        return self.folder / "user_key"

    def sshd_config(self, name: str) -> Path:
        return self.folder / f"sshd_config.{name}"

    def log(self, name: str) -> Path:
        return self.folder / f"sshd.{name}.log"

    def host_key(self, name: str) -> Path:
        return self.folder / f"host_key.{name}"


def write_ssh_files(folder: Path, addresses: Mapping[str, str]) -> SshFiles:
    """`addresses`: node name to IP. One key for the user, one for each host, all known to all."""
    folder.mkdir(mode=0o700)
    files = SshFiles(folder)
    _make_key(files.user_key)
    authorized_keys = folder / "authorized_keys"
    authorized_keys.write_text(_public(files.user_key) + "\n")
    known: list[str] = []
    for name, address in addresses.items():
        _make_key(files.host_key(name))
        known.append(f"{name},{address} {_public(files.host_key(name))}")
        files.sshd_config(name).write_text(
            f"""\
ListenAddress {address}
HostKey {files.host_key(name)}
AuthorizedKeysFile {authorized_keys}
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
# The folder is below /tmp, which others may write to.
StrictModes no
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
LogLevel VERBOSE
"""
        )
    files.known_hosts.write_text("\n".join(known) + "\n")
    hosts = "\n".join(f"Host {name}\n    HostName {address}\n" for name, address in addresses.items())
    files.config.write_text(
        f"""\
{hosts}
Host *
    User root
    IdentityFile {files.user_key}
    IdentitiesOnly yes
    UserKnownHostsFile {files.known_hosts}
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    UpdateHostKeys no
    BatchMode yes
    ConnectTimeout 5
    LogLevel ERROR
"""
    )
    return files


def _make_key(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ftlaunch test cluster", "-f", str(path)], check=True
    )


def _public(key: Path) -> str:
    return Path(f"{key}.pub").read_text().strip()
