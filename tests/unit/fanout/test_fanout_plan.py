"""What a start brings up elsewhere, what the others are told, and with which commands."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.load import LoadedJob, load_job
from launcher.errors import UserError
from launcher.fanout.deepspeed_runner import agents_hostfile, runner_argv
from launcher.fanout.exported import exported_environ
from launcher.fanout.order import NodeOrder, without_start
from launcher.fanout.packed_job import pack_job, unpack_job
from launcher.fanout.plan import FanOut, plan_fan_out
from launcher.fanout.presence import run_key
from launcher.fanout.process import Settings, exit_code
from launcher.fanout.ssh import node_argv, ssh_options
from launcher.platforms.detect import detect_place
from launcher.platforms.nesting import refuse_nesting
from launcher.platforms.place import Place
from launcher.platforms.told import NODE_VARIABLE, tell_place, told_place

HOSTS = ("a", "me@b", "c")
LISTED = Place("cluster.hosts", 3, 1, master_addr="a", hosts=HOSTS, evidence=(("cluster.hosts", "a, b, c"),))
OUTSIDE = replace(LISTED, node_rank=None)
ONE = Place("one machine", 1, 0)
DLC = Place("DLC", 2, 0, master_addr="dlc-master-0")
MPI = Place("MPI operator", 2, None, master_addr="w0", hosts=("w0", "w1"))
Jobs = Callable[..., LoadedJob]


@pytest.fixture
def job(tmp_path: Path) -> Jobs:
    def load(more: str = "", *overrides: str, **environ: str) -> LoadedJob:
        path = tmp_path / "job.yaml"
        path.write_text(f"output_dir: $BASE/run\nmodel: {{path: a/b}}\ndata: {{train: train.jsonl}}\n{more}")
        return load_job(path, overrides, {"BASE": "/shared", **environ})

    return load


def launcher(name: str) -> str:
    return f"cluster: {{launcher: {name}}}\n"


# -- plan_fan_out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ("auto", ONE),
        ("ssh", ONE),
        ("auto", DLC),
        ("none", LISTED),
        ("none", OUTSIDE),
        ("auto", replace(LISTED, num_nodes=1, node_rank=0, hosts=("a",))),
        ("auto", Place("Slurm", 2, 1, hosts=("a", "b"))),
    ],
)
def test_nothing_is_started_elsewhere(job: Jobs, asked: str, place: Place) -> None:
    assert plan_fan_out(job(launcher(asked)), place, {}) is None


def test_an_agent_that_a_head_has_started_starts_no_others(job: Jobs) -> None:
    assert plan_fan_out(job(), LISTED, {NODE_VARIABLE: tell_place(LISTED, 1)}) is None


@pytest.mark.parametrize(
    ("asked", "place", "own", "names"),
    [
        ("auto", LISTED, 1, ["n0", "n2"]),
        ("ssh", LISTED, 1, ["n0", "n2"]),
        ("auto", OUTSIDE, None, ["n0", "n1", "n2"]),
        ("auto", MPI, None, ["n0", "n1"]),
        ("ssh", Place("Slurm", 2, 1, hosts=("a", "b")), 1, ["n0"]),
        ("deepspeed", LISTED, None, ["n0", "n1", "n2"]),
    ],
)
def test_the_other_nodes_are_started(job: Jobs, asked: str, place: Place, own: int | None, names: list[str]) -> None:
    fan_out = plan_fan_out(job(launcher(asked)), place, {})
    assert fan_out is not None
    assert fan_out.launcher == ("deepspeed" if asked == "deepspeed" else "ssh")
    assert (fan_out.own_rank, [remote.name for remote in fan_out.remotes]) == (own, names)
    assert [remote.host for remote in fan_out.remotes] == [place.hosts[remote.rank] for remote in fan_out.remotes]


@pytest.mark.parametrize("asked", ["ssh", "deepspeed"])
def test_asked_for_without_names_is_an_error(job: Jobs, asked: str) -> None:
    with pytest.raises(UserError, match=rf"job.yaml:4: cluster.launcher: {asked} needs the machines' names.*DLC"):
        plan_fan_out(job(launcher(asked)), DLC, {})


def test_what_is_shown_is_what_is_run_and_holds_no_secret(job: Jobs) -> None:
    loaded = job("cluster: {hosts: [a, b], token: sesame}\n")
    fan_out = plan_fan_out(loaded, LISTED, {"FTLAUNCH_TOKEN": "other", "NCCL_DEBUG": "INFO"})
    assert fan_out is not None
    shown = dict(fan_out.shown())
    assert list(shown) == ["n0 (a)", "n2 (c)"]
    assert re.fullmatch(rf"ssh -o .* -- a '.*{sys.executable} -m launcher.fanout.node'", shown["n0 (a)"])
    runner = replace(fan_out, launcher="deepspeed").shown()
    assert runner[0][1].endswith("--module launcher run --as-node=/shared/run/ftlaunch/launch/order.json")
    assert "sesame" not in repr((shown, runner))


# -- the order ---------------------------------------------------------------------------------------------------------


def order_of(fan_out: FanOut | None, rank: int | None = 0) -> NodeOrder:
    assert fan_out is not None
    remote = None if rank is None else next(remote for remote in fan_out.remotes if remote.rank == rank)
    return NodeOrder.from_line(fan_out.order(remote, "head", Path("/here")).to_line())


def test_every_node_runs_the_configuration_that_the_head_has_loaded(job: Jobs) -> None:
    loaded = job("env: {KEY: 1.10}\ncluster: {hosts: [a, b]}\n", "training.max_steps=7", FTLAUNCH_SET="lora.r=3")
    packed = json.loads(json.dumps(pack_job(loaded)))
    assert unpack_job(packed) == loaded
    assert unpack_job(packed).config.model_fields_set == loaded.config.model_fields_set
    assert unpack_job(packed).config.output_dir == "/shared/run", "no variable is left to the node"


def test_the_token_goes_in_the_order_of_job_yaml_and_environment(job: Jobs) -> None:
    environ = {"FTLAUNCH_TOKEN": "of the environment"}
    with_both = plan_fan_out(job("cluster: {hosts: [a, b], token: of the job}\n"), LISTED, environ)
    assert order_of(with_both).environ["FTLAUNCH_TOKEN"] == "of the job"
    assert order_of(plan_fan_out(job(), LISTED, environ)).environ["FTLAUNCH_TOKEN"] == "of the environment"
    assert "FTLAUNCH_TOKEN" not in order_of(plan_fan_out(job(), LISTED, {})).environ


def test_a_node_is_told_its_place_and_detects_nothing_else(job: Jobs) -> None:
    order = order_of(plan_fan_out(job(), LISTED, {"GLOO_X": "1"}), rank=2)
    environ = {"PATH": "/bin", "RANK": "5", "WORLD_SIZE": "9"}  # of whatever the machine is part of
    order.enter(environ)
    assert detect_place(environ) == replace(LISTED, node_rank=2)
    assert environ["GLOO_X"] == "1"
    assert without_start(order).start is False


def test_under_deepspeeds_launch_py_an_agent_is_a_node_and_no_rank(job: Jobs) -> None:
    order = order_of(plan_fan_out(job(launcher("deepspeed")), LISTED, {}), rank=None)
    given = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_SIZE": "1", "CROSS_RANK": "1", "CROSS_SIZE": "3"}
    environ = {**given, "MASTER_ADDR": "a", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin"}
    with pytest.raises(UserError, match="rank of deepspeed"):
        refuse_nesting(environ)  # a user who nests
    order.enter(environ)
    refuse_nesting(environ)
    assert environ == {"PATH": "/bin", NODE_VARIABLE: tell_place(LISTED, 1)}
    with pytest.raises(UserError, match="CROSS_RANK is not set"):
        order.enter({})


@pytest.mark.parametrize("nodes", [3, (2, 3)])
def test_a_place_is_told_whole(nodes: int | tuple[int, int]) -> None:
    place = replace(LISTED, num_nodes=nodes, num_ranks_per_node=8, master_port=7)
    assert told_place({NODE_VARIABLE: tell_place(place, 2)}) == replace(place, node_rank=2)


@pytest.mark.parametrize("text", ["", "1", "{}", '{"num_nodes": 1}', "[]"])
def test_what_no_head_has_told_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="FTLAUNCH_NODE is set to something that ftlaunch has not written"):
        told_place({NODE_VARIABLE: text})


def test_runs_nodes_and_folders_have_different_names() -> None:
    assert len({run_key("/a", "n1"), run_key("/a", "n2"), run_key("/b", "n1")}) == 3


# -- environment and commands ------------------------------------------------------------------------------------------


def test_exported_is_what_deepspeed_exports_and_what_decides_about_ftlaunch(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".deepspeed_env").write_text("A=home\nB=home\n")
    (tmp_path / ".deepspeed_env").write_text("\n# no=comment\nA = here \nnothing\nCUDA_VISIBLE_DEVICES=1\n")
    passed = {"NCCL_DEBUG": "INFO", "UCX_TLS": "tcp", "PYTHONHASHSEED": "1", "HF_HOME": "/hf", "TORCH_NCCL_X": "1"}
    kept = {"PATH": "/bin", "HOME": str(home), "RANK": "1", "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": "/x", "SEC": "1"}
    assert exported_environ({**passed, **kept}, tmp_path) == {**passed, "A": "here", "B": "home"}
    (tmp_path / "other").write_text("C=1\n")
    assert exported_environ({"DS_ENV_FILE": "other"}, tmp_path) == {"C": "1"}


def test_the_users_own_settings_of_ssh_win() -> None:
    none = " ".join(ssh_options({}))
    assert "BatchMode=yes" in none
    assert "ServerAliveInterval=5" in none
    assert "ConnectTimeout=10" in none
    assert "StrictHostKeyChecking" not in none, "how keys are checked is the user's"
    own = " ".join(ssh_options({"serveraliveinterval": "60", "connecttimeout": "3"}))
    assert "ServerAlive" not in own
    assert "ConnectTimeout" not in own


def test_a_host_is_never_an_option() -> None:
    argv = node_argv("-oProxyCommand=touch /tmp/x", {}, {})
    assert argv[argv.index("--") + 1] == "-oProxyCommand=touch /tmp/x"


def test_a_checkout_is_found_by_pythonpath() -> None:
    root = str(Path(__file__).parents[3])
    assert f"env PYTHONPATH={root}:/mine {sys.executable} -m" in node_argv("a", {}, {"PYTHONPATH": "/mine"})[-1]


def test_the_agents_hostfile_has_one_slot_a_host_and_the_master_needs_no_ssh() -> None:
    assert agents_hostfile(["127.0.0.1", "me@127.0.0.2", "no.such.host.invalid"]) == (
        "127.0.0.1 slots=1\nme@127.0.0.2 slots=1\nno.such.host.invalid slots=1\n"
    )
    place = replace(LISTED, hosts=("127.0.0.1", "b"))
    assert "--master_addr=127.0.0.1" in runner_argv(Path("/run"), place, ("-m", "launcher", "run"))


# -- the exit code of a head that is no node ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "stopped", "expected"),
    [
        ([0, 0], False, 0),
        ([138, 0], False, 0),
        ([3, 0], False, 0),
        ([1, 138], False, 1),
        ([2, None], False, 2),
        ([3, 138], False, 3),
        ([None, None], False, 138),
        ([-9, 77], False, 138),
        ([138, 138], True, 138),
        ([0, 138], True, 0),
        ([1, 138], True, 1),
        ([3, 138], True, 138),
    ],
)
def test_the_exit_code_of_a_head_is_that_of_its_nodes(codes: list[int | None], stopped: bool, expected: int) -> None:
    settings = Settings((), 5.0, 138, 10.0, False, -1, "head")
    assert exit_code(codes, stopped, settings) == expected
    if expected == 138:
        assert exit_code(codes, stopped, replace(settings, stop_exit_code=143)) == 143
