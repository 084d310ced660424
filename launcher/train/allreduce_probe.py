"""One rank of a short test of all-reduce over the job's own backend: `ftlaunch check` starts one on each node, for a
few seconds.

Reads a request (JSON: `rank`, `world_size`, `master`, `port`, `device`, `seconds`) from standard input and prints one
line of JSON: `bytes_per_s`, the size of the tensor by the time of a sum (algorithm bandwidth), and `num_bytes`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

FIRST_BYTES, MOST_BYTES = 1 << 20, 256 << 20


def main() -> int:
    request = json.loads(sys.stdin.read())
    os.environ.update(MASTER_ADDR=request["master"], MASTER_PORT=str(request["port"]))
    import torch
    import torch.distributed as dist

    on_card = request["device"] == "cuda"
    device = torch.device("cuda", 0) if on_card else torch.device("cpu")
    seconds = float(request["seconds"])
    dist.init_process_group(
        "nccl" if on_card else "gloo",
        rank=int(request["rank"]),
        world_size=int(request["world_size"]),
        timeout=timedelta(seconds=10 * seconds),
    )

    def timed(num_bytes: int) -> float:
        tensor = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(tensor)
        if on_card:
            torch.cuda.synchronize()
        return time.monotonic() - began

    timed(1024)  # connections are made by the first one
    first_s = timed(FIRST_BYTES)
    # What fits into the time by the first one; all ranks take the same, the slowest one's.
    fitting = torch.tensor([min(MOST_BYTES, FIRST_BYTES * seconds / 2 / max(first_s, 1e-4))], device=device)
    dist.all_reduce(fitting, op=dist.ReduceOp.MIN)
    num_bytes = max(FIRST_BYTES, int(fitting.item()) // 4096 * 4096)
    taken_s = torch.tensor([timed(num_bytes)], device=device)
    dist.all_reduce(taken_s, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    print(json.dumps({"bytes_per_s": num_bytes / float(taken_s.item()), "num_bytes": num_bytes}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
