"""Names the sample behind a fault of the data, for runs whose data and model ftlaunch knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.config.inputs import model_folder
from launcher.config.models import JobConfig
from launcher.diagnose.bad_sample import SEARCHED, BadSample, Limits, describe
from launcher.diagnose.evidence import RankEvidence
from launcher.diagnose.sample_search import Search, find_bad_sample
from launcher.diagnose.verdict import EvidenceLine, Verdict
from launcher.i18n import Text


@dataclass(frozen=True)
class SampleHunt:
    config: JobConfig
    global_batch_size: int
    environ: Mapping[str, str]

    def explain(self, verdict: Verdict, ranks: Sequence[RankEvidence]) -> Verdict:
        """The verdict with the sample that explains it, where there is one; else unchanged."""
        search = self._search(verdict, ranks)
        found = find_bad_sample(search, self.environ) if search else None
        return with_sample(verdict, found) if found else verdict

    def _search(self, verdict: Verdict, ranks: Sequence[RankEvidence]) -> Search | None:
        data, model = self.config.data, self.config.model
        if verdict.cls not in SEARCHED or data is None or model is None or model.gguf_file:
            return None  # a GGUF file's tokenizer takes longer to build than anyone would wait
        training = self.config.training
        seed = training.get("data_seed")
        return Search(
            train=tuple(data.train),
            data_format=data.format,
            system_prompt=data.system_prompt,
            max_length=data.max_length,
            train_on_prompt=data.train_on_prompt,
            model=str(model_folder(model.path) or model.path),
            limits=limits_of(model.path),
            step=1 + max((rank.last_step or 0 for rank in ranks), default=0),
            global_batch_size=self.global_batch_size,
            seed=int(training.get("seed", 42) if seed is None else seed),
            packed=data.packing,
            trust_remote_code=model.trust_remote_code,
        )


def limits_of(path: str) -> Limits:
    """From config.json of a local model; unknown for anything else."""
    folder = model_folder(path)
    try:
        config = json.loads((Path(folder or "") / "config.json").read_text("utf-8")) if folder else {}
    except (OSError, ValueError):
        return Limits()
    config = config.get("text_config", config)
    vocabulary = config.get("vocab_size")
    # Only learned positions are a table that ends; rotary ones are computed.
    learned = "n_positions" in config or config.get("position_embedding_type") == "absolute"
    return Limits(
        vocabulary, config.get("n_positions", config.get("max_position_embeddings")) if learned else None, vocabulary
    )


def with_sample(verdict: Verdict, found: BadSample) -> Verdict:
    """The sample instead of what the class says in general; the action stays."""
    what, remedy = describe(found)
    who = verdict.culprit.words() if verdict.culprit else ""
    line = EvidenceLine(found.source, found.line, what.en)
    return replace(
        verdict,
        cause=Text(
            f"{who}: the model cannot take a sample of the training data: {what.en}.",
            f"{who}：模型无法接受训练数据中的一条样本：{what.zh}。",
        ),
        remedy=remedy,
        evidence=(*verdict.evidence[:1], line, *verdict.evidence[1:]),
    )
