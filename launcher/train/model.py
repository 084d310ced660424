"""Model and tokenizer: from a folder, a hub id or a GGUF file; with LoRA, QLoRA or all weights trainable."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from launcher.config.inputs import model_folder
from launcher.config.models import JobConfig, ModelConfig
from launcher.errors import UserError
from launcher.plan.spec import RankSpec

log = logging.getLogger("ftlaunch.model")

_GGUF_WAIT_S = 1800


def prepare_model_files(config: JobConfig) -> str:
    """Folder or hub id to load from. Converts a GGUF file the first time; called before the process group exists,
    because `save_pretrained` writes only part of the files on ranks other than 0 once there is one."""
    if config.model is None:
        raise UserError("model: is missing")
    folder = model_folder(config.model.path)
    if config.model.gguf_file:
        return str(dequantised_folder(folder or _downloaded(config.model), config.model.gguf_file))
    return str(folder or config.model.path)


def _downloaded(model: ModelConfig) -> Path:
    """The hub's snapshot with the GGUF file and the small files beside it (tokenizer, configuration)."""
    from huggingface_hub import snapshot_download

    wanted = [model.gguf_file or "*.gguf", "*.json", "*.jinja", "*.model"]
    return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=wanted))


def load_tokenizer(config: JobConfig) -> Any:
    """The model's own tokenizer, with something to pad with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare_model_files(config), **_common_options(config))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(spec: RankSpec, config: JobConfig, *, seed: int, local_rank: int = 0) -> Any:
    """The model as it will be trained, adapters attached."""
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    assert config.model is not None  # prepare_model_files() has checked
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[spec.precision]
    options: dict[str, Any] = {"dtype": dtype, **_common_options(config)}
    if config.model.attn_implementation:
        options["attn_implementation"] = config.model.attn_implementation
    if config.method == "qlora":
        options.update(_quantisation(spec, config, local_rank, dtype))
    set_seed(seed)  # adapters and new heads start from the same values on every rank and at every start
    model = AutoModelForCausalLM.from_pretrained(prepare_model_files(config), **options)
    model.config.use_cache = False
    return model if config.method == "full" else _with_adapter(model, spec, config)


def _common_options(config: JobConfig) -> dict[str, Any]:
    assert config.model is not None  # prepare_model_files() has checked
    return {"revision": config.model.revision or "main", "trust_remote_code": config.model.trust_remote_code}


def _with_adapter(model: Any, spec: RankSpec, config: JobConfig) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if config.method == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=spec.gradient_checkpointing)
    targets = spec.lora_target_modules
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora.r,
        lora_alpha=config.lora.alpha or 2 * config.lora.r,
        lora_dropout=config.lora.dropout,
        bias=config.lora.bias,
        target_modules=targets if isinstance(targets, str) else list(targets or ()),
        modules_to_save=list(config.lora.modules_to_save) or None,
    )
    try:
        return get_peft_model(model, lora)
    except ValueError as error:
        if "target" not in str(error).lower():
            raise
        leaves = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if type(m).__name__.endswith("Linear")})
        raise UserError(
            f"lora.target_modules {targets!r} names no module of this model. Its linear modules are: "
            f"{', '.join(leaves)}. Use some of these, or `auto`."
        ) from error


def _quantisation(spec: RankSpec, config: JobConfig, local_rank: int, dtype: Any) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.qlora.quant_type,
        bnb_4bit_use_double_quant=config.qlora.double_quant,
        bnb_4bit_compute_dtype=dtype,
        # ZeRO-3 shards by dtype: the packed 4-bit weights must look like the others.
        **({"bnb_4bit_quant_storage": dtype} if spec.zero_stage == 3 else {}),
    )
    options: dict[str, Any] = {"quantization_config": quantisation}
    if spec.zero_stage != 3:
        options["device_map"] = {"": local_rank if spec.device == "cuda" else "cpu"}
    return options


def dequantised_folder(folder: Path, gguf_file: str) -> Path:
    """A Transformers folder with the GGUF file's weights, made once per machine and reused by every later start.

    The cache is `FTLAUNCH_CACHE`, else `$XDG_CACHE_HOME/ftlaunch`, else `~/.cache/ftlaunch`. Ranks of a node wait for
    the one that converts; a conversion that was killed leaves only a temporary folder behind.
    """
    from filelock import FileLock

    source = folder / gguf_file
    if not source.is_file():
        raise UserError(f"model.gguf_file: {source} does not exist")
    stat = source.stat()
    target = cache_root() / "models" / f"{source.stem}-{stat.st_size:x}-{int(stat.st_mtime):x}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(target) + ".lock", timeout=_GGUF_WAIT_S):
        if not (target / "config.json").is_file():
            _dequantise(folder, gguf_file, target)
    return target


def cache_root() -> Path:
    explicit = os.environ.get("FTLAUNCH_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ftlaunch"


def _dequantise(folder: Path, gguf_file: str, target: Path) -> None:
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    started = time.monotonic()
    log.info("converting %s to a Transformers folder in %s (once)", gguf_file, target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=target.name + ".") as name:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf_file, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        if not (Path(name) / "config.json").is_file():
            raise RuntimeError(f"Transformers wrote no config.json for {gguf_file}")
        os.chmod(name, 0o755)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(name, target)
        os.makedirs(name)  # TemporaryDirectory wants something to remove
    log.info("converted in %.1f s", time.monotonic() - started)
