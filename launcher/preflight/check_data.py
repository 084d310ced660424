"""Records and model files: what would end eight ranks after they have loaded, or train something nobody meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.config.model_files import ModelFiles
from launcher.data.facts import DataFacts
from launcher.data.scan import Fault
from launcher.i18n import Text
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.inputs import PreflightInputs, Reader

NUM_SHOWN = 10
SHARE_CUT_BOUND = 0.05  # of the records; above it answers are cut often enough to be learned as cut
SHARE_REPEATED_BOUND = 0.01
_NEEDED_RECORDS = 20  # below this a share says nothing


def check_records(inputs: PreflightInputs) -> tuple[Finding, ...]:
    return _each(inputs, _records)


def check_roles(inputs: PreflightInputs) -> tuple[Finding, ...]:
    return _each(inputs, _roles)


def check_repeated(inputs: PreflightInputs) -> tuple[Finding, ...]:
    return _each(inputs, _repeated)


def check_length(inputs: PreflightInputs) -> tuple[Finding, ...]:
    return _each(inputs, _length)


def check_tokens(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Token ids of the data, and all that the tokenizer could give, against the rows of the embedding."""
    files = inputs.model_files
    if files is None or files.vocab_size is None:
        return ()
    vocabulary = files.vocab_size
    found = max((facts.largest_id for facts in inputs.data), default=-1)
    bound = f"< {vocabulary} (vocab_size)"
    size = files.tokenizer_size
    if found < vocabulary and (size is None or size <= vocabulary):
        if found < 0 and size is None:
            return ()
        measured = f"largest id {found}" if found >= 0 else f"largest id of the tokenizer {(size or 0) - 1}"
        return (Finding("data.tokens", Severity.OK, measured, bound, Text("inside the embedding", "未超出词表")),)
    remedy = Text(
        "use the tokenizer that came with this model, or resize the embedding and save the model again "
        "(model.resize_token_embeddings)",
        "使用该模型自带的分词器；或先扩展词嵌入（model.resize_token_embeddings）并重新保存模型",
    )
    if found >= vocabulary:
        message = Text(
            f"token id {found} of the data is beyond the model's vocabulary: on a GPU a device-side assert, maybe late",
            f"数据中的 token id {found} 超出模型词表：在 GPU 上会表现为 device-side assert",
        )
        return (Finding("data.tokens", Severity.ERROR, f"largest id {found}", bound, message, remedy),)
    message = Text(
        f"the tokenizer has {size} tokens and the model {vocabulary} rows: the first record that uses one of the "
        "others ends in a device-side assert",
        f"分词器有 {size} 个 token，而模型只有 {vocabulary} 行词嵌入：一旦用到多出的 token 就会触发 device-side assert",
    )
    return (Finding("data.tokens", Severity.WARNING, f"tokenizer of {size}", bound, message, remedy),)


def check_template(inputs: PreflightInputs) -> tuple[Finding, ...]:
    files = inputs.model_files
    if files is None or files.has_chat_template is None or not any(facts.has_turns for facts in inputs.data):
        return ()
    bound = "one, for conversations"
    if files.has_chat_template:
        return (Finding("data.template", Severity.OK, "a chat template", bound, Text("there", "存在")),)
    message = Text(
        "the tokenizer has no chat template: conversations are written as `role: content` lines, which a model that "
        "was trained with a template does not know",
        "分词器没有 chat template：对话将写成 `role: content` 的形式，而用模板训练过的模型并不认识这种格式",
    )
    remedy = Text(
        "for a base model this is in order; for an instruct model put its chat_template.jinja into the model's folder",
        "若是基座模型则无需处理；若是指令模型，请把它的 chat_template.jinja 放入模型目录",
    )
    return (Finding("data.template", Severity.WARNING, "no chat template", bound, message, remedy),)


