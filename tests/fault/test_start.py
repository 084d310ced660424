"""How ranks come to life: methods, fork server and fresh processes, workers, PID 1, what the agent itself holds."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.fault.harness import Job, Run

MakeJob = Callable[..., Job]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_qlora_trains_and_resumes(make_job: MakeJob) -> None:
    job = make_job(
        method="qlora", training={"max_steps": 4}, checkpoint={"every_steps": 2}, drill={"kill": {"rank": 1, "step": 3}}
    )
    run = job.run(timeout_s=240)
    assert run.process.returncode == 0, run.log
    assert run.events("resumed")[0]["step"] == 2
    assert (job.output_dir / "final" / "adapter_model.safetensors").is_file()


def test_one_rank_alone(make_job: MakeJob) -> None:
    job = make_job(cluster={"nproc_per_node": 1}, training={"max_steps": 4}, drill={"kill": {"rank": 0, "step": 2}})
    run = job.run()
    assert run.process.returncode == 0, run.log


def test_final_loads_with_plain_libraries(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(training={"max_steps": 2})
    assert job.run().process.returncode == 0
    final = job.output_dir / "final"
    program = (
        "import sys; from peft import AutoPeftModelForCausalLM; from transformers import AutoTokenizer;"
        "m = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]); t = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "ids = t('user : node', return_tensors='pt').input_ids; print(m.generate(input_ids=ids, "
        "max_new_tokens=2).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(final)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (final / "README.md").read_text().count("optimizer steps") == 1


def test_without_fork_server_every_rank_imports_by_itself(make_job: MakeJob) -> None:
    """The way for nodes where CUDA cannot be used after a fork."""
    job = make_job(training={"max_steps": 6}, drill={"kill": {"rank": 1, "step": 4}})
    run = job.run(environ={"FTLAUNCH_FORK_SERVER": "off"})
    assert run.process.returncode == 0, run.log
    assert run.events("resumed")[0]["step"] == 3


def test_ranks_come_from_a_template_while_it_is_good(make_job: MakeJob) -> None:
    """With model and data; not while these are other files by now, nor once somebody has killed it."""
    job = make_job(training={"max_steps": 400}, checkpoint={"every_steps": 100})
    with job.start() as run:
        run.until_step(2)
        os.utime(job.config["data"]["train"])
        kill_rank_and_wait(run, 2)
        kill_rank_and_wait(run, 3)
        (template,) = psutil.Process(run.fork_server_pid()).children()
        template.kill()
        kill_rank_and_wait(run, 4)
        assert run.wait(120) == 0, run.log
    loaded = [event["gen"] for event in run.events("phase") if event["name"] == "loading model"]
    assert loaded == [1, 2, 4]  # by a template, by the next one, and by each rank


def kill_rank_and_wait(run: Run, generation: int) -> None:
    os.kill(run.rank_pid(1), signal.SIGKILL)
    run.until(lambda: len(run.events("first_step")) == generation, f"generation {generation} trains")


def test_the_agent_holds_no_torch_and_little_memory(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 4000})
    with job.start() as run:
        run.until_step(2)
        maps = Path(f"/proc/{run.process.pid}/maps").read_text()
        assert "torch" not in maps
        assert "transformers" not in maps
        assert "torch" in Path(f"/proc/{run.rank_pid(0)}/maps").read_text()  # the look itself can fail
        resident_bytes = psutil.Process(run.process.pid).memory_info().rss
        print(f"agent: {resident_bytes / 2**20:.0f} MiB resident")
        assert resident_bytes < 120 * 2**20


def test_workers_of_a_killed_rank_die_with_it(make_job: MakeJob) -> None:
    job = make_job(training={"max_steps": 4000, "dataloader_num_workers": 2, "dataloader_persistent_workers": True})
    with job.start() as run:
        run.until_step(5)
        workers = psutil.Process(run.rank_pid(1)).children()
        assert len(workers) >= 2
        os.kill(run.rank_pid(1), signal.SIGKILL)
        run.until(lambda: len(run.events("first_step")) == 2, "the restart trains")
        assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
        assert zombies_of(run.process.pid) == []
        run.process.kill()
        assert not run.left_after(15)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_as_pid_1_it_reaps_and_stops_on_sigterm(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(training={"max_steps": 4000, "dataloader_num_workers": 1})
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with Run(job, (), {}, prefix=unshare) as run:
        run.until_step(5)
        (agent,) = psutil.Process(run.process.pid).children()
        inside = Path(f"/proc/{agent.pid}/status").read_text()
        assert inside.split("NSpid:")[1].split("\n")[0].split()[-1] == "1"
        os.kill(run.rank_pid(0), signal.SIGKILL)
        run.until(lambda: len(run.events("first_step")) == 2, "the restart trains")
        assert zombies_of(agent.pid) == []
        agent.send_signal(signal.SIGTERM)
        assert run.wait(60) == 138, run.log
        assert not run.left_after(15)


def zombies_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children() if child.status() == psutil.STATUS_ZOMBIE]
