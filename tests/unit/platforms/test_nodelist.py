from __future__ import annotations

import pytest

from launcher.errors import UserError
from launcher.platforms.nodelist import expand_nodelist, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("dev", ["dev"]),
        ("dev[7-10]", ["dev7", "dev8", "dev9", "dev10"]),
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("gnode[10,20,25,37]", ["gnode10", "gnode20", "gnode25", "gnode37"]),
        ("a1,b[2-3],sh04-14n01", ["a1", "b2", "b3", "sh04-14n01"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("gpu-[1-2].cluster", ["gpu-1.cluster", "gpu-2.cluster"]),
        (" c[5] , d ", ["c5", "d"]),
        ("n[3,1-2]", ["n3", "n1", "n2"]),  # Slurm's order is the order of node ids
    ],
)
def test_node_lists_of_slurm(text: str, hosts: list[str]) -> None:
    assert list(expand_nodelist(text)) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "a[1", "a1]", "a[]", "a[1-]", "a[x-y]", "a[3-1]", "a[[1]]", "a{1..4}", "a b", "a[1-99999999]"],
)
def test_what_is_not_understood_is_no_guess(text: str) -> None:
    with pytest.raises(ValueError):
        expand_nodelist(text)


def test_brackets_that_multiply_do_not_fill_the_memory() -> None:
    with pytest.raises(ValueError, match="more than 100000 hosts"):
        expand_nodelist("a[1-1000]b[1-1000]c[1-1000]")


def test_hostfiles_of_open_mpi_intel_mpi_and_deepspeed() -> None:
    text = "# made by hand\n\n10.0.0.1 slots=8\nb.example:4\nc   slots=2 max_slots=2  # spare\nd\n"
    assert read_hostfile(text, "f") == (("10.0.0.1", 8), ("b.example", 4), ("c", 2), ("d", None))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=8\nb slots=x\n", "f:2: 'b slots=x' is no line of a hostfile"),
        ("a slots=8\na slots=8\n", "f:2: a is there a second time"),
        ("# nothing\n", "f names no host"),
    ],
)
def test_a_hostfile_that_is_wrong_is_told_with_its_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_hostfile(text, "f")