def check_model_files(inputs: PreflightInputs) -> tuple[Finding, ...]:
    files = inputs.model_files
    if files is None:
        return ()
    bound = "config, tokenizer and all weights"
    if files.folder is None:
        return _not_here(files, inputs, bound)
    if files.problems:
        shown = "; ".join(files.problems[:NUM_SHOWN])
        message = Text(
            f"the model's folder is not whole: every rank would begin to load and fail: {shown}",
            f"模型目录不完整，各 rank 都会在加载时失败：{shown}",
        )
        remedy = Text(
            f"fetch it again into {files.folder} (hf download, modelscope download, git lfs pull); on a mount see that "
            "the whole folder is there with `ls -l`",
            f"重新下载到 {files.folder}（hf download、modelscope download 或 git lfs pull）；"
            "若在挂载上，请用 `ls -l` 确认文件齐全",
        )
        measured = f"{len(files.problems)} problem(s)"
        return (Finding("model.files", Severity.ERROR, measured, bound, message, remedy),)
    return (Finding("model.files", Severity.OK, files.folder, bound, Text("all there", "齐全")),)


def _not_here(files: ModelFiles, inputs: PreflightInputs, bound: str) -> tuple[Finding, ...]:
    measured = f"{files.source}: not on this machine"
    if not files.hub:
        return (Finding("model.files", Severity.OK, measured, bound, Text("will be fetched", "将从 hub 下载")),)
    message = Text(
        f"{files.source} would be fetched by every rank, and cannot be: {files.hub}",
        f"各 rank 需要下载 {files.source}，但无法下载：{files.hub}",
    )
    where = Text("a folder of this machine", "本机目录")
    if inputs.reader is Reader.DLC:
        where = Text(
            "a NAS or OSS data source of the DLC job (DataSources)", "DLC 任务的 NAS 或 OSS 数据源（DataSources）"
        )
    remedy = Text(
        f"put the model into {where.en} and write that path as model.path; or name a mirror: env: {{HF_ENDPOINT: ...}}",
        f"把模型放到{where.zh}，并在 model.path 中写该路径；或用 env: {{HF_ENDPOINT: ...}} 指定镜像",
    )
    return (Finding("model.files", Severity.ERROR, measured, bound, message, remedy),)


def _each(
    inputs: PreflightInputs, judge: Callable[[DataFacts, PreflightInputs], Finding | None]
) -> tuple[Finding, ...]:
    return tuple(finding for facts in inputs.data if (finding := judge(facts, inputs)) is not None)


def _records(facts: DataFacts, inputs: PreflightInputs) -> Finding:
    measured = f"{facts.name}: {_looked_at(facts)}"
    if not facts.num_unusable:
        ok = Text("records can be used", "记录可用")
        return Finding("data.records", Severity.OK, measured, "every record can be used", ok)
    shown = _shown(facts.unusable, facts.num_unusable)
    message = Text(
        f"data.{facts.name}: {facts.num_unusable} record(s) cannot be used; training would end there: {shown}",
        f"data.{facts.name}：{facts.num_unusable} 条记录无法使用，训练会在此中断：{shown}",
    )
    remedy = Text(
        "correct or remove these lines; `ftlaunch prepare` looks at every record and shows all of them",
        "修正或删除这些行；`ftlaunch prepare` 会检查全部记录并一次列出",
    )
    measured = f"{facts.name}: {facts.num_unusable} unusable, {_looked_at(facts)}"
    return Finding("data.records", Severity.ERROR, measured, "every record can be used", message, remedy)


def _roles(facts: DataFacts, inputs: PreflightInputs) -> Finding | None:
    if not facts.has_turns and not facts.num_roles:
        return None
    bound = "roles that templates know, in turn"
    if not facts.num_roles:
        return Finding("data.roles", Severity.OK, f"{facts.name}: in order", bound, Text("in order", "正常"))
    shown = _shown(facts.roles, facts.num_roles)
    message = Text(
        f"data.{facts.name}: odd roles, which the chat template renders as they are or refuses: {shown}",
        f"data.{facts.name}：角色异常，chat template 会原样写出或直接报错：{shown}",
    )
    remedy = Text(
        "write system, user, assistant or tool; user and assistant take turns, system comes first",
        "角色只用 system、user、assistant、tool；user 与 assistant 交替，system 在最前",
    )
    return Finding("data.roles", Severity.WARNING, f"{facts.name}: {facts.num_roles} record(s)", bound, message, remedy)


