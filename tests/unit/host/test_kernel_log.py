"""Kernel messages from recorded records of /dev/kmsg, and from this machine where it lets us."""

from __future__ import annotations

from pathlib import Path

from launcher.host.kernel_log import lines_since, parse_record, read_kernel_lines, read_kmsg

XID = (
    "4,1207,88123456789,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=python3, GPU has fallen off the bus.\n"
    " SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"
)


def test_a_record_becomes_the_line_that_dmesg_writes() -> None:
    (line,) = parse_record(XID)
    assert line == "[88123.456789] NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=python3, GPU has fallen off the bus."
    assert parse_record("6,1,2500000,-;usb 1-1: new device\n")[0].startswith("[    2.500000] usb")
    assert parse_record("no record") == []


def test_old_lines_are_left_out() -> None:
    lines = ["[   10.5] old", "continued", "[  100.0] new", "continued", "[99999.1] newest"]
    assert lines_since(lines, 50.0) == ["[  100.0] new", "continued", "[99999.1] newest"]


def test_what_may_not_be_read_is_empty_and_no_error(tmp_path: Path) -> None:
    assert read_kmsg(tmp_path / "none") is None
    assert isinstance(read_kernel_lines(), tuple)
    (tmp_path / "kmsg").write_text(XID)
    assert read_kernel_lines(kmsg=tmp_path / "kmsg") == tuple(parse_record(XID))
