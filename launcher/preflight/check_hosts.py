"""What a head that is none of the nodes can say of them: whether this machine knows where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity

HOSTS_ID = "net.hosts"
_NUM_SHOWN = 16  # of those that are in order


def check_hosts(hosts: Sequence[str], addresses: Mapping[str, str]) -> tuple[Finding, ...]:
    """`addresses`: IPv4 of the hosts that have one here. Without one it is a warning: ssh may know the host by an
    alias, and the name may come with its machine."""
    found, bound = [], "an IPv4 address"
    in_order = [(rank, host) for rank, host in enumerate(hosts) if host in addresses]
    for rank, host in enumerate(hosts):
        if host not in addresses:
            message = Text(
                f"this machine does not know where n{rank} ({host}) is; the nodes look for each other by these names",
                f"本机解析不出 n{rank}（{host}）的地址；各节点要靠这些名字互相找到对方",
            )
            remedy = Text(
                f"`getent ahostsv4 {host}` tests it, here and on the nodes; mend the name server or /etc/hosts there, "
                "or write the address into the list",
                f"在本机和各节点上用 `getent ahostsv4 {host}` 检验；修正名字服务或 /etc/hosts，或在列表中直接写地址",
            )
            measured = f"n{rank} ({host}): no address"
            found.append(Finding(HOSTS_ID, Severity.WARNING, measured, bound, message, remedy))
    shown = [f"n{rank} ({host}): {addresses[host]}" for rank, host in in_order]
    if len(shown) > _NUM_SHOWN:
        shown = [f"{len(shown)} of {len(hosts)} hosts have one"]
    known = Text("its address is known here", "本机能解析出地址")
    return (*found, *(Finding(HOSTS_ID, Severity.OK, measured, bound, known) for measured in shown))
