"""NCCL, gloo, rendezvous, names and ports. Most of what they print is a victim's view of a rank that died elsewhere."""

from __future__ import annotations

from launcher.diagnose.fault import Fault
from launcher.i18n import Text

_CONNECT = r"(?:[Cc]onnect to|Call to connect to) (?P<addr>[^\s<]+)(?:<\d+>)? (?:failed|returned)"
_NOWHERE = r"(?:[Cc]onnect to|Call to connect to) (?P<addr>(?:127\.|169\.254\.|172\.17\.|fe80:|::1)[^\s<]*)"
_CLIENT_TIMEOUT = (
    r"client socket has (?:timed out after|failed to connect to)",
    r"Timed out after \d+ seconds waiting for clients",
)

# Before the entries for files: a pipe of multiprocessing ends like a file that is cut short.
PIPES: tuple[Fault, ...] = (
    Fault(
        cls="rdzv_connection_lost",
        action="retry",
        victims=(r"^(?:EOFError$|ConnectionResetError: |BrokenPipeError: )",),
        near=r"multiprocessing/(?:connection|managers|pool|resource_sharer)|/queues\.py|_recv_bytes",
        cause=Text(
            "{where} lost another process of its own node (a worker or a manager), which ended first.",
            "{where} 失去了本节点的另一个进程（worker 或 manager），该进程先退出。",
        ),
        remedy=Text(
            "Run it again. For the cause, look at what the processes of that node printed before, and at its memory.",
            "可直接重新运行。要找出原因，请查看该节点各进程之前的输出及其内存。",
        ),
    ),
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        cls="nccl_version_mismatch",
        action="stop",
        errors=(
            r"undefined symbol: \"?nccl\w+",
            r"Mismatched NCCL version detected",
            r"(?<!or\x20)NCCL [Vv]ersion mismatch",  # "... has closed the connection, or NCCL version mismatch"
            r"ncclCommInitRank\S* .{0,60}wrong version",
        ),
        vague=(r"invalid usage(?:, NCCL version|\b.{0,40}run with NCCL_DEBUG)", r"^ncclInvalidUsage"),
        cause=Text(
            "{where}: the libnccl found at run time is not the one that torch was built with, or differs between "
            "nodes.",
            "{where}：运行时找到的 libnccl 与 torch 编译所用的不一致，或各节点版本不同。",
        ),
        remedy=Text(
            "Keep one libnccl: the nvidia-nccl wheel of this torch. Take others out of LD_LIBRARY_PATH and "
            "LD_PRELOAD; use one image on all nodes.",
            "只保留一个 libnccl：与 torch 配套的 nvidia-nccl 包。从 LD_LIBRARY_PATH 和 LD_PRELOAD 中移除其他版本；"
            "所有节点使用同一镜像。",
        ),
    ),
    Fault(
        cls="nccl_wrong_interface",
        action="adjust:NCCL_SOCKET_IFNAME",
        errors=(
            r"no socket interface found",
            r"No usable listening interface found",
            r"no device found matching",
            _NOWHERE + r"\S* (?:failed|returned|: )",
            _CONNECT
            + r"(?: ?:| \d+ ?\() ?(?:No route to host|Network is unreachable|Software caused connection abort)",
            r"Call to bind failed ?: Cannot assign requested address",
        ),
        cause=Text(
            "{where}: NCCL uses a network interface that does not reach the other nodes (loopback, docker, "
            "link-local, or a missing name).",
            "{where}：NCCL 使用了无法到达其他节点的网卡（回环、docker、链路本地，或名称不存在）。",
        ),
        remedy=Text(
            "Set cluster.interface (or env.NCCL_SOCKET_IFNAME) to the interface that has the route to the master: "
            "`ip route get MASTER_ADDR` names it.",
            "将 cluster.interface（或 env.NCCL_SOCKET_IFNAME）设为通往主节点的网卡：`ip route get MASTER_ADDR` "
            "可查看。",
        ),
    ),
    Fault(
        cls="nccl_connection_refused",
        action="adjust:firewall",
        errors=(
            _CONNECT + r"(?: ?:| \d+ ?\() ?(?:Connection refused|Connection timed out)",
            r"Call to \w+ (?:from|to) (?P<addr>[^\s<]+)(?:<\d+>)? failed : Connection refused",
            r"[Cc]onnect to (?P<addr>\S+) returned .{0,60}exceeded error retry count",
        ),
        hints=(r"Call to connect returned (?:Connection refused|Connection timed out), retrying",),
        cause=Text(
            "{where}: NCCL could not connect to {addr}: nothing listens there, or a firewall is between.",
            "{where}：NCCL 无法连接 {addr}：对端没有监听，或被防火墙阻断。",
        ),
        remedy=Text(
            "Open all TCP ports between the nodes (NCCL picks them at random), and check that {addr} is the address "
            "by which the nodes reach each other; else set cluster.interface.",
            "放通节点间的所有 TCP 端口（NCCL 随机选用），并确认 {addr} 是节点间互通的地址；否则请设置 "
            "cluster.interface。",
        ),
    ),
    Fault(
        cls="nccl_ib_failure",
        action="adjust:ib_gdr",
        errors=(r"Got completion from peer \S+ with (?:error 4\b|status=\w+\(4\))", r"ibv_reg_mr\w* failed"),
        cause=Text(
            "{where}: the RDMA card could not access GPU memory (GPUDirect RDMA: IOMMU, ACS or nvidia_peermem).",
            "{where}：RDMA 网卡无法访问显存（GPUDirect RDMA：IOMMU、ACS 或 nvidia_peermem）。",
        ),
        remedy=Text(
            "Set env.NCCL_NET_GDR_LEVEL: LOC to go without GPUDirect; then load nvidia_peermem and turn IOMMU and "
            "ACS off.",
            "设置 env.NCCL_NET_GDR_LEVEL: LOC 关闭 GPUDirect；之后加载 nvidia_peermem，并关闭 IOMMU 与 ACS。",
        ),
    ),
    Fault(
        cls="nccl_ib_failure",
        action="adjust:NCCL_IB_GID_INDEX",
        errors=(
            r"Call to ibv_modify_qp failed with (?:error )?(?:22 |19 )?(?:Invalid argument|No such device)",
            r"GID table changed|no valid GID|Unable to find (?:a )?valid GID",
        ),
        cause=Text(
            "{where}: RoCE uses a GID index that this card does not have.",
            "{where}：RoCE 使用了该网卡不存在的 GID 索引。",
        ),
        remedy=Text(
            "Find the RoCE v2 entry with `show_gids` and set env.NCCL_IB_GID_INDEX to it (mostly 3); name the right "
            "cards in env.NCCL_IB_HCA.",
            "用 `show_gids` 找到 RoCE v2 条目并设置 env.NCCL_IB_GID_INDEX（通常为 3）；在 env.NCCL_IB_HCA "
            "中指定正确的网卡。",
        ),
    ),
    Fault(
        cls="nccl_ib_failure",
        action="adjust:NCCL_IB_HCA",
        errors=(
            r"Call to ibv_modify_qp failed with (?:error )?(?:101 )?Network is unreachable",
            r"NET/IB : No device found",
        ),
        cause=Text(
            "{where}: NCCL chose an RDMA card that has no path to the peer.",
            "{where}：NCCL 选择了无法到达对端的 RDMA 网卡。",
        ),
        remedy=Text(
            "Name the cards of the training network in env.NCCL_IB_HCA (`ibdev2netdev` lists them; leave the "
            "storage and management ones out).",
            "在 env.NCCL_IB_HCA 中指定训练网络的网卡（用 `ibdev2netdev` 查看；排除存储与管理网卡）。",
        ),
    ),
    Fault(
        cls="nccl_ib_failure",
        action="adjust:NCCL_CROSS_NIC",
        errors=(r"Call to ibv_modify_qp failed with (?:error )?(?:110 )?Connection timed out",),
        cause=Text(
            "{where}: an RDMA connection between two cards that cannot reach each other timed out (rails are not "
            "joined).",
            "{where}：两块互不可达的 RDMA 网卡之间连接超时（不同轨之间不通）。",
        ),
        remedy=Text(
            "Set env.NCCL_CROSS_NIC: 0 where each card reaches only its own rail; else check the switch between the "
            "two GIDs of the line.",
            "若每块网卡只能到达自己的轨，请设置 env.NCCL_CROSS_NIC: 0；否则请检查该行两个 GID 之间的交换机。",
        ),
    ),
    Fault(
        cls="nccl_ib_failure",
        action="retry_excluding_node",
        errors=(
            r"Got completion from peer \S+ with (?:error|status=\w+\() ?(?!5\b)\d+",
            r"Call to ibv_\w+ failed",
            r"NET/IB ?: \S+ (?:async fatal event|Got (?:fatal )?async(?:hronous)? event)",
            r"transport retry counter exceeded|IBV_WC_RETRY_EXC_ERR",
            r"mlx5_core \S+: Port module event\[error\]|mlx5_\d+.{0,40}[Ll]ink (?:is )?[Dd]own",
            r"UCX +ERROR",
            r"The error is fatal \(.{0,60}Cannot continue",
            r"NET/OFI .{0,120}(?:error|failed|fi_\w+)",
        ),
        victims=(r"Got completion from peer \S+ with (?:error 5\b|status=\w+\(5\))",),
        cause=Text(
            "{where}: the RDMA path to a peer broke: a link, a port or the peer itself is gone.",
            "{where}：到对端的 RDMA 通路中断：链路、端口或对端节点已失效。",
        ),
        remedy=Text(
            "Run it again without that node. Check its link (`ibstat`, `rdma link`, error counters) before it comes "
            "back.",
            "请排除该节点后重新运行。恢复前请检查其链路（`ibstat`、`rdma link`、错误计数）。",
        ),
    ),
    Fault(
        cls="nccl_network_reset",
        action="retry",
        vague=(
            r"Call to (?:recv|send)\w*(?: (?:from|to) \S+)? failed : "
            r"(?:Connection timed out|No route to host|Network is \w+)",
            r"Call to (?:recv|send)\w* failed : Connection reset by peer",
            r"^(?:OSError|TimeoutError|ConnectionError): \[Errno (?:101|110|113)\]",
        ),
        cause=Text(
            "{where}: the network dropped a live NCCL connection (flapping link, overlay network).",
            "{where}：网络中断了正常的 NCCL 连接（链路抖动、overlay 网络）。",
        ),
        remedy=Text(
            "Run it again. If it repeats between the same two nodes, leave one of them out and have the link checked.",
            "可直接重新运行。若总在相同的两个节点之间出现，请排除其中之一并检查链路。",
        ),
    ),
    Fault(
        cls="nccl_remote_exited",
        action="retry",
        victims=(
            r"Connection closed by remote peer|NET/Socket : peer \S+ has closed the connection",
            r"Call to (?:recv|send)\w* (?:from|to) \S+ failed : (?:Connection reset by peer|Broken pipe)",
            r"\[Service thread\] Connection closed by localRank",
            r"Socket recv failed while polling for opId",
            r"(?:The actor (?:is dead|died)|A worker died or was killed)",
        ),
        headlines=(r"remote process exited or there was a network error|^ncclRemoteError",),
        cause=Text(
            "{where} lost its peer: another rank died first, and its log is not here.",
            "{where} 失去了对端：另一个 rank 先退出，但这里没有它的日志。",
        ),
        remedy=Text(
            "Run it again. For the cause, diagnose the logs of all nodes: `ftlaunch diagnose OUTPUT_DIR`.",
            "可直接重新运行。要找出原因，请对所有节点的日志执行 `ftlaunch diagnose OUTPUT_DIR`。",
        ),
    ),
    Fault(
        cls="nccl_init_store_timeout",
        action="adjust:data_prep",
        victims=(
            r"setting up NCCL communicators? and retr(?:ie|ei)ving ncclUniqueIds?",
            r"store->get\('[^']*'\) got error",
        ),
        cause=Text(
            "{where} waited for rank 0, which never came to the first collective: it was still preparing data, or "
            "had died.",
            "{where} 一直在等待 rank 0，但 rank 0 未到达首次集合通信：仍在准备数据，或已退出。",
        ),
        remedy=Text(
            "Read rank 0's log. If it was only slow, prepare the data before the run, or raise training.ddp_timeout.",
            "请查看 rank 0 的日志。若只是较慢，请在运行前准备好数据，或调大 training.ddp_timeout。",
        ),
    ),
    Fault(
        cls="nccl_watchdog_timeout",
        action="retry",
        victims=(
            r"(?:Watchdog c|C)aught collective operation timeout",
            r"Received a dump signal due to a collective timeout",
            r"Observed flight recorder dump signal",
            r"watchdog got stuck for \d+ seconds|detected no heartbeat of its watchdog|ProcessGroupNCCL watchdog hang",
            r"Some NCCL operations have failed or timed out",
            r"are the lagging ranks that caused this timeout|ranks that caused the desync are",
            r"failure detected by watchdog at work sequence id",
            r"NCCL communicator was aborted on rank",
            r"detected by watchdog at work: \d+",
            r"CUDA out of memory\. Tried to allocate more than 1EB",
            r"watchdog thread terminated with exception(?!.{0,20}CUDA error)",
        ),
        cause=Text(
            "{where}: a collective never finished, and no rank printed why: one of them hung, or the transport does "
            "not work.",
            "{where}：集合通信一直未完成，且没有任何 rank 打印原因：某个 rank 卡住，或传输不通。",
        ),
        remedy=Text(
            "Run it again. If it stops at the very first collective on all ranks, try env.NCCL_P2P_DISABLE: 1 "
            "(IOMMU, ACS); if always at one step, ranks run different code there; if one rank is always missing, "
            "leave its node out.",
            "可直接重新运行。若所有 rank 都停在第一次集合通信，可尝试 env.NCCL_P2P_DISABLE: 1（IOMMU、ACS）；"
            "若总停在同一步，说明各 rank 在此执行了不同代码；若总缺同一个 rank，请排除其节点。",
        ),
    ),
    Fault(
        cls="nccl_system_error",
        action="retry",
        headlines=(
            r"unhandled (?:system|cuda) error|^ncclSystemError|^ncclUnhandledCudaError",
            r"NCCL error in: \S+",
            r"internal error - please report this issue to the NCCL developers|^ncclInternalError",
            r"\[Proxy Service \d+\] Failed to execute operation",
        ),
        cause=Text(
            "{where}: NCCL failed in a system call and did not say in which.",
            "{where}：NCCL 的系统调用失败，但没有说明是哪一个。",
        ),
        remedy=Text(
            "Run it again. Set env.NCCL_DEBUG: INFO to see the line that matters; on one host alone, /dev/shm is "
            "the usual reason.",
            "可直接重新运行。设置 env.NCCL_DEBUG: INFO 可看到关键日志；若仅在单机出现，通常是 /dev/shm 不足。",
        ),
    ),
    Fault(
        cls="gloo_connection",
        action="adjust:GLOO_SOCKET_IFNAME",
        vague=(
            r"Gloo connectFullMesh failed",
            r"gloo\S*\] .{0,20}(?:[Cc]onnect(?:ion)? (?:timeout |timed out |refused )?\[|rp != nullptr)",
        ),
        errors=(r"Unable to find (?:address|interface) for: (?P<iface>\S+)",),
        cause=Text(
            "{where}: gloo could not connect the ranks with each other: the interface or address it announced does "
            "not reach them.",
            "{where}：gloo 无法在各 rank 之间建立连接：其公布的网卡或地址不可达。",
        ),
        remedy=Text(
            "Set cluster.interface (or env.GLOO_SOCKET_IFNAME) to the interface with the route to the master; on "
            "one node: `lo`.",
            "将 cluster.interface（或 env.GLOO_SOCKET_IFNAME）设为通往主节点的网卡；单节点可用 `lo`。",
        ),
    ),
    Fault(
        cls="gloo_connection",
        action="retry",
        victims=(
            r"gloo\S*\] .{0,40}(?:Connection closed by peer|(?:Read|Write) error|Connection reset|Timed out waiting)",
            r"Connection closed by peer \[",
            r"(?:Read|Write) error \[.{0,60}Connection reset by peer",
            r"Timed out waiting \d+ ?ms for (?:send|recv)",
        ),
        cause=Text(
            "{where} lost its peer in a gloo collective: another rank died or hung first.",
            "{where} 在 gloo 集合通信中失去对端：另一个 rank 先退出或卡住。",
        ),
        remedy=Text(
            "Run it again. For the cause, read the log of the rank that is missing here.",
            "可直接重新运行。要找出原因，请查看缺失的那个 rank 的日志。",
        ),
    ),
    Fault(
        cls="host_unresolved",
        action="adjust:master_addr",
        errors=_CLIENT_TIMEOUT,
        near=r"gai error",
        cause=Text("{where}: the master's name does not resolve.", "{where}：主节点名称无法解析。"),
        remedy=Text(
            "Check the name with `getent hosts NAME` on each node; use an IP address in cluster.hosts if DNS has "
            "none. In a fresh pod the name may come some seconds later.",
            "在每个节点执行 `getent hosts NAME` 检查；若 DNS 没有该名称，请在 cluster.hosts 中使用 IP。新建 Pod "
            "的域名可能稍后才生效。",
        ),
    ),
    Fault(
        cls="host_unresolved",
        action="adjust:master_addr",
        errors=(
            r"Could not resolve hostname (?P<name>\S+?)(?::|$)",
            r"socket\.gaierror",
            r"Name or service not known(?!\)\.)",
            r"Temporary failure in name resolution",
            r"nodename nor servname provided, or not known(?!\)\.)",
        ),
        hints=(r"network addresses of \(.{0,120}\) cannot be retrieved \(gai error",),
        cause=Text("{where}: a host name does not resolve.", "{where}：主机名无法解析。"),
        remedy=Text(
            "Check the name with `getent hosts NAME` on each node; use IP addresses in cluster.hosts if DNS has "
            "none. In a fresh pod the name may come some seconds later.",
            "在每个节点执行 `getent hosts NAME` 检查；若 DNS 没有该名称，请在 cluster.hosts 中使用 IP。新建 Pod "
            "的域名可能稍后才生效。",
        ),
    ),
    Fault(
        cls="port_in_use",
        action="adjust:master_port",
        errors=(r"EADDRINUSE|[Aa]ddress already in use",),
        plainest=r"failed to bind to \S+",
        fatal_as_warning=True,
        cause=Text(
            "{where}: the port is taken, by a left-over of an earlier run or by another job on this node.",
            "{where}：端口已被占用：之前运行的残留进程，或本节点上的其他作业。",
        ),
        remedy=Text(
            "Leave cluster.master_port out (each attempt then gets a free one), or find the holder with `ss -ltnp` "
            "and end it.",
            "不设置 cluster.master_port（每次尝试会自动选用空闲端口），或用 `ss -ltnp` 找到占用者并结束它。",
        ),
    ),
    Fault(
        cls="rdzv_timeout",
        action="adjust:rdzv_id",
        errors=(r"generated a random run_id",),
        fatal_as_warning=True,
        near=r"Rendezvous(?:Timeout|Closed|Connection)Error|client socket has (?:timed out after|failed to connect to)",
        cause=Text(
            "{where}: the nodes cannot meet: each made a run id of its own, because none was given.",
            "{where}：各节点无法会合：未指定 run id，每个节点各自随机生成了一个。",
        ),
        remedy=Text("Give all nodes the same --rdzv_id.", "为所有节点指定相同的 --rdzv_id。"),
    ),
    Fault(
        cls="rdzv_timeout",
        action="adjust:rdzv_endpoint",
        errors=(
            *_CLIENT_TIMEOUT,
            r"RendezvousTimeoutError|RendezvousClosedError",
            r"Timed out initializing process group in store based barrier",
            r"connect\(\) timed out\. Original timeout",
        ),
        vague=(r"(?:RuntimeError|DistStoreError): (?:Socket Timeout|Connection refused)$|^ConnectionRefusedError: ",),
        cause=Text(
            "{where}: the ranks could not meet in time: the master's address or port is wrong, blocked, or not "
            "every node has started.",
            "{where}：各 rank 未能按时会合：主节点地址或端口错误、被阻断，或有节点尚未启动。",
        ),
        remedy=Text(
            "Check from each node that the master's port answers (`nc -vz MASTER_ADDR MASTER_PORT`), and that "
            "cluster.nodes nodes really start.",
            "在每个节点检查主节点端口是否可达（`nc -vz MASTER_ADDR MASTER_PORT`），并确认 cluster.nodes "
            "个节点都已启动。",
        ),
    ),
    Fault(
        cls="rdzv_connection_lost",
        action="retry",
        victims=(
            r"RendezvousConnectionError",
            r"failed to shutdown the rendezvous",
            r"[Ff]ailed to recv, got 0 bytes|Dist(?:Network|Store|Backend)Error: ",
            r"(?:recvValue|sendBytes|recvVector) failed",
            r"wait timeout after \d+ ?ms, keys",
            r"^(?:ConnectionResetError|BrokenPipeError|ConnectionAbortedError): ",
            r"^RuntimeError: (?:Connection reset by peer|Broken pipe)$",
        ),
        cause=Text(
            "{where} lost the store on rank 0's node: that process or node went away first.",
            "{where} 与 rank 0 所在节点的 store 断开：那里的进程或节点先退出。",
        ),
        remedy=Text(
            "Run it again. For the cause, read the logs of rank 0's node.",
            "可直接重新运行。要找出原因，请查看 rank 0 所在节点的日志。",
        ),
    ),
)