def _repeated(facts: DataFacts, inputs: PreflightInputs) -> Finding | None:
    if facts.num_looked_at < _NEEDED_RECORDS and not facts.num_repeated:
        return None
    share = facts.num_repeated / max(1, facts.num_looked_at)
    measured, bound = f"{facts.name}: {facts.num_repeated} ({share:.1%})", f"<= {SHARE_REPEATED_BOUND:.0%}"
    if share <= SHARE_REPEATED_BOUND:
        return Finding("data.repeated", Severity.OK, measured, bound, Text("few or none", "很少或没有"))
    shown = _shown(facts.repeated, facts.num_repeated)
    message = Text(
        f"data.{facts.name}: records are there more than once, and count as often: {shown}",
        f"data.{facts.name}：有重复记录，会被重复训练：{shown}",
    )
    remedy = Text(
        "if that is not meant: `awk '!seen[$0]++' data.jsonl > once.jsonl`",
        "若非有意：`awk '!seen[$0]++' data.jsonl > once.jsonl`",
    )
    return Finding("data.repeated", Severity.WARNING, measured, bound, message, remedy)


def _length(facts: DataFacts, inputs: PreflightInputs) -> Finding | None:
    if not facts.num_measured:
        return None
    files = inputs.model_files
    positions = files.max_positions if files else None
    about = "" if facts.is_everything else "about "
    trained = min(facts.longest, facts.max_length)
    if positions is not None and trained > positions:
        return _beyond_positions(facts, positions, learned=bool(files and files.learned_positions))
    share = facts.num_cut / facts.num_measured
    lost = facts.num_tokens_cut / max(1, facts.num_tokens)
    measured = f"{facts.name}: {about}{share:.1%} cut, longest {about}{facts.longest} tokens ({facts.longest_at})"
    bound = f"<= {SHARE_CUT_BOUND:.0%} of the records cut to {facts.max_length}"
    if facts.num_nothing_left:
        shown = _shown(facts.nothing_left, facts.num_nothing_left)
        message = Text(
            f"data.{facts.name}: of {facts.num_nothing_left} record(s) nothing is learned: {shown}",
            f"data.{facts.name}：有 {facts.num_nothing_left} 条记录没有可学习的内容：{shown}",
        )
        return Finding("data.length", Severity.WARNING, measured, bound, message, _longer(facts))
    if share <= SHARE_CUT_BOUND or facts.num_measured < _NEEDED_RECORDS:
        return Finding("data.length", Severity.OK, measured, bound, Text("long enough", "长度足够"))
    message = Text(
        f"data.{facts.name}: {about}{share:.0%} of the records are longer than max_length, {about}{lost:.0%} of all "
        "tokens are cut off: the ends of the answers, and the token that ends them",
        f"data.{facts.name}：约 {share:.0%} 的记录超过 max_length，约 {lost:.0%} 的 token 被截掉："
        "丢失的是回答的结尾和结束符",
    )
    return Finding("data.length", Severity.WARNING, measured, bound, message, _longer(facts))


def _beyond_positions(facts: DataFacts, positions: int, *, learned: bool) -> Finding:
    measured, bound = f"{facts.name}: longest {facts.longest} tokens ({facts.longest_at})", f"<= {positions} positions"
    if learned:
        message = Text(
            f"the model has a table of {positions} positions: a longer sample is an index error, on a GPU a "
            "device-side assert",
            f"模型的位置表只有 {positions} 个位置：更长的样本会越界，在 GPU 上表现为 device-side assert",
        )
    else:
        message = Text(
            f"samples are longer than the {positions} positions of the model's training: its answers get worse there",
            f"样本长度超过模型训练时的 {positions} 个位置：超出部分效果会变差",
        )
    remedy = Text(f"set data.max_length: {positions}", f"设置 data.max_length: {positions}")
    severity = Severity.ERROR if learned else Severity.WARNING
    return Finding("data.length", severity, measured, bound, message, remedy)


def _longer(facts: DataFacts) -> Text:
    return Text(
        f"raise data.max_length (now {facts.max_length}; memory grows with it), or shorten or split these records",
        f"调大 data.max_length（当前 {facts.max_length}，显存随之增加），或缩短、拆分这些记录",
    )


def _looked_at(facts: DataFacts) -> str:
    if facts.num_records is None:
        return f"{facts.num_looked_at} records looked at, there are more"
    if facts.num_looked_at == facts.num_records:
        return f"all {facts.num_records} records looked at"
    return f"{facts.num_looked_at} of {facts.num_records} records looked at"


def _shown(faults: Sequence[Fault], count: int) -> str:
    shown = "; ".join(fault.text for fault in faults[:NUM_SHOWN])
    return shown + (f"; and {count - NUM_SHOWN} more" if count > NUM_SHOWN else "")
