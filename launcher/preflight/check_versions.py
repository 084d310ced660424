"""Versions that do not go together: packages, NCCL, Python and glibc. Nothing is imported to find out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.inputs import PreflightInputs, Reader

# The extra `train` of pyproject.toml: (from, below); a test holds the two together. Below the first ftlaunch calls what
# is not there; at the second something it relies on is known to have gone.
TESTED: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "accelerate": ("1.15", None),
        "deepspeed": ("0.19.8", "0.20"),
        "peft": ("0.21", None),
        "torch": ("2.11", None),
        "transformers": ("5.24", "6"),
    }
)
OLDEST_PYTHON, OLDEST_GLIBC = "3.10", "2.28"  # of ftlaunch; of the wheels of torch since 2.6 (manylinux_2_28)


def check_combination(inputs: PreflightInputs) -> tuple[Finding, ...]:
    if inputs.method is None:
        return ()
    versions, bound = inputs.facts.versions, "versions that go together"
    too_old, too_new = [], []
    for package, (lowest, below) in TESTED.items():
        version = versions.get(package)
        if version is None:
            continue  # `versions.stack` says it
        if numbers(version) < numbers(lowest):
            too_old.append(f"{package} {version} (from {lowest} on)")
        elif below is not None and numbers(version) >= numbers(below):
            too_new.append(f"{package} {version} (below {below})")
    wrong = [*too_old, *too_new, *inputs.facts.conflicts]
    if not wrong:
        if not any(package in versions for package in TESTED):
            return ()
        measured = "no conflict between the packages"
        return (Finding("versions.combination", Severity.OK, measured, bound, Text("they go together", "相互兼容")),)
    shown = "; ".join(wrong)
    message = Text(
        f"these packages do not go together, which shows as an ImportError or a TypeError in the middle of the "
        f"start: {shown}",
        f"这些软件包版本不匹配，启动途中会出现 ImportError 或 TypeError：{shown}",
    )
    where = " in the image" if inputs.reader in (Reader.DLC, Reader.KUBERNETES) else ""
    remedy = Text(
        f'`pip install "ftlaunch[train]" -c constraints.txt`{where} installs versions that are tested together; '
        "`pip check` shows the rest",
        '执行 `pip install "ftlaunch[train]" -c constraints.txt` 安装经过验证的组合；用 `pip check` 查看其余冲突',
    )
    severity = Severity.ERROR if too_old else Severity.WARNING
    measured = f"{len(wrong)} conflict(s)"
    return (Finding("versions.combination", severity, measured, bound, message, remedy),)


def check_copies(inputs: PreflightInputs) -> tuple[Finding, ...]:
    copies, bound = inputs.facts.copies, "one of each"
    if not copies:
        return ()
    shown = "; ".join(f"{copy.name}: {', '.join(copy.found)}" for copy in copies)
    message = Text(
        f"installed more than once; the first is imported, and its parts may be mixed with the other's: {shown}",
        f"同一软件包装了多份，实际导入的是第一份，且可能混用：{shown}",
    )
    names = " ".join(copy.name for copy in copies)
    remedy = Text(
        f"`pip uninstall -y {names}` until nothing is left, then install once; PYTHONNOUSERSITE=1 hides those of "
        "~/.local",
        f"反复执行 `pip uninstall -y {names}` 直到全部卸载，再安装一次；PYTHONNOUSERSITE=1 可屏蔽 ~/.local 中的副本",
    )
    measured = ", ".join(f"{copy.name} x {len(copy.found)}" for copy in copies)
    return (Finding("versions.copies", Severity.WARNING, measured, bound, message, remedy),)


def check_nccl(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """The NCCL that will be loaded, against the one that torch was built with."""
    if inputs.device != "cuda":
        return ()
    built, found = inputs.facts.versions.get("nccl_built"), inputs.facts.versions.get("nccl")
    others = inputs.facts.nccl_libraries
    bound = f"{built} (of torch)" if built else "the one of torch"
    if others:
        message = Text(
            f"LD_PRELOAD or LD_LIBRARY_PATH puts another NCCL in front of the one of torch: {', '.join(others)}. "
            "Ranks whose versions differ hang or end with `unhandled system error`",
            f"LD_PRELOAD 或 LD_LIBRARY_PATH 中有另一份 NCCL 会先被加载：{'、'.join(others)}。"
            "各 rank 版本不一致时会卡住或报 `unhandled system error`",
        )
        remedy = Text(
            "take its folder out of LD_LIBRARY_PATH (unset LD_PRELOAD), unless the platform's network plug-in needs it",
            "从 LD_LIBRARY_PATH 中去掉该目录（或取消 LD_PRELOAD），除非平台的网络插件需要它",
        )
        measured = ", ".join(others)
        return (Finding("versions.nccl", Severity.WARNING, measured, bound, message, remedy),)
    if built is None or found is None:
        return ()
    if found == built:
        return (Finding("versions.nccl", Severity.OK, found, bound, Text("the one of torch", "与 torch 一致")),)
    message = Text(
        f"torch was built with NCCL {built} and {found} is installed: symbols may be missing, and nodes may differ",
        f"torch 构建时使用 NCCL {built}，而已安装 {found}：可能缺少符号，节点间也可能不一致",
    )
    package = f"nvidia-nccl-cu{inputs.facts.versions.get('torch_cuda', '12').partition('.')[0]}"
    remedy = Text(
        f"`pip install {package}=={built}`, the same on every node",
        f"在每个节点上执行 `pip install {package}=={built}`",
    )
    return (Finding("versions.nccl", Severity.WARNING, found, bound, message, remedy),)


def check_system(inputs: PreflightInputs) -> tuple[Finding, ...]:
    versions = inputs.facts.versions
    python, glibc = versions.get("python"), versions.get("glibc")
    if python is None:
        return ()
    measured, bound = f"Python {python}, glibc {glibc or 'none'}", f"Python >= {OLDEST_PYTHON}, glibc >= {OLDEST_GLIBC}"
    wrong = numbers(python) < numbers(OLDEST_PYTHON) or glibc is None or numbers(glibc) < numbers(OLDEST_GLIBC)
    if not wrong:
        return (Finding("versions.system", Severity.OK, measured, bound, Text("new enough", "满足要求")),)
    message = Text(
        "this image is older than the wheels of torch: it was built for a newer glibc (musl, as in Alpine, has none)",
        "镜像比 torch 的安装包更旧：后者需要更新的 glibc（Alpine 使用 musl，没有 glibc）",
    )
    remedy = Text(
        "take an image of Ubuntu 20.04 or later, Debian 11 or later, or one of images/",
        "改用 Ubuntu 20.04、Debian 11 或更新的镜像，或使用 images/ 中的镜像",
    )
    return (Finding("versions.system", Severity.WARNING, measured, bound, message, remedy),)


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0): the release alone; a pre-release counts as its release."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()
