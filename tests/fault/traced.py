"""A forked child that stops at each of its system calls (ptrace), so that it can be killed at any one of them.

A child killed on entry has not made the call, one killed on exit has made it and done nothing since. Nothing is
patched: the code, the files and SIGKILL are real. Should the tracer itself die, the kernel kills what it traces.

Where only calls that change the disk are of interest, a seccomp filter makes the kernel pick them (SECCOMP_RET_TRACE),
and all others run at full speed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from launcher.process import die_with_parent

# <linux/ptrace.h>, <sys/user.h>
_TRACEME, _CONT, _GETREGS, _DETACH, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 7, 12, 17, 24, 0x4200, 0x420E
_O_TRACESYSGOOD, _O_TRACESECCOMP, _O_EXITKILL = 0x1, 0x80, 0x100000
_EVENT_SECCOMP = signal.SIGTRAP | 7 << 8
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_INFO_EXIT = 2  # first byte of struct ptrace_syscall_info
_REGISTERS = struct.Struct("=27Q")  # struct user_regs_struct
_NUMBER, _ARGUMENTS = 15, (14, 13, 12, 7, 9, 8)  # orig_rax; rdi, rsi, rdx, r10, r8, r9
# <linux/seccomp.h>, <linux/bpf_common.h>
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_RET_TRACE, _RET_ALLOW = 0x7FF00000, 0x7FFF0000
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_THIRD_ARGUMENT = 32  # offset in struct seccomp_data
_AT_FDCWD = -100
_PATH_BYTES = 512

# <asm/unistd_64.h>: the calls that deal with files; others are shown by number.
_NAMES = {
    0: "read", 1: "write", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 8: "lseek", 9: "mmap", 11: "munmap",
    12: "brk", 16: "ioctl", 18: "pwrite64", 20: "writev", 21: "access", 40: "sendfile", 72: "fcntl", 74: "fsync",
    75: "fdatasync", 76: "truncate", 77: "ftruncate", 78: "getdents", 79: "getcwd", 82: "rename", 83: "mkdir",
    84: "rmdir", 85: "creat", 86: "link", 87: "unlink", 88: "symlink", 89: "readlink", 90: "chmod", 91: "fchmod",
    217: "getdents64", 257: "openat", 258: "mkdirat", 262: "newfstatat", 263: "unlinkat", 264: "renameat",
    265: "linkat", 266: "symlinkat", 268: "fchmodat", 280: "utimensat", 285: "fallocate", 316: "renameat2",
    318: "getrandom", 326: "copy_file_range", 332: "statx",
}  # fmt: skip
_OPENAT = 257
_FOR_WRITING = os.O_WRONLY | os.O_RDWR
# Which arguments are paths (with the folder's descriptor before them where there is one), which are descriptors.
_PATHS = {
    "stat": (0,), "lstat": (0,), "access": (0,), "truncate": (0,), "rename": (0, 1), "mkdir": (0,), "rmdir": (0,),
    "creat": (0,), "link": (0, 1), "unlink": (0,), "symlink": (0, 1), "readlink": (0,), "chmod": (0,), "openat": (1,),
    "mkdirat": (1,), "newfstatat": (1,), "unlinkat": (1,), "renameat": (1, 3), "renameat2": (1, 3), "statx": (1,),
}  # fmt: skip
_DESCRIPTORS = frozenset({
    "read", "write", "close", "fstat", "lseek", "ioctl", "pwrite64", "writev", "sendfile", "fsync", "fdatasync",
    "ftruncate", "getdents64", "fchmod", "fallocate", "copy_file_range",
})  # fmt: skip

_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: the GIL stays where it is, there is one thread
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)


class _Filter(ctypes.Structure):  # struct sock_fprog
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def why_no_tracing() -> str | None:
    """Why children cannot be traced here, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the table of system calls is that of x86-64 Linux"

    def body(begin: Callable[[], None]) -> None:
        begin()

    try:
        child = TracedChild(body)
        traced = child.wait_until_traced()
        child.kill()
    except OSError as error:
        return f"ptrace is refused here ({error.strerror})"
    return None if traced else "ptrace is refused here"


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    result: int = _libc.ptrace(request, pid, address, data)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class Calls(Enum):
    """Which system calls a child stops at; beginnings of their names."""

    ALL = ()
    CHANGING = (
        "write", "pwrite", "sendfile", "copy_file_range", "truncate", "ftruncate", "fallocate", "fsync", "fdatasync",
        "creat", "rename", "mkdir", "rmdir", "unlink", "link", "symlink", "chmod", "fchmod",
    )  # fmt: skip
    RENAMES = ("rename",)


class Moment(Enum):
    ENTRY = "before"
    EXIT = "after"


@dataclass(frozen=True)
class Call:
    """A system call at which a child stands. `paths`: what it is about, as the child wrote it, or what its descriptor
    leads to."""

    name: str
    moment: Moment
    paths: tuple[str, ...]
    arguments: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.moment.value} {self.name}({', '.join(self.paths)})"


