"""RDMA devices and the NCCL settings that choose among them: a wrong one is a hang, or TCP at a tenth of the speed."""

from __future__ import annotations

from launcher.host.rdma import RdmaPort, best_gid
from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.inputs import PreflightInputs, Reader

BOUND = "an active device that NCCL can use"


def check_rdma(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Of several nodes with GPUs. What the platform or the user has set is judged, never changed."""
    rdma = inputs.facts.rdma_ports
    if rdma is None or not rdma.ports or inputs.num_nodes == 1 or inputs.device != "cuda":
        return ()
    allowed = [port for port in rdma.ports if _is_allowed(port, inputs.env.get("NCCL_IB_HCA", ""))]
    active = [port for port in allowed if port.is_active]
    measured = ", ".join(_shown(port) for port in rdma.ports[:8])
    if inputs.env.get("NCCL_IB_DISABLE") == "1":
        return _finding(Severity.WARNING, measured, *_disabled())
    if not rdma.verbs:
        return _finding(Severity.WARNING, measured, *_no_verbs(inputs.reader))
    if not active:
        return _finding(Severity.ERROR, measured, *_none_active(inputs, bool(allowed)))
    wrong = _wrong_gid(active, inputs.env.get("NCCL_IB_GID_INDEX", ""))
    if wrong is not None:
        return _finding(wrong[0], measured, wrong[1], wrong[2])
    return (Finding("net.rdma", Severity.OK, measured, BOUND, Text("usable", "可用")),)


def _finding(severity: Severity, measured: str, message: Text, remedy: Text) -> tuple[Finding, ...]:
    return (Finding("net.rdma", severity, measured, BOUND, message, remedy),)


def _disabled() -> tuple[Text, Text]:
    return (
        Text(
            "there are RDMA devices and NCCL_IB_DISABLE=1 keeps NCCL from them: it takes TCP, often a tenth of the "
            "speed",
            "本机有 RDMA 设备，但 NCCL_IB_DISABLE=1 使 NCCL 只走 TCP，速度往往只有十分之一",
        ),
        Text("unset NCCL_IB_DISABLE, unless RDMA is broken here", "取消 NCCL_IB_DISABLE，除非本机 RDMA 确实不可用"),
    )


def _no_verbs(reader: Reader) -> tuple[Text, Text]:
    message = Text(
        "the kernel has RDMA devices and this container was given none (/dev/infiniband/uverbs*): NCCL takes TCP",
        "内核中有 RDMA 设备，但容器内没有 /dev/infiniband/uverbs*：NCCL 会走 TCP",
    )
    remedy = {
        Reader.DLC: Text(
            "ask for them in the DLC job: Settings.EnableRDMA (Lingjun resources), Settings.AllocateAllRDMADevices",
            "在 DLC 任务中开启 Settings.EnableRDMA（灵骏资源），必要时开启 Settings.AllocateAllRDMADevices",
        ),
        Reader.KUBERNETES: Text(
            "ask for the RDMA resource of the device plug-in in the pod (rdma/hca: 1 or alike)",
            "在 Pod 中申请 RDMA 设备插件的资源（如 rdma/hca: 1）",
        ),
    }.get(
        reader,
        Text(
            "start the container with `--device=/dev/infiniband --cap-add=IPC_LOCK`",
            "启动容器时加上 `--device=/dev/infiniband --cap-add=IPC_LOCK`",
        ),
    )
    return message, remedy


def _none_active(inputs: PreflightInputs, some_allowed: bool) -> tuple[Text, Text]:
    hca = inputs.env.get("NCCL_IB_HCA", "")
    if hca and not some_allowed:
        names = (
            ", ".join(sorted({port.device for port in inputs.facts.rdma_ports.ports}))
            if inputs.facts.rdma_ports
            else ""
        )
        return (
            Text(f"NCCL_IB_HCA={hca} names none of the devices: {names}", f"NCCL_IB_HCA={hca} 未匹配任何设备：{names}"),
            Text("unset NCCL_IB_HCA, or name some of these", "取消 NCCL_IB_HCA，或改为上述设备"),
        )
    return (
        Text(
            "no port of the RDMA devices is active: NCCL waits for a connection that does not come",
            "RDMA 设备没有处于 ACTIVE 状态的端口：NCCL 会一直等待连接",
        ),
        Text(
            "`ibstat` or `ibv_devinfo` shows why (cable, switch); another node; or env: {NCCL_IB_DISABLE: 1}, slower",
            "用 `ibstat` 或 `ibv_devinfo` 查看原因（线缆、交换机）；换一个节点；或设置 env: "
            "{NCCL_IB_DISABLE: 1}（较慢）",
        ),
    )


def _wrong_gid(ports: list[RdmaPort], setting: str) -> tuple[Severity, Text, Text] | None:
    """RoCE alone has a choice to make; InfiniBand routes by its own addresses."""
    ethernet = [port for port in ports if port.link_layer == "Ethernet" and port.gids]
    if not ethernet:
        return None
    best = {port.device: gid for port in ethernet if (gid := best_gid(port)) is not None}
    fitting = sorted({gid.index for gid in best.values()})
    use = f"NCCL_IB_GID_INDEX={fitting[0]}" if len(fitting) == 1 else "no NCCL_IB_GID_INDEX (NCCL >= 2.21 finds it)"
    remedy = Text(f"set env: {{{use.replace('=', ': ')}}}", f"设置 env: {{{use.replace('=', ': ')}}}")
    if len(fitting) != 1:
        remedy = Text(f"use {use}", "不要设置 NCCL_IB_GID_INDEX（NCCL >= 2.21 会自动选择）")
    if not setting.isdigit():
        return None
    table = {port.device: {gid.index: gid for gid in port.gids} for port in ethernet}
    bad = [device for device, gids in table.items() if int(setting) not in gids]
    if bad:
        message = Text(
            f"NCCL_IB_GID_INDEX={setting} is an empty row of the GID table of {', '.join(bad)}: connections fail",
            f"NCCL_IB_GID_INDEX={setting} 在 {'、'.join(bad)} 的 GID 表中为空：连接会失败",
        )
        return Severity.ERROR, message, remedy
    first = [device for device, gids in table.items() if device in best and not gids[int(setting)].kind.endswith("v2")]
    if first:
        message = Text(
            f"NCCL_IB_GID_INDEX={setting} is RoCE v1 on {', '.join(first)}, which no router passes, and RoCE v2 is "
            "there",
            f"NCCL_IB_GID_INDEX={setting} 在 {'、'.join(first)} 上是 RoCE v1，无法跨路由，而该设备有 RoCE v2",
        )
        return Severity.WARNING, message, remedy
    return None


def _is_allowed(port: RdmaPort, hca: str) -> bool:
    """NCCL_IB_HCA: prefixes, `=` exact names, `^` all but these; `:port` may follow a name."""
    excludes = hca.startswith("^")
    rest = hca.removeprefix("^")
    exact = rest.startswith("=")
    names = [name.strip().partition(":") for name in rest.removeprefix("=").split(",") if name.strip()]
    if not names:
        return True

    def is_named(name: str, number: str) -> bool:
        same = port.device == name if exact else port.device.startswith(name)
        return same and (not number or number == str(port.port))

    return any(is_named(name, number) for name, _, number in names) != excludes


def _shown(port: RdmaPort) -> str:
    gid = best_gid(port)
    row = f", GID {gid.index} {gid.kind} {gid.ipv4 or gid.address}" if gid and port.link_layer == "Ethernet" else ""
    return f"{port.device}:{port.port} {'active' if port.is_active else 'down'} {port.rate.partition(' (')[0]}{row}"
