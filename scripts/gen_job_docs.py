"""Write `docs/job-yaml.md` from the schema of job.yaml, so that page and code cannot drift apart.

python scripts/gen_job_docs.py            # write the page
python scripts/gen_job_docs.py --check    # exit 1 when the page is not up to date
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from launcher.config.describe import describe  # noqa: E402
from launcher.config.schema import job_schema  # noqa: E402
from launcher.config.training import OWNED, RENAMED, accepted_training_keys  # noqa: E402
from launcher.data.records import FORMATS  # noqa: E402

TARGET = ROOT / "docs" / "job-yaml.md"

HEAD = """\
# job.yaml

Written by `scripts/gen_job_docs.py` from the code; do not edit this page. `ftlaunch schema` prints the same as JSON
Schema (draft 2020-12) for editors.

## The least that a job needs

```yaml
# job.yaml
output_dir: runs/first
model: {path: Qwen/Qwen2.5-0.5B-Instruct}
data: {train: train.jsonl}
```

## How the file is read

- YAML 1.2, UTF-8. `1e-4` is a number; `yes` and `on` are text, not true. Values are not converted: `"16"` is not 16.
- An unknown key, a key given twice and a value of the wrong type are errors. All mistakes are shown at once, each with
  file and line, what is accepted, and the nearest right key. Exit code 2.
- Order of precedence: `--set KEY=VALUE` over `FTLAUNCH_SET` (entries separated by `;` or line breaks) over the file
  over the defaults. Values are YAML: `--set training.max_steps=100`, `--set 'data.train=[a.jsonl, b.jsonl]'`.
- `~`, `$NAME` and `${NAME}` are expanded in paths only: `output_dir`, `model.path`, `data.train`, `data.eval`,
  `deepspeed.config`, `cluster.hostfile`. A variable that is not set is an error. Relative paths begin at the folder of
  job.yaml.
- `ftlaunch plan` shows every resolved value with its origin.
- A section that is left out has the defaults of its keys.

"Later" in the tables below: the key is known but not built in this version; the note says whether it is refused or has
no effect.
"""

# What a key does in this version where the schema alone would promise more; `command` and `nodes` are refused by
# launcher/plan/launch_plan.py.
NOTES: Mapping[str, str] = {
    "command": "Later: refused (exit code 2)",
    "checkpoint.memory": "`auto` is off on a node whose memory does not suffice; `on` and a number are refused there "
    "([sizing.md](sizing.md#memory-of-the-memory-tier)). How often: "
    "[checkpoints.md](checkpoints.md#how-often-in-memory)",
    "cluster.nodes": "Left out, the platform's number counts ([platforms.md](platforms.md)); a number that contradicts "
    "it is refused",
    "cluster.hosts": "The node's index is its place in the list",
    "cluster.hostfile": "`slots` is the number of ranks on each node",
    "cluster.interface": "`auto` is the loopback on one node, else the interface of the route to the other nodes",
    "cluster.master_port": "Used by the first attempt of a start, refused when it is taken; every later attempt takes "
    "a new free port",
    "cluster.nproc_per_node": "1 on a machine without GPU; the same on every node",
    "cluster.token": "Never shown",
    "cluster.gather_seconds": "At most half of wait_seconds",
    "restart.hang_seconds": "A number holds from the first step on, `off` finds no hangs ([hangs.md](hangs.md))",
    "restart.adjust": "Later: no effect, which a start says where the key is given; an out-of-memory error stops the "
    "run with exit code 1",
    "spot.notice": "Later: no effect; SIGTERM, SIGINT and SIGHUP are always heeded",
    "monitor.tensorboard": "Needs the package `tensorboard`; files are in `runs/` below output_dir",
    "monitor.prometheus_port": "Later: anything but 0 is refused",
    "deepspeed.stage": "`auto`: 2 where it fits 70 % of the smallest card with the fewest nodes, else 3 "
    "([sizing.md](sizing.md)); a run that continues keeps its stage",
    "deepspeed.config": "Checked before the start: micro-batch, accumulation and precision must agree with job.yaml, "
    'or be `"auto"`',
    "precision": "A run that continues keeps its precision",
    "lora.target_modules": "`auto`: the linear layers of the blocks of a known model type, else `all-linear`",
    "env": "Refused are names that ftlaunch sets for each rank (`RANK`, `WORLD_SIZE`, `MASTER_PORT`, `FTLAUNCH_*`, "
    "...) and true, false and null, because what a program wants is not known; numbers are taken as written",
    "drill.kill": "See [drills.md](drills.md)",
    "model": "Required in this version",
    "data": "Required in this version",
    "data.eval": "Evaluated before the first step, then as `training.eval_strategy` says, else at the end",
    "data.max_length": "How many were cut is in the log of rank 0",
    "data.packing": "A row is then what `per_device_train_batch_size` counts; evaluation takes single samples. Models "
    "that cannot keep the samples of a row apart are refused, as is flash attention with more than one row a batch",
    "training": "See [below](#training)",
    "check.skip": "The ids are in [checks.md](checks.md)",
    "output_dir": "See [output-folder.md](output-folder.md)",
    "sample_questions": "Greedy, 80 tokens; not asked with ZeRO-3",
}

# Keys of which a change makes another run: see launcher/checkpoint/identity.py.
TAIL = """\
## What makes two starts the same run

