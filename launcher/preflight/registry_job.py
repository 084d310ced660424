"""Checks of what the job brings to the machine: storage, network, other nodes, model and data."""

from __future__ import annotations

from launcher.preflight import check_cluster, check_data, check_mount, check_network, check_rdma, check_storage
from launcher.preflight.check import Check, Group

OF_THE_JOB: tuple[Group, ...] = (
    (
        "Storage",
        (
            Check(
                "disk.writable",
                check_storage.check_disk_writable,
                "whether output_dir can be written",
                "it cannot",
                "",
                "mount it read-write (DLC: `MountAccess: RW`), or another output_dir",
            ),
            Check(
                "disk.kind",
                check_mount.check_disk_kind,
                "what output_dir can do, tried in a private folder that is removed again: create, fsync, rename and "
                "replace files and a folder, append, write in the middle, truncate, lock, link",
                "files cannot be created, read back, renamed or replaced; `monitor.tensorboard` on a mount that "
                "appends nothing",
                "the mount did not answer within 30 s; its type decides then",
                "NAS or CPFS; `env: {TENSORBOARD_LOGGING_DIR: ...}`",
            ),
            Check(
                "disk.free",
                check_storage.check_disk_free,
                "free space and inodes of output_dir",
                "less than `checkpoint.keep` + 1 checkpoints and `final/` need; no free inode",
                "less than 1 GiB, where the need is not known",
                "free space, lower `checkpoint.keep`, another output_dir",
            ),
            Check(
                "disk.speed",
                check_mount.check_disk_speed,
                "how fast output_dir takes a large file (0.4 s of writing, at most 256 MiB, made durable and removed), "
                "against the size of a checkpoint and `spot.grace_seconds`",
                "",
                "one checkpoint takes longer than the grace period",
                "faster storage, a longer grace period, more frequent checkpoints",
            ),
            Check(
                "disk.scratch",
                check_mount.check_disk_scratch,
                "object mounts only: room on the node's own disk, where a checkpoint is made first",
                "less than one checkpoint needs",
                "",
                "`env: {TMPDIR: /local/disk}`",
            ),
            Check(
                "disk.durable",
                check_storage.check_disk_durable,
                "whether output_dir outlives the container",
                "",
                "it is on tmpfs, ramfs, aufs, or overlay inside a container",
                "a NAS, CPFS or OSS mount; a persistent volume; a bind mount",
            ),
            Check(
                "disk.shared",
                check_storage.check_disk_shared,
                "several nodes: whether all of them can share output_dir, locks included",
                "output_dir is on an object mount",
                "output_dir is on a disk of one machine (ext4, xfs, overlay, tmpfs, ...), or on a mount whose locks "
                "other machines may not see (NFS with `nolock`, unknown FUSE)",
                "storage that every node mounts at the same path, with locks: NAS, CPFS, NFS, Lustre",
            ),
        ),
    ),
    (
        "Network",
        (
            Check(
                "net.interface",
                check_network.check_interface,
                "the interface towards the other nodes: `cluster.interface`, else the one of the route to the master",
                "it does not exist or is down; several nodes: others cannot reach it (loopback, bridge of containers, "
                "link-local)",
                "",
                "the interfaces that are there",
            ),
            Check(
                "net.ifname_env",
                check_network.check_ifname_env,
                "`NCCL_SOCKET_IFNAME` (GPUs) and `GLOO_SOCKET_IFNAME` (CPU), set by you or the platform",
                "the one that this job uses names no interface with an address",
                "the same for the one that this job does not use",
                "unset it, or one of the interfaces that are there; ftlaunch never changes it",
            ),
            Check(
                "net.rdma",
                check_rdma.check_rdma,
                "several nodes with GPUs: RDMA devices, their ports and GID tables, `NCCL_IB_HCA`, "
                "`NCCL_IB_GID_INDEX`, "
                "`NCCL_IB_DISABLE`",
                "no port is active; the setting names no device, or an empty row of the GID table",
                "RDMA is switched off, or the container has no `/dev/infiniband/uverbs*`; the row is RoCE v1 where "
                "v2 is "
                "there",
                "the setting that fits; DLC: `Settings.EnableRDMA`",
            ),
            Check(
                "net.port",
                check_network.check_port,
                "`cluster.master_port`, where it is given (several nodes: looked at on node 0)",
                "it is taken",
                "",
                "`null` takes a free one",
            ),
            Check(
                "net.agent_port",
                check_network.check_agent_port,
                "several nodes: the port where the agents meet, on this node",
                "it is taken, and not by this run's own agent",
                "",
                "end its holder, or `cluster.agent_port`",
            ),
        ),
    ),
    (
        "Several nodes",
        (
            Check(
                "cluster.nodes",
                check_cluster.check_nodes,
                "which nodes came together for the check, within 10 s (`ftlaunch check` on each of them)",
                "",
                "some did not come",
                "the same command on every node at about the same time",
            ),
            Check(
                "cluster.same",
                check_cluster.check_differences,
                "versions, precision, ranks, job.yaml, cards, driver, kernel: which nodes differ",
                "",
                "they differ (what must be the same for a run is refused when the nodes meet)",
                "one image, one driver, one kind of card",
            ),
            Check(
                "cluster.clock",
                check_cluster.check_clock,
                "how far the nodes' clocks are apart",
                "",
                "more than 1 s",
                "chrony or ntpd",
            ),
            Check(
                "net.mtu",
                check_cluster.check_mtu,
                "the largest packet of each node's interface",
                "",
                "they differ",
                "the smallest one for all",
            ),
            Check(
                "net.reach",
                check_cluster.check_reach,
                "whether every node reaches every other on a port that the system chooses, as ranks do",
                "a way is closed",
                "",
                "firewall, security group, NetworkPolicy, `cluster.interface`",
            ),
            Check(
                "net.speed",
                check_cluster.check_link,
                "bandwidth (one TCP stream) and latency between pairs of nodes, in two rounds, of which the second "
                "pairs the "
                "slowest with the fastest; off with `check.speed: false`",
                "",
                "a node is slower than half of the median with both partners; more than 2 ms",
                "leave the node out; nodes in one place",
            ),
            Check(
                "net.scaling",
                check_cluster.check_scaling,
                "what all-reduce over the job's backend (gloo, NCCL; one rank a node) reaches, or else the slowest "
                "pair, "
                "against what a step sums up and how long it takes (from an earlier start on one node, or forecast "
                "from "
                "the cards): several nodes against one, nothing overlapping",
                "",
                "less than 0.9 x the number of nodes",
                "a faster network, more accumulation, lora, or one node",
            ),
            Check(
                "disk.visible",
                check_cluster.check_visible,
                "whether, and how late, the other nodes see what the first one has written below output_dir (a "
                "private file "
                "that is removed again)",
                "not at all, or not within 5 s",
                "later than 1 s",
                "the same volume at the same path; shorter caches",
            ),
        ),
    ),
    (
        "Model and data",
        (
            Check(
                "model.files",
                check_data.check_model_files,
                "the model's folder: config, tokenizer, every file of the index, the length that each safetensors head "
                "says; for a hub id: the hub's cache, and whether the hub answers within 3 s",
                "something is missing, cut short or a Git LFS pointer; the hub is offline (`HF_HUB_OFFLINE`) or out of "
                "reach and the model is not in the cache",
                "",
                "fetch it again; a folder as `model.path`; a mirror (`HF_ENDPOINT`)",
            ),
            Check(
                "data.records",
                check_data.check_records,
                "JSON, UTF-8, fields, empty texts; at a start for a second (every record of some 100,000, then the "
                "first ones of each MiB), all of them with `ftlaunch prepare`; file and line of the first ten",
                "a record cannot be used",
                "",
                "correct these lines",
            ),
            Check(
                "data.roles",
                check_data.check_roles,
                "the roles of conversations",
                "",
                "a role that chat templates do not know, `system` in the middle, the same side twice in a row",
                "system, user, assistant, tool",
            ),
            Check(
                "data.repeated",
                check_data.check_repeated,
                "records that are the same as an earlier one, byte by byte",
                "",
                "more than 1 % of the records",
                "remove them",
            ),
            Check(
                "data.length",
                check_data.check_length,
                "tokens of the records (at a start of 100 of them, where the folder has tokenizer.json) against "
                "`data.max_length` and the model's positions",
                "samples beyond a model's table of positions",
                "more than 5 % of the records are cut; nothing is learned of a record; samples beyond the positions "
                "that the model was trained for",
                "`data.max_length`, shorter records",
            ),
            Check(
                "data.tokens",
                check_data.check_tokens,
                "token ids of the data, and the size of the tokenizer, against `vocab_size` of the model",
                "an id of the data is beyond it (a device-side assert on a GPU)",
                "the tokenizer could give one",
                "the model's own tokenizer, or a resized embedding",
            ),
            Check(
                "data.template",
                check_data.check_template,
                "whether the tokenizer has a chat template, where the records are conversations",
                "",
                "it has none",
                "the model's chat_template.jinja",
            ),
        ),
    ),
)
