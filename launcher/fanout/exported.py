"""What of the head's environment the other nodes get, as DeepSpeed's runner chooses it.

By prefix, plus whatever `.deepspeed_env` in the home folder and then in the working directory names. What each node
must find for itself (its GPUs, its rank, its platform) is never passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# DeepSpeed's EXPORT_ENVS and its accelerators' (runner.py, cuda_accelerator.py) ...
_DEEPSPEEDS = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
# ... and what decides in the same way how ftlaunch and the training stack behave.
_OURS = ("TORCH_NCCL_", "GLOO_", "HF_", "TRANSFORMERS_", "FTLAUNCH_LANG", "FTLAUNCH_FORK_SERVER", "FTLAUNCH_TOKEN")
_EACH_ITS_OWN = frozenset({"CUDA_VISIBLE_DEVICES", "PYTHONPATH"})  # PYTHONPATH goes with the command
_FILE_VARIABLE = "DS_ENV_FILE"
_MOST_BYTES = 1 << 20


def exported_environ(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """`folder` is the working directory. Lines of the files win over the environment, the later file over the first."""
    passed = {name: value for name, value in environ.items() if name.startswith((*_DEEPSPEEDS, *_OURS))}
    name = environ.get(_FILE_VARIABLE, ".deepspeed_env")
    home = environ.get("HOME")
    for path in ([Path(home) / name] if home else []) + [folder / name]:
        passed.update(_read(path))
    return {name: value for name, value in passed.items() if name not in _EACH_ITS_OWN}


def _read(path: Path) -> dict[str, str]:
    """`NAME=value` lines. Unlike DeepSpeed, which raises at a blank line and exports `# a=b`, both are passed over."""
    try:
        with path.open("rb") as stream:
            text = stream.read(_MOST_BYTES).decode("utf-8", "surrogateescape")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals and name.strip()}
