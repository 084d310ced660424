# Keeps one node's namespaces alive until its standard input ends. Run as: unshare --net [--mount --uts] sh holder.sh
#   NAME HOST FOLDER SHM   HOST: the node's host name, empty for the switch; FOLDER: hosts file and, with ssh, ssh_config;
#                          SHM: options of the node's own /dev/shm
# Mounts are private to the node (unshare's default), so nothing of them is seen outside.
set -eu
host=$2 folder=$3 shm=$4
ip link set lo up
if [ -n "$host" ]; then
  echo "$host" >/proc/sys/kernel/hostname
  # A sysfs of this network namespace (so /sys/class/net shows the node's links), with the cgroup tree put back.
  mkdir -p "$folder/cgroup"
  mount --rbind /sys/fs/cgroup "$folder/cgroup"
  mount -t sysfs sysfs /sys
  mount --move "$folder/cgroup" /sys/fs/cgroup
  mount -t tmpfs -o "mode=1777,$shm" tmpfs /dev/shm
  mount --bind "$folder/hosts" /etc/hosts
  if [ -e "$folder/ssh_config" ]; then
    mount --bind "$folder/ssh_config" /etc/ssh/ssh_config
    [ ! -d "$HOME/.ssh" ] || mount -t tmpfs -o mode=700 tmpfs "$HOME/.ssh"  # never the developer's own keys
  fi
  mount -t tmpfs -o mode=755 tmpfs /run
  mkdir /run/sshd /run/lock
fi
echo ready
read -r _ || true
