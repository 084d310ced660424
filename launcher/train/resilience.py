"""What makes a Transformers Trainer survive: agreed saves, committed checkpoints, exact resume, a record of every
sample.

`ResilientTrainer` is our own program's trainer. Everything it adds sits in this module, so that another Trainer can be
given the same by mixing `Resilience` in.

Agreed saves are in `stop_request.py`; the argument for them is in docs/agreed-saves.md.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.trainer as trainer_module
from deepspeed.runtime.engine import DeepSpeedEngine
from peft import PeftModel
from transformers import PrinterCallback, Trainer, TrainerCallback

from launcher.checkpoint.identity import FROZEN_BY_STATE
from launcher.checkpoint.manifest import FileRecord, Manifest, read_manifest
from launcher.checkpoint.publish import prune_published
from launcher.checkpoint.snapshot import SnapshotIdentity
from launcher.checkpoint.verify import missing_state
from launcher.config.models import JobConfig
from launcher.data.batches import SAMPLE_KEY, RankLoader
from launcher.data.order import GHOST
from launcher.errors import UserError
from launcher.link import Link
from launcher.plan.spec import RankSpec
from launcher.progress_record import Phase, ProgressRecord
from launcher.train.alive import Alive
from launcher.train.capture import EngineCapture, Part, model_part, trainer_parts
from launcher.train.commit_permit import ask_to_commit
from launcher.train.drills import Drills
from launcher.train.loss import mean_over_the_step
from launcher.train.memory_saver import MemorySaver
from launcher.train.other_world import divide_anew_when_needed
from launcher.train.random_state import random_state_kept, seed_anew
from launcher.train.snapshot_rhythm import SnapshotRhythm
from launcher.train.staged_save import StagedSave
from launcher.train.stop_request import StopRequest
from launcher.train.versions import stack_versions

log = logging.getLogger("ftlaunch.resilience")
rank_log = logging.getLogger("ftlaunch.rank")  # for what the agent shows as well

_IDS_PER_MESSAGE = 4096  # keeps a message well below the channel's limit


def seek_instead_of_skipping() -> None:
    """Let the Trainer start our loader at a position; other loaders keep accelerate's way (draw and drop)."""
    original = trainer_module.skip_first_batches

    def start_at(loader: Any, num_batches: int = 0) -> Any:
        return loader.starting_at(num_batches) if isinstance(loader, RankLoader) else original(loader, num_batches)

    if getattr(original, "__name__", "") != "start_at":
        trainer_module.skip_first_batches = start_at


class ResilienceCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Tells the agent about every step, carries out drills, and turns an agreed save into the Trainer's own."""

    def __init__(
        self, spec: RankSpec, link: Link, rank: int, saver: MemorySaver | None, record: ProgressRecord
    ) -> None:
        self.link = link
        self.record = record
        self.rank = rank
        self.drills = Drills(spec.drills, rank, link)
        self.stop = StopRequest(link, saver.on_message) if saver else StopRequest(link)
        self.samples: list[int] = []
        self.stopped_at: int | None = None
        self.steps_per_epoch = 0  # known when training begins

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.resumed(state.global_step)
        self.record.enter(Phase.TRAINING)
        self.steps_per_epoch = kwargs["train_dataloader"].batch_sampler.order.steps_per_epoch
        self.link.send(
            "phase",
            name="training",
            max_steps=state.max_steps,
            step=state.global_step,
            steps_per_epoch=self.steps_per_epoch,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        self.record.step_ended(step)
        for start in range(0, max(len(self.samples), 1), _IDS_PER_MESSAGE):
            self.link.send("step", step=step, samples=self.samples[start : start + _IDS_PER_MESSAGE])
        self.samples = []
        self.drills.step_ended(step)
        with self.record.within(Phase.SNAPSHOT):
            is_save_due = self.stop.check(step)
        if is_save_due and step < state.max_steps:
            self.stopped_at = step
            control.should_save = True
            control.should_training_stop = True
            control.should_evaluate = False  # the time until SIGKILL belongs to the save

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stopped_at is not None:
            control.should_evaluate = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.rank == 0 and logs and "loss" in logs:
            loss, rate = float(logs["loss"]), float(logs["learning_rate"])
            rank_log.info(
                "step %d of %d: loss %.4f, learning rate %.3g", state.global_step, state.max_steps, loss, rate
            )
            self.link.send("log", step=state.global_step, loss=loss, learning_rate=rate)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if self.rank == 0 and metrics and "eval_loss" in metrics:
            self.link.send("evaluated", step=state.global_step, loss=float(metrics["eval_loss"]))


class Resilience(Trainer):  # type: ignore[misc]  # transformers is untyped here
    """A Trainer whose checkpoints are committed whole and whose data position is exact."""

    def __init__(
        self,
        *args: Any,
        spec: RankSpec,
        config: JobConfig,
        link: Link,
        alive: Alive,
        record: ProgressRecord,
        data_digest: str,
        slots: Sequence[int],
        make_loader: Callable[[], RankLoader],
        **kwargs: Any,
    ) -> None:
        self.spec = spec
        self.config = config
        self.link = link
        self._make_loader = make_loader
        self._staging = False
        self.staged = StagedSave(spec)
        self.alive, self.record = alive, record
        self.data_digest = data_digest
        self.saver = self._saver(slots, kwargs["args"]) if slots and spec.memory_every is not None else None
        self._engine_capture: EngineCapture | None = None
        self._snapshot_of = self._steps_ended = 0  # the latest step with a snapshot, and the latest at all
        self._save_waits = False  # for the end of the epoch
        self.resilience = ResilienceCallback(spec, link, kwargs["args"].process_index, self.saver, record)
        super().__init__(*args, **kwargs)
        if not self.model_accepts_loss_kwargs:
            self.compute_loss_func = mean_over_the_step(self.label_smoother)
            self._loss_shifts_labels = True
        self.add_callback(self.resilience)
        self.remove_callback(PrinterCallback)  # the same figures go to the agent, which shows them
        seek_instead_of_skipping()
        divide_anew_when_needed(self._tell_phase)

    def _saver(self, slots: Sequence[int], args: Any) -> MemorySaver:
        spec, budget = self.spec, self.config.checkpoint.budget
        rhythm = SnapshotRhythm(spec, budget, self.link, device=args.device, rank=args.process_index)
        return MemorySaver(
            slots, self.link, rhythm, generation=spec.generation, resumed_from=resumed_step(spec), peers=spec.peers
        )

    def _tell_phase(self, name: str) -> None:
        self.link.send("phase", name=name)

    # -- data ----------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> RankLoader:
        return self._make_loader()

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self.record.micro_batch_begins()
        self.alive.tell(f"step {self.state.global_step + 1}", "micro-batches", self.alive.count + 1)
        self.resilience.drills.micro_batch_begins(self.state.global_step + 1)
        ids = inputs.pop(SAMPLE_KEY).tolist()
        self.resilience.samples.extend(i for i in ids if i != GHOST)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.saver is not None and self.accelerator.sync_gradients:
            with self.record.within(Phase.SNAPSHOT):
                self.saver.fence()  # the step's last backward pass is next: its collective lets the other ranks go on
        return loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs.pop(SAMPLE_KEY, None)
        self.record.worked()
        self.alive.tell("evaluation", "batches", self.alive.count + 1)
        self.resilience.drills.evaluation_batch_begins(self.state.global_step)
        return super().prediction_step(model, inputs, *args, **kwargs)

    # -- engine and resume ---------------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        started = time.monotonic()
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if not isinstance(self.model_wrapped, DeepSpeedEngine):
            raise UserError(
                "DeepSpeed's engine is not there: accelerate drops the DeepSpeed configuration when ACCELERATE_USE_CPU "
                "is set. Unset the ACCELERATE_* variables of the image and of `env`."
            )
        self._prepare_snapshots()
        if resume_from_checkpoint is not None:
            self.link.send(
                "resumed",
                step=self.state.global_step,
                tier=self.spec.resume_tier,
                path=resume_from_checkpoint,
                samples_seen=self.samples_seen(),
                seconds=round(time.monotonic() - started, 3),
            )
        return prepared

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        positions = super()._init_training_state(max_steps, *args, **kwargs)
        # A resumed state brings the intervals of the old start along; the job.yaml of this start decides.
        self.state.compute_steps(self.args, max_steps)
        return positions

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Those that this rank has saved; where the ranks are not as many as they were, new ones from the seed."""
        if checkpoint is not None and read_manifest(Path(checkpoint)).world_size != self.args.world_size:
            seed_anew(self.args.seed, self.state.global_step, self.args.world_size, self.args.process_index)
            return
        super()._load_rng_state(checkpoint)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer looks at max_steps only after a step: resumed at the planned end it would train one too many.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        self.record.enter(Phase.BATCH)  # the loader starts: it draws an order, its workers import
        super()._run_epoch(*args, **kwargs)
        self.record.enter(Phase.TRAINING)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.record.enter(Phase.BATCH)
        samples = super().get_batch_samples(*args, **kwargs)
        self.record.enter(Phase.TRAINING)
        return samples

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluation draws random numbers (loaders, dropout of some models); training must not notice, or a resume that
        skips an evaluation would go on differently."""
        with random_state_kept(), self.record.within(Phase.EVALUATING):
            return super().evaluate(*args, **kwargs)

    # -- save ----------------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.staged.root()) if self._staging else str(super()._get_output_dir(trial))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """A step is saved after its log and its evaluation, so that a resume repeats neither.

        The Trainer comes here after each step, and once more at the end of an epoch, which may have an evaluation of
        its own: the last step of an epoch is saved then.
        """
        step = self.state.global_step
        comes_again = False
        if step > self._steps_ended:
            self._steps_ended = step
            comes_again = self._epoch_ends_after(step)
            if self.saver is not None:
                self.saver.rhythm.step_ended(step)
        if comes_again:
            self._save_waits, self.control.should_save = self.control.should_save, False
        elif self._save_waits:
            self._save_waits, self.control.should_save = False, True
        if self.control.should_evaluate and self.saver is not None:
            self.saver.rhythm.pause()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.saver is not None and not comes_again and step > self._snapshot_of and self.saver.rhythm.is_due(step):
            with self.record.within(Phase.SNAPSHOT):
                self._take_snapshot(for_disk=False)

    def _epoch_ends_after(self, step: int) -> bool:
        control = self.control
        return control.should_training_stop or control.should_epoch_stop or step % self.resilience.steps_per_epoch == 0

    def _prepare_snapshots(self) -> None:
        """What DeepSpeed saves beside the state dicts (experts, an optimizer on NVMe) no snapshot has."""
        engine = self.model_wrapped
        if self.saver is None:
            return
        if not engine.has_moe_layers and not engine.zero_nvme_offload_optimizer():
            self._engine_capture = EngineCapture(engine, trainable_only=isinstance(self.model, PeftModel))
        else:
            what = "mixture-of-experts layers" if engine.has_moe_layers else "an optimizer on NVMe"
            rank_log.info("with %s checkpoints are on disk only, and the training waits for them", what)
            self.saver.close()
            self.saver = None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.record.within(Phase.SAVING):
            if self.saver is not None:
                self._take_snapshot(for_disk=True)
            else:
                self._save_at_once(model, trial)

    def _take_snapshot(self, *, for_disk: bool) -> None:
        spec, step, rank = self.spec, self.state.global_step, self.args.process_index
        assert self.saver is not None  # or nobody would have called
        if for_disk:
            self.store_flos()
        self._snapshot_of = step
        self.saver.save(
            SnapshotIdentity(spec.run_id, spec.config_sha, spec.generation, step, rank, self.args.world_size),
            partial(self._capture, for_disk=for_disk),
            lambda: asdict(self.manifest({}, kind="checkpoint")) if rank == 0 else {},
            for_disk=for_disk,
        )

    def _capture(self, *, for_disk: bool) -> list[Part]:
        assert self._engine_capture is not None  # there is one where there is a saver
        step = self.state.global_step
        parts = self._engine_capture.parts(step)
        if for_disk:
            parts.append(Part(lambda sink: self.resilience.drills.half_saved(step)))
        parts += trainer_parts(self, own_scheduler="scheduler" not in self.spec.ds_config)
        model = model_part(self) if for_disk else None
        return [*parts, model] if model else parts

    def wait_until_durable(self) -> None:
        """Until every checkpoint of this rank is in the output folder."""
        if self.saver is not None:
            self.record.enter(Phase.SAVING)
            self.link.send("phase", name="saving", step=self.state.global_step)
            self.saver.wait_until_durable()

    def _save_at_once(self, model: Any, trial: Any) -> None:
        """Without memory for snapshots: the ranks write, rank 0 commits, and the training waits."""
        started = time.monotonic()
        step = self.state.global_step
        self.link.send("phase", name="saving", step=step)
        self._staging = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = False
        barrier()
        if self.args.process_index == 0:
            make_readable(self.staged.root() / f"checkpoint-{step}")
        folder, files = self.staged.put(f"checkpoint-{step}")
        if self.args.process_index == 0:
            self._commit(step, folder, files, started)
        barrier()
        self.link.send("phase", name="training", step=step)

    def _save_rng_state(self, output_dir: str) -> None:
        self.resilience.drills.half_saved(self.state.global_step)
        super()._save_rng_state(output_dir)

    def _commit(self, step: int, staged: Path, files: Mapping[str, FileRecord], started: float) -> None:
        missing = missing_state(
            staged,
            step,
            self.args.world_size,
            zero_stage=self.spec.zero_stage,
            own_scheduler="scheduler" not in self.spec.ds_config,
        )
        if missing:
            raise RuntimeError(f"the checkpoint of step {step} is not complete and was not committed: {missing}")
        manifest = self.manifest(files, kind="checkpoint")
        allowed = partial(ask_to_commit, self.link, step, staged.name)
        committed = self.staged.publish(staged.name, manifest, may_commit=allowed)
        deleted = prune_published(
            self.spec.storage_kind, self.spec.output_path, self.config.checkpoint.keep, self.spec.generation
        )
        seconds = round(time.monotonic() - started, 3)
        self.link.send(
            "checkpoint_saved",
            step=step,
            tier="disk",
            path=str(committed.path),
            bytes=committed.total_bytes,
            stall_seconds=seconds,
            durable_seconds=seconds,
            pruned=[path.name for path in deleted],
        )

    def manifest(self, files: Mapping[str, FileRecord], *, kind: str) -> Manifest:
        spec = self.spec
        return Manifest(
            kind=kind,
            step=self.state.global_step,
            world_size=self.args.world_size,
            num_nodes=spec.num_nodes,
            precision=spec.precision,
            run_id=spec.run_id,
            config_sha=spec.config_sha,
            identity=spec.identity,
            samples_seen=self.samples_seen(),
            planned_steps=self.state.max_steps,
            plan={key: self.config.training.get(key) for key in ("max_steps", "num_train_epochs")},
            training={key: self.config.training.get(key) for key in FROZEN_BY_STATE},
            own_scheduler="scheduler" not in spec.ds_config,
            data_digest=self.data_digest,
            global_batch_size=spec.global_batch_size,
            versions=stack_versions(),
            files=files,
        )

    def samples_seen(self) -> int:
        """Samples that the weights have learned from, over all epochs and ranks (a function of the step alone)."""
        return self._make_loader().samples_after(self.state.global_step)


def resumed_step(spec: RankSpec) -> int:
    """The step that this generation goes on from."""
    return read_manifest(Path(spec.resume_from)).step if spec.resume_from else 0


def barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def make_readable(folder: Path) -> None:
    """Give files the mode that the umask asks for: safetensors 0.8 writes them 0600, unreadable for another uid on
    NAS."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)