A start continues the run in `output_dir` when these agree with the newest whole checkpoint: `model.path`,
`model.gguf_file`, `model.revision`, `method`, `data.train` (as resolved paths), `data.format`, `data.max_length`,
`data.packing`, `data.train_on_prompt`, `data.system_prompt`, the ZeRO stage, the precision, the `lora` section (not
with `method: full`), the `qlora` section (with `method: qlora`), and of `training`: `seed`, `data_seed`,
`per_device_train_batch_size`, `gradient_accumulation_steps`, `optim`. A difference is an error (exit code 2) that lists
old and new values; nothing is overwritten. The number of ranks may change
([checkpoints.md](checkpoints.md#with-another-number-of-ranks)). `ftlaunch plan` and `ftlaunch check` say beforehand
what a start would refuse.

- `precision: auto` and `deepspeed.stage: auto` stay what they were at the first start, also on another kind of machine.
- The data is compared by content: when the encoded training data (files, template, tokenizer) is not what the
  checkpoint was trained on, the start ends with exit code 2.
- `learning_rate`, `lr_scheduler_type`, `lr_scheduler_kwargs`, `warmup_steps`, `weight_decay`, `adam_beta1`,
  `adam_beta2` and `adam_epsilon` live on in the saved optimizer and schedule: a new value has no effect, which the
  start says.
- Everything else may change between two starts, for example `training.max_steps`, to train longer.
"""


def page() -> str:
    """The whole page."""
    schema = job_schema()
    definitions = schema["$defs"]
    lines = [HEAD, "## Top level", "", *_table("", schema, definitions)]
    for name, node in schema["properties"].items():
        section = _section(node, definitions)
        if section is None or name == "training":
            continue
        lines += [
            f"## {name}",
            "",
            f"{_sentence(section.get('description', ''))}",
            "",
            *_table(name, section, definitions),
        ]
        lines += [*_items(name, section, definitions), *(_formats() if name == "data" else ())]
    lines += [*_training(), TAIL.rstrip("\n")]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(section: str, node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, key in node["properties"].items():
        dotted = f"{section}.{name}" if section else name
        default = _default(name, key, node, definitions)
        yield f"| `{name}` | {_type(key, definitions)} | {default} | {_meaning(dotted, key)} |"
    yield ""


def _items(section: str, node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    """The mappings that a list of a section holds (`drill.kill`)."""
    for name, key in node["properties"].items():
        for alternative in key.get("anyOf", []):
            if "$ref" in alternative:
                yield f"Keys of each item of `{section}.{name}`:"
                yield ""
                yield from _table("", definitions[alternative["$ref"].rsplit("/", 1)[-1]], definitions)


def _formats() -> Iterator[str]:
    """The fields that make a record one of a format."""
    yield "One record is one line of JSON. `auto` takes the first format whose fields are all there:"
    yield ""
    yield "| format | fields | learned |"
    yield "|---|---|---|"
    for name, fields in FORMATS.items():
        shown = ", ".join(f"`{field}`" for field in fields) + (", `input` (optional)" if name == "alpaca" else "")
        learned = "the whole text" if name == "text" else "the last answer, unless train_on_prompt"
        yield f"| `{name}` | {shown} | {learned} |"
    yield ""
    yield "`messages` is a list of `{role, content}`; the last one has the role `assistant`."
    yield ""


def _section(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The mapping behind a top-level key; None for a plain value."""
    for alternative in [node, *node.get("anyOf", []), *node.get("allOf", [])]:
        if "$ref" in alternative:
            found: Mapping[str, Any] = definitions[alternative["$ref"].rsplit("/", 1)[-1]]
            return found
    return None


def _type(key: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "additionalProperties" in key and key.get("properties"):
        return "a mapping"
    section = _section(key, definitions)
    if section is not None and "kill" not in section["properties"] and section is not definitions.get("KillDrill"):
        short_form = any(item.get("type") == "string" for item in key.get("anyOf", []))
        return "section, or the path of a JSON file" if short_form else "section"
    if section is not None:
        return "section" if "kill" in section["properties"] else "a mapping or a list of mappings"
    return _escape(describe(key, definitions))


def _default(name: str, key: Mapping[str, Any], node: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if name in node.get("required", ()):
        return "required"
    default = key.get("default")
    if isinstance(default, dict) and default and _section(key, definitions) is not None:
        return ""
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def _meaning(dotted: str, key: Mapping[str, Any]) -> str:
    text = _sentence(key.get("description", ""))
    if dotted in NOTES:
        text += f" {_sentence(NOTES[dotted])}"
    examples = ", ".join(f"`{_example(example)}`" for example in key.get("examples", []))
    return _escape(f"{text} Example: {examples}" if examples else text)


def _example(value: Any) -> str:
    """Short YAML: text without quotes, mappings and lists in flow style."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_example(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_example(item) for item in value) + "]"
    return json.dumps(value)


def _training() -> Iterator[str]:
    yield "## training"
    yield ""
    yield (
        f"Any of {len(accepted_training_keys())} keys of Transformers' `TrainingArguments`, such as `learning_rate`, "
        "`num_train_epochs`, `max_steps`, `per_device_train_batch_size`, `gradient_accumulation_steps`, "
        "`gradient_checkpointing`, `warmup_steps`, `lr_scheduler_type`. Names, types and choices are checked before "
        "anything starts; `ftlaunch schema` lists them all."
    )
    yield ""
    yield (
        "Defaults that differ from those of Transformers: `logging_steps: 10`; `report_to: []` (`tensorboard` with "
        "`monitor.tensorboard`); `gradient_checkpointing: true` on GPUs, with `use_reentrant: false`."
    )
    yield ""
    yield "Keys that ftlaunch owns, and where they live instead:"
    yield ""
    yield "| training key | what to do |"
    yield "|---|---|"
    for name, remedy in OWNED.items():
        yield f"| `{name}` | {_escape(_sentence(remedy))} |"
    yield ""
    yield "Names of other trainers or of older Transformers, and what to write here:"
    yield ""
    yield "| name | here |"
    yield "|---|---|"
    for name, here in RENAMED.items():
        yield f"| `{name}` | {_escape(here)} |"
    yield ""


def _sentence(text: str) -> str:
    text = text.strip()
    if not text:
        return ""
    first = text if text.startswith(("`", "~", "auto", "ftlaunch")) else text[0].upper() + text[1:]
    return first if first.endswith((".", "?")) else first + "."


def _escape(text: str) -> str:
    return text.replace("|", r"\|")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/job-yaml.md from the schema of job.yaml.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is not up to date")
    arguments = parser.parse_args()
    if arguments.check:
        return 0 if TARGET.is_file() and TARGET.read_text("utf-8") == page() else 1
    TARGET.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
