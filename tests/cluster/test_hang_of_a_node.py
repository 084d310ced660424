"""A rank hangs on one of two nodes: its node is the one that says so, and all go on together from memory."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.cluster import TestCluster
from tests.cluster.jobs import cluster_job
from tests.fault.tiny_model import NUM_RECORDS


def test_the_node_whose_rank_is_behind_names_it(two: TestCluster, tiny: Path, tmp_path: Path) -> None:
    changes = {
        "drill": {"kill": {"rank": 1, "step": 12, "at": "micro_batch", "hang": "absent"}},
        "checkpoint": {"every_steps": 50_000, "memory": "on"},
        "training": {"max_steps": 20},
    }
    with cluster_job(two, tiny, tmp_path, **changes) as job:
        job.start()
        assert job.ends() == [0, 0], job.logs()
        (hang,) = job.events("hang")
        print(f"found after {hang['still_seconds']:.2f} s (bound {hang['bound_seconds']:.2f} s): {hang['what']}")
        assert (hang["node"], hang["rank"], hang["step"], hang["how"]) == ("n1", 1, 11, "behind"), hang
        assert "in which rank 0 has waited" in hang["what"]
        (incident,) = job.events("incident")
        assert (incident["node"], incident["class"]) == ("n1", "nccl_watchdog_timeout")
        assert "the ranks here wait for another node: rank 1" in job.logs()
        logs = next((job.job.output_dir / "ftlaunch" / "logs").glob("gen-*/stacks-0.log")).parent
        assert "MainThread" in (logs / "stacks-0.log").read_text("utf-8"), "the victims' stacks are kept, too"
        assert {event["step"] for event in job.events("resumed")} <= {10, 11}
        job.require_each_sample_once(NUM_RECORDS, 4)
