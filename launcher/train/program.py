"""The fine-tuning program: data, trainer, resume, the planned end, and what people look at afterwards."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from launcher.checkpoint.manifest import read_manifest
from launcher.config.models import JobConfig
from launcher.data.batches import Collator, PackedDataset, RankBatchSampler, RankLoader, SampleDataset
from launcher.data.encode import EncodedDataset, plain_prompt
from launcher.data.order import SampleOrder
from launcher.data.packing import Packing, pack
from launcher.data.records import read_records
from launcher.diagnose.bad_sample import TOKEN, BadSample, Offence, describe
from launcher.errors import UserError
from launcher.link import Link
from launcher.plan.spec import RankSpec
from launcher.progress_record import Phase
from launcher.train.alive import Alive
from launcher.train.card import model_card
from launcher.train.commit_permit import ask_to_commit
from launcher.train.inputs import Inputs, encode_all
from launcher.train.model import load_model, load_tokenizer
from launcher.train.packed_attention import require_packing
from launcher.train.resilience import Resilience, barrier, make_readable
from launcher.train.same_weights import compare_before_broadcast

if TYPE_CHECKING:
    from launcher.train.main import Phases, RankPlace

log = logging.getLogger("ftlaunch.train")

_ANSWER_TOKENS = 80


class FineTuning:
    """One rank's part of a generation, from encoded data to the end or an agreed stop."""

    def __init__(
        self,
        spec: RankSpec,
        config: JobConfig,
        place: RankPlace,
        link: Link,
        phases: Phases,
        arguments: Any,
        inputs: Inputs | None,
        slots: Sequence[int],
    ) -> None:
        """`inputs`: made already, for this spec; else they are made here."""
        self.spec, self.config, self.place = spec, config, place
        self.slots = slots
        self.link, self.phases = link, phases
        self.alive = Alive(link)
        self.data_digest = ""
        self.arguments = arguments
        self.model: Any = None
        self.tokenizer: Any = None
        self._inputs = inputs

    def run(self) -> None:
        if self.config.data is None:
            raise UserError("data: is missing")
        train, evaluation = self._begin_with(self._inputs)
        packing = self._packing(train)
        self.data_digest = train.digest(packing)
        self._require_same_data()
        self._check_vocabulary(train)
        if self.spec.resume_from is None:
            self._answer("base")
        self.phases.enter("preparing engine")
        compare_before_broadcast(self._inputs.digest if self._inputs is not None else "")
        trainer = self._trainer(train, packing, evaluation)
        trainer.train(resume_from_checkpoint=self.spec.resume_from)
        trainer.wait_until_durable()
        if trainer.resilience.stopped_at is not None:
            self.link.send("stopped", step=trainer.resilience.stopped_at)
            return
        self._finish(trainer, evaluation)

    def _begin_with(self, inputs: Inputs | None) -> tuple[EncodedDataset, EncodedDataset | None]:
        """Model, tokenizer and data: what is not in `inputs` is loaded here."""
        config, seed = self.config, self.arguments.seed
        if inputs is None or inputs.model is None:
            self.phases.enter("loading model")
            self.model = load_model(self.spec, config, seed=seed, local_rank=self.place.local_rank)
        else:
            self.model = inputs.model
        if inputs is None:
            self.phases.enter("encoding data", Phase.ENCODING)
            self.tokenizer = load_tokenizer(config)
            train, evaluation = encode_all(self.spec, config, self.tokenizer, self._encoded)
        else:
            self.tokenizer, train, evaluation = inputs.tokenizer, inputs.train, inputs.evaluation
        for encoded in (train, evaluation):
            if encoded is not None and encoded.num_truncated and self.place.rank == 0:
                cut = "%d of %d samples were cut to %d tokens"
                log.warning(cut, encoded.num_truncated, len(encoded), config.data.max_length if config.data else 0)
        return train, evaluation

    def _encoded(self, count: int) -> None:
        self.phases.record.worked()
        self.alive.tell("encoding data", "records", count)

    def _packing(self, train: EncodedDataset) -> Packing | None:
        data = self.config.data
        if data is None or not data.packing:
            return None
        require_packing(self.model, self.arguments.per_device_train_batch_size)
        packing = pack(np.diff(train.offsets), data.max_length)
        if self.place.rank == 0:
            filled = len(train.input_ids) / (len(packing) * data.max_length)
            message = "%d samples are packed into %d rows of %d tokens, %.0f%% of which are filled"
            log.info(message, len(train), len(packing), data.max_length, 100 * filled)
        return packing

    def _require_same_data(self) -> None:
        """Other data under the same path would continue with shifted sample numbers: some lost, some twice, all
        silently."""
        if self.spec.resume_from is None:
            return
        manifest = read_manifest(Path(self.spec.resume_from))
        if manifest.data_digest and manifest.data_digest != self.data_digest:
            raise UserError(
                f"data.train: the files (or the tokenizer) have changed since step {manifest.step} was saved; this "
                "run cannot go on with other data. Restore them, or choose another output_dir."
            )

    def _check_vocabulary(self, encoded: EncodedDataset) -> None:
        """A token id beyond the embedding is a device-side assert hours later; here it is one line now."""
        vocabulary = (
            self.model.get_input_embeddings().num_embeddings
            if self.spec.zero_stage != 3
            else self.model.config.vocab_size
        )
        if encoded.largest_token_id >= vocabulary:
            what, remedy = describe(self._first_beyond(encoded, vocabulary))
            raise UserError(f"data: {what.pick()}. {remedy.pick()}")

    def _first_beyond(self, encoded: EncodedDataset, vocabulary: int) -> BadSample:
        """The first sample with a token that the embedding has no row for; there is one."""
        assert self.config.data is not None  # run() has checked
        place = int(np.argmax(encoded.input_ids >= vocabulary))
        index = int(np.searchsorted(encoded.offsets, place, side="right")) - 1
        data = self.config.data
        record = next(itertools.islice(read_records(data.train, data.format, data.system_prompt), index, None))
        value = int(encoded.input_ids[place])
        offence = Offence(TOKEN, place - int(encoded.offsets[index]), value, vocabulary)
        return BadSample(record.source, record.line, offence, self.tokenizer.convert_ids_to_tokens(value) or "")

    def _trainer(self, train: EncodedDataset, packing: Packing | None, evaluation: EncodedDataset | None) -> Resilience:
        arguments = self.arguments
        collator = Collator(self.tokenizer.pad_token_id)
        dataset = SampleDataset(train) if packing is None else PackedDataset(train, packing)
        order = SampleOrder(
            num_samples=len(dataset),
            batch_size=arguments.per_device_train_batch_size,
            world_size=self.place.world_size,
            global_batch_size=self.spec.global_batch_size,
            seed=arguments.data_seed if arguments.data_seed is not None else arguments.seed,
        )

        def make_loader() -> RankLoader:
            return RankLoader(
                dataset,
                RankBatchSampler(order, self.place.rank),
                collator,
                num_workers=arguments.dataloader_num_workers,
                prefetch_factor=arguments.dataloader_prefetch_factor,
                multiprocessing_context=arguments.dataloader_multiprocessing_context,
                in_order=arguments.dataloader_in_order,
                pin_memory=arguments.dataloader_pin_memory and self.spec.device == "cuda",
                persistent_workers=arguments.dataloader_persistent_workers,
                # Its own generator: drawing a worker seed must not move the global random state that resume restores.
                generator=torch.Generator().manual_seed(order.seed),
            )

        return Resilience(
            spec=self.spec,
            config=self.config,
            alive=self.alive,
            record=self.phases.record,
            data_digest=self.data_digest,
            link=self.link,
            slots=self.slots,
            make_loader=make_loader,
            model=self.model,
            args=arguments,
            train_dataset=dataset,
            eval_dataset=SampleDataset(evaluation) if evaluation else None,
            data_collator=collator,
            processing_class=self.tokenizer,
        )

    def _finish(self, trainer: Resilience, evaluation: EncodedDataset | None) -> None:
        state = trainer.state
        if state.global_step < state.max_steps:
            raise RuntimeError(f"the Trainer stopped by itself at step {state.global_step} of {state.max_steps}")
        if evaluation is not None and self.arguments.eval_strategy == "no":
            self.phases.enter("evaluating", Phase.EVALUATING)
            trainer.evaluate()
        self._answer("tuned", Phase.ENDING)
        self.phases.enter("writing final", Phase.ENDING)
        final = self._write_final(trainer)
        self.link.send(
            "finished",
            step=state.global_step,
            max_steps=state.max_steps,
            final=str(final),
            samples_seen=trainer.samples_seen(),
        )

    def _write_final(self, trainer: Resilience) -> Path:
        """`final/`: adapter or model and tokenizer, committed as a checkpoint is. All ranks take part (ZeRO-3
        gathers)."""
        output_dir = self.spec.output_path
        staged = trainer.staged.root() / "final"
        trainer.save_model(str(staged), _internal_call=True)
        barrier()
        if self.place.rank == 0:
            (staged / "training_args.bin").unlink(missing_ok=True)
            self.tokenizer.save_pretrained(staged)
            (staged / "README.md").write_text(model_card(self.spec, self.config, trainer), "utf-8")
            make_readable(staged)
        barrier()
        _, files = trainer.staged.put("final")
        if self.place.rank == 0:
            manifest = trainer.manifest(files, kind="final")
            allowed = partial(ask_to_commit, self.link, trainer.state.global_step, "final/")
            trainer.staged.publish("final", manifest, replace=True, may_commit=allowed)
        barrier()
        return output_dir / "final"

    def _answer(self, which: str, phase: Phase = Phase.STARTING) -> None:
        """Let the model answer `sample_questions` (greedy), on rank 0."""
        questions = self.config.sample_questions
        if not questions:
            return
        if self.spec.zero_stage == 3:
            if self.place.rank == 0:
                log.warning("sample_questions are not asked with ZeRO-3: the weights are spread over the ranks")
            return
        self.phases.enter(f"asking the {which} model", phase)
        if self.place.rank == 0:
            for question in questions:
                answer = generate(self.model, self.tokenizer, question)
                self.link.send("answered", model=which, question=question, answer=answer)
        barrier()


def generate(model: Any, tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = tokenizer(plain_prompt(messages), return_tensors="pt")
    training = model.training
    model.eval()
    with torch.inference_mode():
        device = next(model.parameters()).device
        output = model.generate(
            **{k: v.to(device) for k, v in inputs.items()},
            max_new_tokens=_ANSWER_TOKENS,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    model.train(training)
    answer: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer.strip()
