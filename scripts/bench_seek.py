"""How long a resume waits for its data: from "the loader starts" to "the first batch is in hand", at position 0 and at
sample 3,000,000 of 3,000,001.

Ours is `launcher/data`: `RankLoader.starting_at`. Trainer's own is what it does on a resume: `skip_first_batches` of
accelerate over the loader that accelerate has prepared. Over an IterableDataset, its worst case, it makes every batch
before the position and throws it away: that is timed for the first hundredth of the way.

Both give the same tokens: 16 a sample, batches of 1 or as said. Medians of five; in brackets the processor's seconds,
which a busy machine does not stretch (without those of workers). What comes before the loader (imports, model, encoding
of the data) is the same for both and is not counted. Exit code 1 where ours needs more than a second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

import numpy as np  # noqa: E402
import torch  # noqa: E402
from accelerate import skip_first_batches  # noqa: E402
from accelerate.data_loader import prepare_data_loader  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, RandomSampler  # noqa: E402

from launcher.data.batches import Collator, RankBatchSampler, RankLoader, SampleDataset  # noqa: E402
from launcher.data.encode import EncodedDataset  # noqa: E402
from launcher.data.order import SampleOrder  # noqa: E402

NUM_SAMPLES = 3_000_001
POSITION = 3_000_000
TOKENS = 16
NUM_RUNS = 5
BOUND_S = 1.0

Start = Callable[[int], Any]  # the first batch from this sample of the epoch on


def main() -> int:
    dataset = SampleDataset(encoded())
    slowest_s = 0.0
    cases = [
        ("ftlaunch", ours(dataset), 1),
        ("ftlaunch, third epoch", ours(dataset, epoch=2), 1),
        ("ftlaunch, rank 7 of 8, batches of 4, 16 micro-batches", ours(dataset, world_size=8, batch=4, steps=16), 1),
        ("ftlaunch, 2 workers", ours(dataset, num_workers=2), 1),
        ("Trainer", trainers(dataset), 0),
        ("Trainer, rank 7 of 8, batches of 4", trainers(dataset, world_size=8, batch=4), 0),
        ("Trainer, 2 workers", trainers(dataset, num_workers=2), 0),
    ]
    print(f"{'':56}{'sample 0':>18}{f'sample {POSITION:,}':>21}")
    for name, start, is_ours in cases:
        (begin_s, begin_cpu_s), (end_s, end_cpu_s) = (medians(start, at) for at in (0, POSITION))
        print(f"{name:56}{begin_s:8.3f} s ({begin_cpu_s:.3f}){end_s:11.3f} s ({end_cpu_s:.3f})", flush=True)
        slowest_s = max(slowest_s, end_s) if is_ours else slowest_s
    part_s, part_cpu_s = medians(trainers(Walked(dataset)), POSITION // 100)
    part = f"{part_s:.3f} s ({part_cpu_s:.3f}) to sample {POSITION // 100:,}"
    print(
        f"Trainer, IterableDataset: {part}, at this pace {100 * part_s:.0f} s ({100 * part_cpu_s:.0f}) to the position"
    )
    print(f"ftlaunch at sample {POSITION:,}: at most {slowest_s:.3f} s, bound {BOUND_S} s")
    return 0 if slowest_s <= BOUND_S else 1


def medians(start: Start, position: int) -> tuple[float, float]:
    """Wall clock and processor, in seconds."""
    runs = [seconds(start, position) for _ in range(NUM_RUNS)]
    return statistics.median(wall_s for wall_s, _ in runs), statistics.median(cpu_s for _, cpu_s in runs)


def seconds(start: Start, position: int) -> tuple[float, float]:
    began, began_cpu = time.perf_counter(), time.process_time()
    batch = start(position)
    elapsed = time.perf_counter() - began, time.process_time() - began_cpu
    assert batch["input_ids"].shape[1] == TOKENS
    return elapsed


def encoded() -> EncodedDataset:
    ids = np.arange(NUM_SAMPLES * TOKENS, dtype=np.int32)
    return EncodedDataset(ids, ids, np.arange(0, len(ids) + 1, TOKENS, dtype=np.int64), num_truncated=0)


def ours(
    dataset: SampleDataset, *, epoch: int = 0, world_size: int = 1, batch: int = 1, steps: int = 1, num_workers: int = 0
) -> Start:
    """As the Trainer does with our loader: at the step that has given out `position` samples of the epoch, on the last
    rank. The position is rounded to whole optimizer steps, from which alone a run resumes."""
    global_batch = world_size * batch * steps
    order = SampleOrder(len(dataset), batch, world_size, global_batch, seed=42)

    def start(position: int) -> Any:
        loader = RankLoader(
            dataset,
            RankBatchSampler(order, world_size - 1),
            Collator(pad_token_id=0),
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(order.seed),
        )
        if position:
            loader = loader.starting_at(position // global_batch * order.accumulation)
        loader.set_epoch(epoch)
        return next(iter(loader))

    return start


def trainers(dataset: Any, *, world_size: int = 1, batch: int = 1, num_workers: int = 0) -> Start:
    """As `Trainer.get_train_dataloader`, `accelerator.prepare` and `Trainer._run_epoch` do."""

    def start(position: int) -> Any:
        options: dict[str, Any] = {"batch_size": batch, "collate_fn": Collator(pad_token_id=0)}
        if not isinstance(dataset, IterableDataset):
            options["sampler"] = RandomSampler(dataset, generator=torch.Generator().manual_seed(42))
        loader: Any = prepare_data_loader(
            DataLoader(dataset, num_workers=num_workers, **options),
            device=torch.device("cpu"),
            num_processes=world_size,
            process_index=world_size - 1,
            put_on_device=False,
            dispatch_batches=False,
            use_seedable_sampler=True,
            data_seed=42,
        )
        if position:
            loader = skip_first_batches(loader, position // (world_size * batch))
        return next(iter(loader))

    return start


class Walked(IterableDataset[dict[str, Any]]):
    """The same samples where only the next one can be asked for, as with a stream."""

    def __init__(self, dataset: SampleDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.dataset[index] for index in range(len(self.dataset)))


if __name__ == "__main__":
    sys.exit(main())
