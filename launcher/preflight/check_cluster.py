"""Several nodes together: who is there, what differs, who reaches whom, and whether the network lets them be faster."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from launcher.host.net_speed import PairSpeed
from launcher.i18n import Text
from launcher.preflight.cluster_facts import ClusterFacts, StepNeeds
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.inputs import PreflightInputs, Reader

CLOCK_BOUND_S = 1.0  # logs and events of nodes are put in order by it
SEEN_BOUND_S = 1.0  # NFS with default caches: up to some seconds; votes and markers wait for it
SLOW_SHARE = 0.5  # of the median of all nodes
LATENCY_BOUND_S = 0.002  # above it nodes are not in one place
EFFICIENCY_WANTED = 0.9
_NUM_SHOWN = 8


def check_nodes(inputs: PreflightInputs) -> tuple[Finding, ...]:
    cluster = inputs.cluster
    if cluster is None:
        return ()
    came, bound = len(cluster.nodes), f"{cluster.num_wanted} nodes"
    measured = ", ".join(f"{node.name} ({node.hostname})" for node in cluster.nodes[:_NUM_SHOWN])
    if came >= cluster.num_wanted:
        return (Finding("cluster.nodes", Severity.OK, measured, bound, Text("all have come", "全部到齐")),)
    message = Text(
        f"{came} of {cluster.num_wanted} nodes came together for the check: nothing is known of the others",
        f"{cluster.num_wanted} 个节点中只有 {came} 个参加了检查：其余节点情况未知",
    )
    remedy = Text(
        "run `ftlaunch check` with the same job.yaml on every node at about the same time; a node that was started and "
        "is not here cannot reach the first one at cluster.agent_port",
        "在每个节点上用同一份 job.yaml 几乎同时运行 `ftlaunch check`；已运行却未出现的节点，无法连到首节点的 "
        "cluster.agent_port",
    )
    return (Finding("cluster.nodes", Severity.WARNING, measured, bound, message, remedy),)


def check_differences(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Traits that should be the same everywhere; the nodes that differ from most are named."""
    cluster = inputs.cluster
    if cluster is None or len(cluster.nodes) < 2:
        return ()
    names = list(dict.fromkeys(name for node in cluster.nodes for name in node.traits))
    found = {name: _groups(cluster, name) for name in names}
    differ = {name: groups for name, groups in found.items() if len(groups) > 1 and name != "MTU"}
    bound = "the same on every node"
    if not differ:
        return (Finding("cluster.same", Severity.OK, f"{len(names)} traits compared", bound, Text("the same", "一致")),)
    shown = "; ".join(f"{name}: {_shown_groups(groups)}" for name, groups in differ.items())
    message = Text(f"the nodes differ: {shown}", f"各节点不一致：{shown}")
    remedy = Text(
        "use one image, one driver and one kind of card for all nodes (DLC: the same Image, Driver and EcsSpec in "
        "JobSpecs)",
        "所有节点使用同一镜像、同一驱动和同一型号的卡（DLC：JobSpecs 中相同的 Image、Driver、EcsSpec）",
    )
    return (Finding("cluster.same", Severity.WARNING, f"{len(differ)} differ", bound, message, remedy),)


def check_mtu(inputs: PreflightInputs) -> tuple[Finding, ...]:
    cluster = inputs.cluster
    if cluster is None or len(cluster.nodes) < 2:
        return ()
    groups, bound = _groups(cluster, "MTU"), "the same on every node"
    measured = _shown_groups(groups)
    if not groups:
        return ()
    if len(groups) == 1:
        return (Finding("net.mtu", Severity.OK, measured, bound, Text("the same", "一致")),)
    message = Text(
        "interfaces send packets of different sizes: small messages pass and large ones are lost, so that jobs hang",
        "各节点网卡的 MTU 不一致：小消息能通而大消息丢失，表现为任务卡住",
    )
    remedy = Text(
        "give all the smallest one: `ip link set dev IFACE mtu N` (Kubernetes: the setting of the network plug-in)",
        "统一为最小值：`ip link set dev 网卡 mtu N`（Kubernetes：网络插件的设置）",
    )
    return (Finding("net.mtu", Severity.WARNING, measured, bound, message, remedy),)


