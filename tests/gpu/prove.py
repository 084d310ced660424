"""What only a GPU can show, in one script: `python tests/gpu/prove.py` on a machine with one or more NVIDIA GPUs
(about three minutes).

It would prove, each with a printed line and exit code 1 when one fails:
1. the fork server makes no CUDA context: NVML lists no compute process for it, and it has no /dev/nvidia0 open;
2. ranks forked from it can use CUDA: a LoRA run with a drill (SIGKILL of the last rank) ends 0 and resumes;
3. the precision that `plan` chooses from NVML is one that torch computes without emulation on every card;
4. with two or more GPUs, NCCL works on the interface that ftlaunch has set, and the ranks leave no process and no GPU
   memory behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.fault.harness import Job, base_config, merged  # noqa: E402

failed: list[str] = []


def show(what: str, passed: bool, measured: object) -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {what}: {measured}", flush=True)
    if not passed:
        failed.append(what)


def compute_pids() -> set[int]:
    import pynvml

    pynvml.nvmlInit()
    found = set()
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        found |= {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    return found


def main() -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
        num_gpus = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        print(f"skipped: no NVIDIA GPU here ({error})")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(ROOT / "tests/fault/tiny_model.py"), str(folder / "tiny")], check=True)
        config = merged(
            base_config(folder / "tiny", folder / "out"),
            {
                "precision": "auto",
                "cluster": {"nproc_per_node": num_gpus},
                "training": {"max_steps": 400},
                "checkpoint": {"every_steps": 50},
                "drill": {"kill": {"rank": num_gpus - 1, "step": 120}},
            },
        )
        job = Job(folder / "job", config)
        plan = subprocess.run(
            [sys.executable, "-m", "launcher", "plan", "--config", str(job.path), "--json"],
            capture_output=True, text=True, check=True, cwd=ROOT,
        )  # fmt: skip
        precision = json.loads(plan.stdout)["precision"]["value"]
        code = (
            "import torch; n = torch.cuda.device_count();"
            "print(all(torch.cuda.get_device_capability(i)[0] >= 8 for i in range(n)))"
        )
        has_bf16 = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        show("precision agrees with the cards", (precision == "bf16") == (has_bf16 == "True"), precision)
        with job.start() as run:
            run.until_step(60, timeout_s=300)
            server = run.fork_server_pid()
            open_files = [os.readlink(f"/proc/{server}/fd/{fd}") for fd in os.listdir(f"/proc/{server}/fd")]
            show("the fork server holds no GPU", "/dev/nvidia0" not in open_files, len(open_files))
            show("the fork server has no CUDA context", server not in compute_pids(), sorted(compute_pids()))
            code_ = run.wait(300)
            show("the run ends 0 after a killed rank", code_ == 0, code_)
            show("it resumed", bool(run.events("resumed")), run.events("resumed"))
            show("no process is left", not run.left_after(15), run.left_after(1))
        time.sleep(1)
        used = [
            pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(num_gpus)
        ]
        show("no GPU process is left", not any(used), [len(u) for u in used])
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
