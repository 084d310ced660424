"""Plant seven faults among 100,000 records, let `ftlaunch prepare` look for them, and print how long it took and how
much memory its processes held; then the same for the look that every start takes.

python scripts/bench_data_check.py MODEL_FOLDER [--records 100000] [--runs 1]

MODEL_FOLDER: a Transformers folder with config and tokenizer (weights are not read). Exit code 1 when a fault is not
found with its line, when it takes more than 30 s, or when four times the records take 1.3 times the memory.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

import psutil  # type: ignore[import-untyped,unused-ignore]  # noqa: E402

from launcher.data.look import load_tokenizer_file, look_at_data  # noqa: E402

WORDS = (
    *("node", "rank", "loss", "shard", "step", "save", "kill", "resume", "port", "store"),
    *("queue", "batch", "memory", "driver", "card", "link", "mount", "file"),
)
BOUND_S, MOST_GROWTH = 30.0, 1.3


def record(number: int) -> dict[str, Any]:
    """Of some 35 words, a few more than those of configs/data."""
    draw = random.Random(number)
    question = " ".join(draw.choices(WORDS, k=draw.randint(6, 18)))
    answer = " ".join(draw.choices(WORDS, k=draw.randint(12, 32)))
    return {"messages": [{"role": "user", "content": f"{number} {question}"}, {"role": "assistant", "content": answer}]}


def _with_role(number: int, role: str) -> bytes:
    changed = record(number)
    changed["messages"][0]["role"] = role
    return json.dumps(changed).encode()


def _with_answer(number: int, answer: Any) -> bytes:
    changed = record(number)
    changed["messages"][1]["content"] = answer
    return json.dumps(changed).encode()


PLANTED: dict[str, Callable[[int], bytes]] = {
    "half a line": lambda n: json.dumps(record(n)).encode()[:-20],
    "an empty answer": lambda n: _with_answer(n, "  "),
    "a number for a text": lambda n: _with_answer(n, 7),
    "no answer": lambda n: json.dumps({"messages": record(n)["messages"][:1]}).encode(),
    "another encoding": lambda n: json.dumps(record(n)).encode()[:-2] + "啊".encode("gbk") + b'"}',
    "a role that nobody knows": lambda n: _with_role(n, "human"),
    "a prompt longer than max_length": lambda n: json.dumps(
        {
            "messages": [
                {"role": "user", "content": " ".join(WORDS * 200)},
                {"role": "assistant", "content": "what is left"},
            ]
        }
    ).encode(),
}


def write_data(path: Path, num_records: int) -> dict[int, str]:
    """Line -> what is wrong with it."""
    lines = random.Random(7).sample(range(1, num_records + 1), len(PLANTED))
    wrong = dict(zip(lines, PLANTED, strict=True))
    with path.open("wb") as stream:
        for number in range(1, num_records + 1):
            raw = PLANTED[wrong[number]](number) if number in wrong else json.dumps(record(number)).encode()
            stream.write(raw + b"\n")
    return wrong


def prepare(folder: Path, model: Path, data: Path) -> tuple[dict[str, Any], float, int]:
    """Its JSON, seconds, and the most that all its processes together held of memory of their own, in bytes."""
    job = folder / "job.yaml"
    job.write_text(
        f"output_dir: {folder / 'run'}\nmodel: {{path: {model}}}\ndata: {{train: {data}, max_length: 512}}\n"
    )
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", "prepare", "--config", str(job), "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    most = 0

    def watch() -> None:
        nonlocal most
        while process.poll() is None:
            try:
                everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                most = max(most, sum(one.memory_full_info().pss for one in everyone))
            except psutil.Error:
                pass
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    seconds = time.monotonic() - began
    watcher.join()
    return json.loads(out), seconds, most


def found_lines(document: dict[str, Any]) -> set[int]:
    (of,) = document["sets"]
    return {fault["line"] for kind in ("unusable", "roles", "repeated", "nothing_left") for fault in of[kind]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--records", type=int, default=100_000)
    arguments = parser.parse_args()
    memory: list[int] = []
    failed = False
    with tempfile.TemporaryDirectory(prefix="ftlaunch-bench-") as name:
        folder = Path(name)
        for num_records in (arguments.records // 4, arguments.records):
            data = folder / f"{num_records}.jsonl"
            wrong = write_data(data, num_records)
            document, seconds, most = prepare(folder, arguments.model.resolve(), data)
            found = found_lines(document)
            missed = {line: what for line, what in wrong.items() if line not in found}
            memory.append(most)
            print(
                f"prepare: {num_records} records, {data.stat().st_size / 2**20:.0f} MiB, {os.cpu_count()} cores: "
                f"{len(wrong) - len(missed)} of {len(wrong)} faults found with their lines, "
                f"{len(found - set(wrong))} others, {seconds:.1f} s, {most / 2**20:.0f} MiB"
            )
            failed |= bool(missed or found - set(wrong)) or seconds > BOUND_S
            began = time.monotonic()
            tokenizer = load_tokenizer_file(arguments.model / "tokenizer.json")
            facts = look_at_data("train", [str(data)], "auto", None, 512, tokenizer)
            assert facts is not None
            seen = {fault.line for fault in (*facts.unusable, *facts.roles)}
            print(
                f"at a start: {facts.num_looked_at} of {facts.num_records or 'more'} records looked at, "
                f"{len(seen & set(wrong))} of {len(wrong)} faults, {time.monotonic() - began:.1f} s"
            )
    growth = memory[1] / memory[0]
    print(f"memory with four times the records: {growth:.2f} times")
    return 1 if failed or growth > MOST_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