def check_clock(inputs: PreflightInputs) -> tuple[Finding, ...]:
    cluster = inputs.cluster
    if cluster is None or len(cluster.nodes) < 2:
        return ()
    bound = f"<= {CLOCK_BOUND_S:g} s"
    worst = max(cluster.nodes, key=lambda node: abs(node.clock_offset_s))
    measured = f"{worst.name}: {worst.clock_offset_s:+.3f} s (known to {worst.clock_error_s:.3f} s)"
    if abs(worst.clock_offset_s) - worst.clock_error_s <= CLOCK_BOUND_S:
        return (Finding("cluster.clock", Severity.OK, measured, bound, Text("they agree", "一致")),)
    message = Text(
        f"the clock of {worst.name} is off: logs and events of the nodes cannot be put in order, tokens and "
        "certificates fail",
        f"{worst.name} 的时钟有偏差：各节点的日志和事件无法排序，令牌与证书也会失效",
    )
    remedy = Text(
        "start chrony or ntpd on that machine: `chronyc tracking`", "在该机器上启用 chrony 或 ntpd：`chronyc tracking`"
    )
    return (Finding("cluster.clock", Severity.WARNING, measured, bound, message, remedy),)


def check_reach(inputs: PreflightInputs) -> tuple[Finding, ...]:
    cluster = inputs.cluster
    if cluster is None or len(cluster.nodes) < 2:
        return ()
    pairs, bound = len(cluster.nodes) * (len(cluster.nodes) - 1), "every node reaches every other"
    if not cluster.unreachable:
        return (Finding("net.reach", Severity.OK, f"{pairs} of {pairs} ways", bound, Text("all", "全部可达")),)
    shown = "; ".join(f"{source} -> {target}: {why}" for source, target, why in cluster.unreachable[:_NUM_SHOWN])
    message = Text(
        f"ranks connect to each other on ports that the system chooses, and these ways are closed: {shown}",
        f"各 rank 之间用系统分配的端口互连，以下方向不通：{shown}",
    )
    how = Text(
        "open all TCP ports between the nodes (firewall, `iptables -L`), and see that cluster.interface is the "
        "right one",
        "放开节点之间的全部 TCP 端口（防火墙、`iptables -L`），并确认 cluster.interface 正确",
    )
    if inputs.reader is Reader.DLC:
        how = Text(
            "let the security group of UserVpc pass all TCP between its members, and choose cluster.interface "
            "(eth0, eth1)",
            "在 UserVpc 的安全组中放开组内全部 TCP，并选择正确的 cluster.interface（eth0 或 eth1）",
        )
    if inputs.reader is Reader.KUBERNETES:
        how = Text(
            "let NetworkPolicy pass all TCP between the pods of the job",
            "在 NetworkPolicy 中放开任务各 Pod 之间的全部 TCP",
        )
    measured = f"{pairs - len(cluster.unreachable)} of {pairs} ways"
    return (Finding("net.reach", Severity.ERROR, measured, bound, message, how),)


