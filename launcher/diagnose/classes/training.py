"""DeepSpeed, numerics, checkpoints, tokenizer, data."""

from __future__ import annotations

from launcher.diagnose.fault import Fault
from launcher.i18n import Text

_UNEQUAL = r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size"
_NAN_METRIC = r"'[\w/]+': '?nan\b|'(?:loss|grad_norm)': '?-?inf\b|\bloss ?[=:] ?nan\b"
_FINITE = Text(
    "Use precision: bf16, lower training.learning_rate, set training.max_grad_norm: 1.0; look at the samples of "
    "that step.",
    "使用 precision: bf16，降低 training.learning_rate，设置 training.max_grad_norm: 1.0；并检查该步的样本。",
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        cls="ds_config",
        action="stop",
        errors=(_UNEQUAL + r" (?P<numbers>\d+ != \d+ \* \d+ \* 1\b)",),
        cause=Text(
            "{where}: DeepSpeed's batch sizes do not fit ({numbers}), and it sees a world of one rank: the program "
            "was started without a launcher.",
            "{where}：DeepSpeed 的 batch 配置不一致（{numbers}），且只看到 1 个 rank：程序不是由启动器启动的。",
        ),
        remedy=Text(
            "Start it through ftlaunch or deepspeed, or set train_batch_size to the product of the three.",
            "请通过 ftlaunch 或 deepspeed 启动，或将 train_batch_size 设为三者之积。",
        ),
    ),
    Fault(
        cls="ds_config",
        action="adjust:batch_size",
        errors=(
            _UNEQUAL + r"(?: (?P<numbers>\d+ != \d+ \* \d+ \* \d+))?",
            r"(?P<numbers>(?:Train batch|Micro batch|Gradient accumulation) [\w\s]+: \S+) has to be greater",
        ),
        cause=Text(
            "{where}: DeepSpeed's batch sizes do not fit this number of ranks ({numbers}).",
            "{where}：DeepSpeed 的 batch 配置与 rank 数不符（{numbers}）。",
        ),
        remedy=Text(
            'Write "auto" for train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps in '
            "your DeepSpeed JSON.",
            "在 DeepSpeed JSON 中将 train_batch_size、train_micro_batch_size_per_gpu 和 gradient_accumulation_steps "
            '写为 "auto"。',
        ),
    ),
    Fault(
        cls="ds_config",
        action="stop",
        errors=(
            r"Please correct the following DeepSpeed config values that mismatch TrainingArguments",
            r"DeepSpeedConfigError|validation errors? for (?:DeepSpeed|FP16|BF16|Zero)\w*Config",
            r"Expected a string path to an existing deepspeed config",
        ),
        cause=Text(
            "{where}: the DeepSpeed JSON contradicts the training settings or itself.",
            "{where}：DeepSpeed JSON 与训练参数矛盾，或自相矛盾。",
        ),
        remedy=Text(
            'Write "auto" for the values that the message names, or leave out deepspeed.config: ftlaunch then '
            "writes the JSON itself.",
            '将报错指出的值写为 "auto"，或不设置 deepspeed.config，由 ftlaunch 自动生成 JSON。',
        ),
    ),
    Fault(
        cls="ds_launcher_ssh",
        action="stop",
        errors=(
            r"Permission denied \((?:publickey|password|gssapi)",
            r"Host key verification failed",
            r"Command 'ssh .{0,200}returned non-zero exit status 255",
            r"ssh exited with exit code 255",
            r"launcher '\w+' not installed",
        ),
        cause=Text(
            "{where}: the launcher cannot log in to a host by ssh (key, known host, or pdsh missing).",
            "{where}：启动器无法通过 ssh 登录主机（密钥、known_hosts，或缺少 pdsh）。",
        ),
        remedy=Text(
            "`ssh -o BatchMode=yes HOST true` must work from the first node to every other without a question.",
            "必须能从第一个节点免交互执行 `ssh -o BatchMode=yes HOST true` 登录其他所有节点。",
        ),
    ),
    Fault(
        cls="ds_launcher_host",
        action="retry",
        errors=(r"was not reachable via ssh", r"ssh: connect to host \S+ port \d+:"),
        cause=Text(
            "{where}: a host of the hostfile does not answer yet.",
            "{where}：hostfile 中的某个主机尚未响应。",
        ),
        remedy=Text(
            "Run it again after a pause. If the host is gone for good, take it out of cluster.hosts.",
            "稍后重新运行。若该主机已永久失效，请从 cluster.hosts 中移除。",
        ),
    ),
    Fault(
        cls="ds_launcher_host",
        action="adjust:master_addr",
        errors=(
            r"Unable to detect suitable master address",
            r"Using IP address of for node",
        ),
        fatal_as_warning=True,
        cause=Text(
            "{where}: DeepSpeed found no address for the master (`hostname -I` is empty there).",
            "{where}：DeepSpeed 未找到主节点地址（`hostname -I` 输出为空）。",
        ),
        remedy=Text(
            "Give the address: --master_addr, or the first of cluster.hosts.",
            "请指定地址：--master_addr，或 cluster.hosts 的第一项。",
        ),
    ),
    Fault(
        cls="ds_launcher_host",
        action="stop",
        errors=(
            r"Hostfile (?:contains|is empty)",
            r"Hostname '[^']*' not found in hostfile",
            r"No slot '[^']*' specified on host",
            r"no extra nodes available via hostfile",
            r"Unable to proceed, no GPU resources available",
        ),
        hints=(r"Unable to find hostfile, will proceed with training with local resources only",),
        cause=Text(
            "{where}: the hostfile is missing or wrong; without it DeepSpeed silently trains on this node alone.",
            "{where}：hostfile 缺失或有误；缺失时 DeepSpeed 会静默地只在本节点训练。",
        ),
        remedy=Text(
            "Give cluster.hosts in job.yaml, from which ftlaunch writes the hostfile, or mend the line the message "
            "names (`HOST slots=N`).",
            "在 job.yaml 中设置 cluster.hosts，由 ftlaunch 生成 hostfile；或修正报错指出的那一行（`HOST slots=N`）。",
        ),
    ),
    Fault(
        cls="fp16_scale_min",
        action="adjust:precision",
        errors=(r"loss scale already at minimum",),
        cause=Text(
            "{where}: fp16 overflowed at every step until the loss scale reached its minimum.",
            "{where}：fp16 每一步都溢出，直到 loss scale 降至最小值。",
        ),
        remedy=Text(
            "Use precision: bf16 (or fp32); with fp16 lower training.learning_rate and check the data for empty or "
            "broken samples.",
            "使用 precision: bf16（或 fp32）；若坚持 fp16，请降低 training.learning_rate "
            "并检查数据中的空样本或坏样本。",
        ),
    ),
    Fault(
        cls="loss_nan",
        action="adjust:precision",
        errors=(_NAN_METRIC,),
        near=r"probability tensor contains|invalid multinomial distribution|Assertion `?cumdist",
        cause=Text(
            "{where}: the logged loss or another metric was NaN already before sampling failed.",
            "{where}：采样失败之前，日志中的损失或其他指标已是 NaN。",
        ),
        remedy=_FINITE,
    ),
    Fault(
        cls="loss_nan",
        action="adjust:precision",
        errors=(
            r"(?:[Ll]oss|[Gg]radients?|grad_norm) (?:is|are|became|was|of) (?:nan|NaN|inf\w*|non-finite|not finite)",
            r"found (?:NaN|Inf) in local (?:grad norm|forward loss)|[Nn]on-finite (?:loss|grad)",
            r"returned nan values in its \d+th output",
        ),
        hints=(
            _NAN_METRIC,
            r"NaN or Inf found in input tensor",
        ),
        cause=Text("{where}: loss or gradients became NaN or infinite.", "{where}：损失或梯度变成了 NaN 或无穷大。"),
        remedy=_FINITE,
    ),
    Fault(
        cls="ckpt_weights_only",
        action="stop",
        errors=(
            r"Weights only load failed",
            r"Unsupported global: GLOBAL \S+ was not an allowed global",
            r"serious vulnerability issue in `torch\.load`",
        ),
        cause=Text(
            "{where}: torch 2.6 or newer refuses to unpickle this file (it holds more than tensors).",
            "{where}：torch 2.6 及以上版本拒绝反序列化该文件（其中不只有张量）。",
        ),
        remedy=Text(
            "Update transformers to the version that fits this torch, or convert the file to safetensors; do not "
            "unpickle files of strangers.",
            "将 transformers 升级到与 torch 匹配的版本，或将文件转换为 safetensors；不要反序列化来源不明的文件。",
        ),
    ),
    Fault(
        cls="ckpt_corrupt",
        action="adjust:checkpoint",
        errors=(
            r"Error while deserializing header",
            r"failed finding central directory|PytorchStreamReader failed",
            r"EOFError: Ran out of input|^EOFError$",
            r"UnpicklingError: (?:pickle data was truncated|invalid load key)",
            r"Unable to load weights from pytorch checkpoint file|BadZipFile|BadGzipFile",
            r"unexpected EOF, expected \d+ more bytes|[Tt]he file might be corrupted|archive is corrupted",
            r"unpickling stack underflow",
        ),
        cause=Text(
            "{where}: a checkpoint or weight file is cut short, empty, or not what its name says.",
            "{where}：检查点或权重文件被截断、为空，或内容与名称不符。",
        ),
        remedy=Text(
            "Resume from the checkpoint before (`ftlaunch checkpoints OUTPUT_DIR --verify`); for a downloaded model "
            "fetch the file again (a Git LFS pointer is some 130 bytes).",
            "从上一个检查点恢复（`ftlaunch checkpoints OUTPUT_DIR --verify`）；若是下载的模型请重新下载（Git LFS "
            "指针文件只有约 130 字节）。",
        ),
    ),
    Fault(
        cls="commit_refused",
        action="retry",
        errors=(r"CommitRefused: .*was not committed: (?P<reason>.*)",),
        cause=Text(
            "{where}: a finished checkpoint was not committed: {reason}.",
            "{where}：已写完的检查点未被提交：{reason}。",
        ),
        remedy=Text(
            "Nothing in the job needs to change: the run goes on from the checkpoint before. If it repeats, look at "
            "the storage of output_dir, and whether something stops the ftlaunch process (a paused terminal, SIGSTOP).",
            "任务本身无需改动：训练从上一个检查点继续。若反复出现，请检查 output_dir 的存储，以及是否有东西暂停了 "
            "ftlaunch 进程（终端被暂停、SIGSTOP）。",
        ),
    ),
    Fault(
        cls="ckpt_world_size",
        action="adjust:checkpoint",
        errors=(
            r"used a DP world size of (?P<saved>\d+) but the current world size is (?P<now>\d+)",
            r"[Cc]heckpoint.{0,40}(?:different|mismatch).{0,40}(?:world size|number of (?:ranks|processes))",
        ),
        cause=Text(
            "{where}: the ZeRO checkpoint was written by {saved} ranks and cannot be read by {now}.",
            "{where}：ZeRO 检查点由 {saved} 个 rank 写入，无法由 {now} 个 rank 读取。",
        ),
        remedy=Text(
            "Go on with the old number of ranks, or convert it: `python -m deepspeed.checkpoint.ds_to_universal`, "
            'then load with "load_universal": true.',
            "使用原来的 rank 数继续，或用 `python -m deepspeed.checkpoint.ds_to_universal` 转换后以 "
            '"load_universal": true 加载。',
        ),
    ),
    Fault(
        cls="ckpt_missing_latest",
        action="adjust:checkpoint",
        errors=(
            r"failed to resume from checkpoint",
            r"Can't find a valid checkpoint at",
            r"No valid checkpoint found in output directory",
            r"Invalid for universal checkpoint: \S+ does not exist",
            r"No such file or directory: '[^'\n]*(?:global_step\d|zero_pp_rank|mp_rank_\d|checkpoint-\d)[^'\n]*'",
        ),
        hints=(r"Unable to find latest file at",),
        cause=Text(
            "{where}: there is no whole checkpoint where the resume looked; DeepSpeed only warns and trains from "
            "the start.",
            "{where}：恢复路径下没有完整的检查点；DeepSpeed 只会警告并从头训练。",
        ),
        remedy=Text(
            "`ftlaunch checkpoints OUTPUT_DIR` shows which are whole; point to one of them, or to the folder that "
            "holds `latest`.",
            "用 `ftlaunch checkpoints OUTPUT_DIR` 查看完整的检查点；请指向其中之一，或包含 `latest` 文件的目录。",
        ),
    ),
    Fault(
        cls="peft_key_mismatch",
        action="stop",
        errors=(
            r"size mismatch for \S*(?:lora_|base_model\.|adapter|modules_to_save)",
            r"Error\(s\) in loading state_dict for Peft",
            r"Can't find 'adapter_config\.json' at",
            r"Target modules .{0,400}not found in the base model",
        ),
        plainest=r"size mismatch for",
        hints=(r"Found missing adapter keys while loading the checkpoint",),
        cause=Text(
            "{where}: the adapter does not fit the base model or the lora settings (rank r, target_modules, "
            "vocabulary).",
            "{where}：适配器与基座模型或 lora 设置不匹配（秩 r、target_modules、词表）。",
        ),
        remedy=Text(
            "Use the base model and the lora section with which the adapter was trained (its adapter_config.json), "
            "or a new output_dir.",
            "使用训练该适配器时的基座模型和 lora 设置（见其 adapter_config.json），或换一个新的 output_dir。",
        ),
    ),
    Fault(
        cls="tokenizer_mismatch",
        action="stop",
        errors=(
            r"data did not match any variant of untagged enum",
            r"Tokenizer class \S+ does not exist or is not currently imported",
            r"Couldn't instantiate the backend tokenizer",
        ),
        cause=Text(
            "{where}: tokenizer.json was written by a newer library than the installed one, or needs another class.",
            "{where}：tokenizer.json 由更新版本的库写出，或需要其他分词器类。",
        ),
        remedy=Text(
            "`pip install -U tokenizers transformers`, or take the tokenizer files of the original model.",
            "执行 `pip install -U tokenizers transformers`，或改用原模型的分词器文件。",
        ),
    ),
    Fault(
        cls="data_too_long",
        action="adjust:seq_length",
        errors=(
            r"index out of range in self|The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
            r"Assertion `?(?:srcIndex < srcSelectDimSize|ind >= ?0 && ind < )",
        ),
        hints=(r"sequence length is longer than the specified maximum sequence length",),
        near=r"sequence length is longer than the specified maximum sequence length",
        cause=Text(
            "{where}: a sample is longer than the model has positions.",
            "{where}：有样本长度超过模型的最大位置数。",
        ),
        remedy=Text(
            "Set data.max_length to at most the model's max_position_embeddings; longer samples are then cut.",
            "将 data.max_length 设为不超过模型的 max_position_embeddings；更长的样本会被截断。",
        ),
    ),
    Fault(
        cls="data_bad_record",
        action="stop",
        errors=(
            r"JSON parse error",
            r"Arrow(?:Invalid|TypeError|CapacityError)\b",
            r"CastError: Couldn't cast|Couldn't cast array of type",
            r"ValueError: (?:Expected object or value|Trailing data)",
            r"DatasetGeneration(?:Cast)?Error",
            r"JSONDecodeError\b",
            r"UnicodeDecodeError",
            r"Failed to read file '[^']*' with error",
        ),
        vague=(
            r"UnidentifiedImageError|image file is truncated|tarfile\.ReadError|ParserError: Error tokenizing data",
        ),
        plainest=r"Expected (?:bytes|str\w*|u?int\w*|list\w*|dict\w*),? (?:got|but got) ",
        cause=Text(
            "{where}: a record of the training data cannot be read, or a column changes its type.",
            "{where}：训练数据中有记录无法解析，或某列的类型不一致。",
        ),
        remedy=Text(
            "Find the record: `python -m json.tool --json-lines FILE > /dev/null` stops at the first that is no JSON; "
            "mend or remove it (UTF-8, one JSON object a line, in each column one type).",
            "找到该记录：`python -m json.tool --json-lines FILE > /dev/null` 会停在第一条非 JSON 记录；请修正或删除它"
            "（UTF-8，每行一个 JSON 对象，每列类型一致）。",
        ),
    ),
    Fault(
        cls="data_empty",
        action="stop",
        errors=(
            r"num_samples should be a positive integer value, but got num_samples=0",
            r"(?:[Dd]ataset|[Dd]ataloader) (?:is empty|has no (?:samples|examples))",
            r"[Nn]o (?:usable |valid )?(?:samples|examples) (?:found|left)",
            r"Instruction \"\w+\" corresponds to no data",
            r"is out of bounds for size 0\b|out of range for dataset of size 0\b",
            r"Cannot find valid samples|seems not to be a single sample in your epoch_iterator|EmptyDatasetError",
        ),
        cause=Text("{where}: no usable sample is left in the data.", "{where}：数据中没有可用样本。"),
        remedy=Text(
            "Check data.train (paths, globs), data.format and data.max_length: filters or a wrong format may drop "
            "every sample.",
            "检查 data.train（路径、通配符）、data.format 与 data.max_length：过滤或格式错误可能丢弃了全部样本。",
        ),
    ),
)
