#!/usr/bin/env bash
# Installs what tests/cluster (iproute2, iptables, sshd, ssh, pdsh), tests/mounts (fuse3, s3fs) and tests/fault (strace) need,
# where it is missing, with apt-get and as root.
# Elsewhere it says what is missing and ends well: the tests that need it skip with the reason.
# No server is left running: packages are installed under a policy-rc.d that forbids their start.
set -euo pipefail

declare -A package_of=(
  [ip]=iproute2 [tc]=iproute2
  [iptables-restore]=iptables
  [ssh]=openssh-client [ssh-keygen]=openssh-client
  [sshd]=openssh-server
  [pdsh]=pdsh
  [nsenter]=util-linux [unshare]=util-linux [setpriv]=util-linux
  [fusermount3]=fuse3 [s3fs]=s3fs
  [strace]=strace
)

PATH="$PATH:/usr/sbin:/sbin"
missing=()
for command in "${!package_of[@]}"; do
  command -v "$command" >/dev/null || missing+=("${package_of[$command]}")
done
if [ "${#missing[@]}" -eq 0 ]; then
  echo "install-test-tools: everything is there"
  exit 0
fi
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)

if [ "$(id -u)" -ne 0 ]; then
  echo "install-test-tools: missing: ${missing[*]}; not root, so the tests that need them will skip (sudo $0 installs them)"
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "install-test-tools: missing: ${missing[*]}; no apt-get here, so the tests that need them will skip until they are installed"
  exit 0
fi

policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
install=(apt-get install --yes --quiet --no-install-recommends "${missing[@]}")
echo "install-test-tools: ${install[*]}"
# The package lists of a fresh image are empty or old; they are fetched only when the first try fails.
"${install[@]}" >/dev/null || {
  echo "install-test-tools: apt-get update, then once more"
  apt-get update --quiet >/dev/null
  "${install[@]}" >/dev/null
}
case " ${missing[*]} " in
  *" openssh-server "*) systemctl disable ssh.service ssh.socket >/dev/null 2>&1 || true ;;  # nor at the next boot
esac
echo "install-test-tools: installed ${missing[*]}"