class TracedChild:
    """`body(begin)` runs in a forked child, at full speed until it calls `begin()`, which stops it; from there on
    `step` takes it from one to the next of `calls`. It exits with 0 whatever `body` does."""

    def __init__(self, body: Callable[[Callable[[], None]], None], calls: Calls = Calls.ALL) -> None:
        self.status: int | None = None  # as waitpid gives it, once it has ended
        self._calls, self._within = calls, False
        self._info = ctypes.create_string_buffer(128)
        self._registers = ctypes.create_string_buffer(_REGISTERS.size)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent(parent)
                body(partial(_stop_here, calls))
            finally:
                os._exit(0)

    def wait_until_traced(self) -> bool:
        """False where it has ended before `begin`."""
        if self._wait() is None:
            return False
        _ptrace(_SETOPTIONS, self.pid, 0, _O_TRACESYSGOOD | _O_TRACESECCOMP | _O_EXITKILL)
        return True

    def step(self) -> bool:
        """On to the next stop: the entry of a call, or the exit of the one it is in. False where it has ended."""
        _ptrace(_CONT if self._calls is not Calls.ALL and not self._within else _SYSCALL, self.pid)
        stopped_by = self._wait()
        if stopped_by not in (None, _SYSCALL_STOP, _EVENT_SECCOMP):
            raise RuntimeError(f"the child got signal {stopped_by}")
        self._within = not self._within
        return stopped_by is not None

    def call(self) -> Call:
        """Where it stands. Reads its memory, so not to be asked for once it has ended."""
        _ptrace(_GET_SYSCALL_INFO, self.pid, len(self._info), ctypes.addressof(self._info))
        _ptrace(_GETREGS, self.pid, 0, ctypes.addressof(self._registers))
        registers = _REGISTERS.unpack(self._registers.raw)
        arguments = tuple(registers[index] for index in _ARGUMENTS)
        name = _NAMES.get(registers[_NUMBER], f"#{registers[_NUMBER]}")
        if name in _DESCRIPTORS:
            paths: tuple[str, ...] = (self._descriptor(arguments[0]),)
        else:
            paths = tuple(self._path(name, arguments, index) for index in _PATHS.get(name, ()))
        moment = Moment.EXIT if self._info.raw[0] == _INFO_EXIT else Moment.ENTRY
        return Call(name, moment, paths, arguments)

    def kill(self) -> bool:
        """SIGKILL; False where it had ended by itself."""
        if self.status is not None:
            return False
        os.kill(self.pid, signal.SIGKILL)
        self.wait()
        status: int | None = self.status
        return status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL

    def let_go(self) -> None:
        """On at full speed, not traced any more. Only with Calls.ALL: without a tracer a filter refuses its calls."""
        _ptrace(_DETACH, self.pid)

    def wait(self) -> None:
        """Until it has ended; only after `let_go` or SIGKILL."""
        while self.status is None:
            self._wait()

    def _wait(self) -> int | None:
        """What has stopped it (a signal, and the event above it), or None where it has ended."""
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSTOPPED(status):
            return status >> 8
        self.status = status
        return None

    def _descriptor(self, number: int) -> str:
        try:
            return os.readlink(f"/proc/{self.pid}/fd/{number}")
        except OSError:
            return "?"  # closed: the exit of close()

    def _path(self, name: str, arguments: tuple[int, ...], index: int) -> str:
        text = self._text(arguments[index])
        if index and name not in ("rename", "link", "symlink") and not text.startswith("/"):
            folder = ctypes.c_int(arguments[index - 1] & 0xFFFFFFFF).value
            if folder != _AT_FDCWD:
                return f"{self._descriptor(folder)}/{text}"
        return text

    def _text(self, address: int) -> str:
        """What stands there in the child's memory, up to the first zero byte."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            data = b""
            while b"\0" not in data and len(data) < _PATH_BYTES:
                try:
                    memory.seek(address + len(data))
                    data += memory.read(64)
                except OSError:
                    break
        return data.partition(b"\0")[0].decode("utf-8", "replace")


def _stop_here(calls: Calls) -> None:
    if calls is not Calls.ALL:
        program = _filter(calls)
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, None, 0, 0)
        _libc.prctl(
            _PR_SET_SECCOMP,
            _SECCOMP_MODE_FILTER,
            ctypes.addressof(_Filter(len(program) // _INSTRUCTION.size, program)),
            0,
            0,
        )
    _ptrace(_TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter: code, jump if true, jump if false, value


def _filter(calls: Calls) -> bytes:
    """What `calls` names goes to the tracer; of openat only that for writing."""
    numbers = sorted(number for number, name in _NAMES.items() if name.startswith(calls.value))
    for_writing = _FOR_WRITING if calls is Calls.CHANGING else 0
    lines = [(_LOAD, 0, 0, 0)]
    lines += [(_JUMP_EQUAL, len(numbers) - at + 3, 0, number) for at, number in enumerate(numbers)]
    lines += [
        (_JUMP_EQUAL, 0, 2, _OPENAT),
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        (_JUMP_SET, 1, 0, for_writing),
        (_RETURN, 0, 0, _RET_ALLOW),
        (_RETURN, 0, 0, _RET_TRACE),
    ]
    return b"".join(_INSTRUCTION.pack(*line) for line in lines)