def check_visible(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """What one node has written below output_dir, seen by the others."""
    cluster = inputs.cluster
    if cluster is None or len(cluster.nodes) < 2 or not (cluster.unseen or cluster.seen_after_s):
        return ()
    bound = f"seen by every node within {SEEN_BOUND_S:g} s"
    if cluster.unseen:
        shown = "; ".join(f"{name}: {why}" for name, why in cluster.unseen.items())
        message = Text(
            f"output_dir is not the same folder on every node, or not seen in time: {shown}",
            f"各节点的 output_dir 不是同一目录，或迟迟看不到内容：{shown}",
        )
        remedy = Text(
            "mount the same volume at the same path on every node"
            + (" (DLC: the same DataSources for all JobSpecs)" if inputs.reader is Reader.DLC else ""),
            "在每个节点的相同路径挂载同一存储"
            + ("（DLC：所有 JobSpecs 使用相同的 DataSources）" if inputs.reader is Reader.DLC else ""),
        )
        measured = f"not by {', '.join(cluster.unseen)}"
        return (Finding("disk.visible", Severity.ERROR, measured, bound, message, remedy),)
    latest, after_s = max(cluster.seen_after_s.items(), key=lambda item: item[1])
    measured = f"after {after_s:.2f} s by {latest}"
    if after_s <= SEEN_BOUND_S:
        return (Finding("disk.visible", Severity.OK, measured, bound, Text("seen", "可见")),)
    message = Text(
        f"what one node writes is seen by {latest} {after_s:.1f} s later: agreed saves and changes of the nodes "
        "wait for it",
        f"一个节点写入的内容 {latest} 在 {after_s:.1f} 秒后才看到：协商保存和节点变更都要等待",
    )
    remedy = Text(
        "mount it with shorter caches (NFS: acdirmax=1, lookupcache=positive), or use CPFS",
        "缩短挂载的缓存时间（NFS：acdirmax=1、lookupcache=positive），或使用 CPFS",
    )
    return (Finding("disk.visible", Severity.WARNING, measured, bound, message, remedy),)


def check_link(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Point to point; a node that is slow with every partner is named."""
    cluster = inputs.cluster
    if cluster is None or not cluster.speeds:
        return ()
    best = best_of_each(cluster.speeds)
    median = statistics.median(best.values())
    slow = sorted(name for name, speed in best.items() if speed < SLOW_SHARE * median) if len(best) > 2 else []
    latency_s = max(speed.latency_s for speed in cluster.speeds)
    slowest = min(cluster.speeds, key=lambda speed: speed.bytes_per_s)
    measured = (
        f"{_bits(median)} between nodes, slowest {_bits(slowest.bytes_per_s)} ({slowest.source} -> {slowest.target}), "
        f"latency {latency_s * 1e3:.2f} ms"
    )
    bound = f"every node >= {SLOW_SHARE:.0%} of the median, <= {LATENCY_BOUND_S * 1e3:g} ms"
    if slow:
        shown = ", ".join(f"{name} ({_bits(best[name])})" for name in slow)
        message = Text(
            f"slow with every partner: {shown}, the others {_bits(median)}: every step waits for the slowest",
            f"与任何节点通信都慢：{shown}，其余为 {_bits(median)}：每一步都要等最慢的节点",
        )
        return (Finding("net.speed", Severity.WARNING, measured, bound, message, _without(inputs, slow)),)
    if latency_s > LATENCY_BOUND_S:
        message = Text(
            "the nodes are far from each other: small messages, of which a step has hundreds, take that long each",
            "节点之间相距较远：每一步有数百个小消息，每个都要这么久",
        )
        remedy = Text("place the nodes together (one zone, one switch)", "把节点放在一起（同一可用区、同一交换机）")
        return (Finding("net.speed", Severity.WARNING, measured, bound, message, remedy),)
    return (Finding("net.speed", Severity.OK, measured, bound, Text("alike", "相近")),)


def check_scaling(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """What the network lets several nodes gain over one."""
    cluster, needs = inputs.cluster, inputs.step_needs
    if cluster is None or not cluster.speeds or needs is None:
        return ()
    nodes = len(cluster.nodes)
    if cluster.summed_bytes_per_s is not None:
        # What all-reduce reached in the link of each node: the ring of one rank a node sends 2 (N - 1) / N.
        bandwidth = 2 * (nodes - 1) / nodes * cluster.summed_bytes_per_s
    elif _uses_rdma(inputs):
        return ()
    else:
        bandwidth = min(best_of_each(cluster.speeds).values())
    gain = forecast_gain(needs, nodes, bandwidth)
    wanted = bandwidth_for(needs, EFFICIENCY_WANTED)
    target = EFFICIENCY_WANTED * nodes
    measured = f"{_bits(bandwidth)}: {nodes} nodes at {gain:.2g} x one node"
    bound = f"{_bits(wanted)} for {target:.2g} x"
    what = Text(
        f"a step sums {needs.gradient_bytes / 2**20:.0f} MiB (gradients, gathered weights) over {needs.world_size} "
        "ranks and takes "
        f"{needs.step_s:.2g} s on one node ({needs.source})",
        f"每步要在 {needs.world_size} 个 rank 间汇总 {needs.gradient_bytes / 2**20:.0f} MiB（梯度及聚合的权重），"
        "单节点每步约 "
        f"{needs.step_s:.2g} 秒（{needs.source}）",
    )
    if gain >= target or bandwidth >= wanted:
        return (Finding("net.scaling", Severity.OK, measured, bound, what),)
    slower = gain < 1
    message = Text(
        f"{what.en}: {nodes} nodes would run at {gain:.2g} x one node; needs {_bits(wanted)} for {target:.2g} x",
        f"{what.zh}：{nodes} 个节点只有单节点的 {gain:.2g} 倍；要达到 {target:.2g} 倍需要 {_bits(wanted)}",
    )
    first = Text("train on one node, or ", "改用单节点，或") if slower else Text("", "")
    remedy = Text(
        f"{first.en}take nodes with a faster network (RDMA; DLC: Lingjun, Settings.EnableRDMA), raise "
        "training.gradient_accumulation_steps (fewer sums), or use lora, whose gradients are small",
        f"{first.zh}使用更快的网络（RDMA；DLC：灵骏、Settings.EnableRDMA），调大 training.gradient_accumulation_steps"
        "（减少汇总次数），或改用梯度很小的 lora",
    )
    return (Finding("net.scaling", Severity.WARNING, measured, bound, message, remedy),)


def best_of_each(speeds: Sequence[PairSpeed]) -> dict[str, float]:
    """Node -> the weaker of sending and receiving, each with its best partner: a node is slow only if it is so with
    everyone that it was paired with."""
    sent: Mapping[str, list[float]] = defaultdict(list)
    received: Mapping[str, list[float]] = defaultdict(list)
    for speed in speeds:
        sent[speed.source].append(speed.bytes_per_s)
        received[speed.target].append(speed.bytes_per_s)
    names = {*sent, *received}
    return {name: min(max(side[name]) for side in (sent, received) if side[name]) for name in names}


def forecast_gain(needs: StepNeeds, num_nodes: int, bytes_per_s: float) -> float:
    """Throughput of `num_nodes` nodes over that of one. A ring sends 2 (W - 1) / W of the gradients through each node's
    link (Patarasuk and Yuan, 2009); nothing is taken to overlap with the computation, which is the worst case."""
    share = 2 * (needs.world_size - 1) / needs.world_size
    network_s = share * needs.gradient_bytes / max(bytes_per_s, 1.0)
    return num_nodes * needs.step_s / (needs.step_s + network_s)


def bandwidth_for(needs: StepNeeds, efficiency: float) -> float:
    """Bytes a second at which several nodes reach `efficiency` of their number."""
    share = 2 * (needs.world_size - 1) / needs.world_size
    return share * needs.gradient_bytes * efficiency / (needs.step_s * (1 - efficiency))


def pairings(names: Sequence[str], speed_of: Mapping[str, float] | None = None) -> list[tuple[str, str]]:
    """Each node with one other. The second time, by what the first one has shown: the slowest with the fastest, so that
    a good partner of a slow node is cleared. With an odd number one node has two partners."""
    order = sorted(names, key=lambda name: speed_of[name]) if speed_of else list(names)
    half = len(order) // 2
    if speed_of:
        pairs = [(order[place], order[-1 - place]) for place in range(half)]
        middle = [order[half]] if len(order) % 2 else []
    else:
        pairs = [(order[2 * place], order[2 * place + 1]) for place in range(half)]
        middle = [order[-1]] if len(order) % 2 else []
    return pairs + [(name, order[0] if order[0] != name else order[-1]) for name in middle if len(order) > 1]


def _uses_rdma(inputs: PreflightInputs) -> bool:
    """TCP says nothing of what NCCL sends over RDMA then."""
    rdma = inputs.facts.rdma_ports
    active = rdma is not None and rdma.verbs and any(port.is_active for port in rdma.ports)
    return bool(active and inputs.device == "cuda" and inputs.env.get("NCCL_IB_DISABLE") != "1")


def _groups(cluster: ClusterFacts, name: str) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for node in cluster.nodes:
        if name in node.traits:
            groups.setdefault(node.traits[name], []).append(node.name)
    return groups


def _shown_groups(groups: Mapping[str, Sequence[str]]) -> str:
    """The rarest first: those are the ones to look at."""
    counted = sorted(groups.items(), key=lambda item: len(item[1]))
    return ", ".join(f"{value} ({_some(nodes)})" for value, nodes in counted)


def _some(names: Sequence[str]) -> str:
    return " ".join(names[:_NUM_SHOWN]) + (f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else "")


def _without(inputs: PreflightInputs, slow: Sequence[str]) -> Text:
    names = ", ".join(slow)
    if inputs.reader is Reader.DLC:
        return Text(
            f"submit again without {names} (JobSpecs[].AssignNodeSpec.AntiAffinityNodeNames), and report it",
            f"排除 {names} 后重新提交（JobSpecs[].AssignNodeSpec.AntiAffinityNodeNames），并上报",
        )
    return Text(
        f"leave {names} out, or look at its interface: `ethtool`, `ip -s link` (errors, speed, a shared link)",
        f"排除 {names}，或检查其网卡：`ethtool`、`ip -s link`（错误、速率、是否共用链路）",
    )


def _bits(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kb/s"
