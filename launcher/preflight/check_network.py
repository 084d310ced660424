"""The interface to the other nodes, what NCCL and gloo were told about it, the ports of the ranks and the agents."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.host.facts import HostFacts, Nic
from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.inputs import PreflightInputs, Reader

UNREACHABLE = {
    "loopback": Text("reaches only this machine", "只能到达本机"),
    "docker": Text("is a bridge of containers on this machine", "是本机容器的网桥"),
    "link-local": Text("has only link-local addresses", "只有链路本地地址"),
}


def check_interface(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """The interface that `cluster.interface` names, or that was found for it."""
    name = inputs.interface
    if name in ("", "auto"):
        return ()
    nic = inputs.facts.nic(name)
    problem = _why_not_usable(name, nic, inputs.num_nodes)
    if problem is None:
        measured = f"{name} {', '.join(nic.addresses) if nic else ''}".strip() + _not_taken(inputs, name)
        return (Finding("net.interface", Severity.OK, measured, "up, with an address", Text("usable", "可用")),)
    candidates = _candidates(inputs.facts)
    remedy = Text(
        f"set cluster.interface to one of: {candidates.en}; or to auto, which takes the route to the master",
        f"把 cluster.interface 设为以下之一：{candidates.zh}；或设为 auto（按到主节点的路由选择）",
    )
    measured = f"{name}: {nic.kind if nic else 'missing'}{'' if nic is None or nic.up else ', down'}"
    bound = "up, reachable from other nodes" if inputs.num_nodes > 1 else "exists and is up"
    return (Finding("net.interface", Severity.ERROR, measured, bound, problem, remedy),)


def _not_taken(inputs: PreflightInputs, name: str) -> str:
    """With several nodes: the other interfaces that they could reach, and why this one was taken."""
    if inputs.num_nodes == 1:
        return ""
    others = [nic for nic in inputs.facts.nics if nic.name != name and _why_not_usable(nic.name, nic, 2) is None]
    why = f" by {inputs.interface_reason}" if inputs.interface_reason else ""
    return why + (f", not {', '.join(f'{nic.name} ({nic.addresses[0]})' for nic in others)}" if others else "")


def check_ifname_env(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """What was set is never changed; where it cannot work it is said before NCCL hangs or gives up on it."""
    findings = []
    for name, match, device in (
        ("NCCL_SOCKET_IFNAME", nccl_interfaces, "cuda"),
        ("GLOO_SOCKET_IFNAME", gloo_interfaces, "cpu"),
    ):
        value = inputs.env.get(name, "").strip()
        if value:
            used = inputs.device == device
            findings.append(_judge_ifname(inputs, name, value, match(value, inputs.facts.nics), used=used))
    return tuple(findings)


def check_port(inputs: PreflightInputs) -> tuple[Finding, ...]:
    if inputs.master_port is None or inputs.port_free is None:
        return ()
    port, where = inputs.master_port, inputs.master_addr or "this node"
    if inputs.port_free:
        return (Finding("net.port", Severity.OK, f"{port} free", "free", Text("the port is free", "端口空闲")),)
    message = Text(
        f"port {port} on {where} is taken: the ranks could not meet there",
        f"{where} 的端口 {port} 已被占用：各 rank 无法在此汇合",
    )
    whose = "MASTER_PORT" if inputs.env.get("MASTER_PORT") == str(port) else "cluster.master_port"
    remedy = Text(
        f"`ss -ltnp 'sport = :{port}'` shows who holds it; end that process, or set {whose} to a free port "
        "(cluster.master_port: null chooses one)",
        f"`ss -ltnp 'sport = :{port}'` 可查看占用者；结束该进程，或把 {whose} 改为空闲端口"
        "（cluster.master_port: null 会自动选择）",
    )
    return (Finding("net.port", Severity.ERROR, f"{port} in use", "free", message, remedy),)


def check_agent_port(inputs: PreflightInputs) -> tuple[Finding, ...]:
    if inputs.agent_port is None or inputs.agent_port_free is None:
        return ()
    port = inputs.agent_port
    if inputs.agent_port_free:
        return (Finding("net.agent_port", Severity.OK, f"{port} free", "free", Text("the port is free", "端口空闲")),)
    if inputs.agent_here:
        measured = f"{port} in use: this run's agent is here ({inputs.agent_here})"
        own = Text("the run is going on on this node", "本任务正在本机上运行")
        return (Finding("net.agent_port", Severity.OK, measured, "free", own),)
    message = Text(
        f"port {port} on this node is taken, and the nodes' agents meet there: another run, or an earlier start of "
        "this one",
        f"本机端口 {port} 已被占用，而各节点的 agent 要在此汇合：可能是另一个任务，或本任务较早的一次启动",
    )
    remedy = Text(
        f"`ss -ltnp 'sport = :{port}'` shows who holds it; end that process, or set cluster.agent_port to a port that "
        "is free on every node",
        f"`ss -ltnp 'sport = :{port}'` 可查看占用者；结束该进程，或把 cluster.agent_port 设为所有节点上都空闲的端口",
    )
    return (Finding("net.agent_port", Severity.ERROR, f"{port} in use", "free", message, remedy),)


def nccl_interfaces(value: str, nics: Sequence[Nic]) -> tuple[Nic, ...]:
    """NCCL_SOCKET_IFNAME: a list of prefixes; `=` before it means exact names, `^` means all but these."""
    excludes = value.startswith("^")
    rest = value.removeprefix("^")
    exact = rest.startswith("=")
    names = [name.strip() for name in rest.removeprefix("=").split(",") if name.strip()]

    def is_named(nic: Nic) -> bool:
        return any(nic.name == name if exact else nic.name.startswith(name) for name in names)

    return tuple(nic for nic in nics if is_named(nic) != excludes and nic.addresses)


def gloo_interfaces(value: str, nics: Sequence[Nic]) -> tuple[Nic, ...]:
    """GLOO_SOCKET_IFNAME: a list of exact names, all of which must exist; empty here where one does not."""
    by_name = {nic.name: nic for nic in nics if nic.addresses}
    names = [name.strip() for name in value.split(",") if name.strip()]
    return tuple(by_name[name] for name in names) if all(name in by_name for name in names) else ()


def _judge_ifname(
    inputs: PreflightInputs, variable: str, value: str, matches: tuple[Nic, ...], *, used: bool
) -> Finding:
    measured = f"{variable}={value}"
    usable = [nic for nic in matches if _why_not_usable(nic.name, nic, inputs.num_nodes) is None]
    if usable:
        names = ", ".join(nic.name for nic in usable)
        return Finding("net.ifname_env", Severity.OK, measured, "names an interface", Text(names, names))
    if matches:
        names = ", ".join(nic.name for nic in matches)
        message = Text(
            f"{variable}={value} allows only {names}, which other nodes cannot reach",
            f"{variable}={value} 只允许 {names}，其他节点无法访问",
        )
    else:
        message = Text(
            f"{variable}={value} names no interface with an address on {inputs.facts.hostname}",
            f"{variable}={value} 在 {inputs.facts.hostname} 上没有匹配到任何带地址的网卡",
        )
    candidates = _candidates(inputs.facts)
    who = _who_sets_it(inputs.reader)
    remedy = Text(
        f"unset {variable} ({who.en}) or set it to one of: {candidates.en}; ftlaunch leaves what you set as it is",
        f"取消 {variable}（{who.zh}），或设为以下之一：{candidates.zh}；ftlaunch 不会改动您设置的值",
    )
    severity = Severity.ERROR if used else Severity.WARNING
    return Finding("net.ifname_env", severity, measured, "names an interface", message, remedy)


def _who_sets_it(reader: Reader) -> Text:
    if reader is Reader.DLC:
        return Text("in the job's environment variables or the image", "在任务的环境变量或镜像中")
    return Text("in `env:` of job.yaml, the shell or the image", "在 job.yaml 的 `env:`、shell 或镜像中")


def _why_not_usable(name: str, nic: Nic | None, num_nodes: int) -> Text | None:
    if nic is None:
        return Text(f"there is no interface {name} on this node", f"本机没有网卡 {name}")
    if not nic.up:
        return Text(f"interface {name} is down", f"网卡 {name} 未启用")
    if num_nodes == 1:
        return None
    if nic.kind in UNREACHABLE:
        why = UNREACHABLE[nic.kind]
        return Text(f"interface {name} {why.en}: other nodes cannot connect", f"网卡 {name} {why.zh}：其他节点无法连接")
    if not nic.addresses:
        return Text(f"interface {name} has no address", f"网卡 {name} 没有地址")
    return None


def _candidates(facts: HostFacts) -> Text:
    names = [f"{nic.name} ({nic.addresses[0]})" for nic in facts.nics if _why_not_usable(nic.name, nic, 2) is None]
    if names:
        return Text(", ".join(names), "、".join(names))
    return Text("(none here that other nodes can reach)", "（本机没有其他节点可达的网卡）")
