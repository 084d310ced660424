"""The Hub, the Python environment, the user's code, the scheduler."""

from __future__ import annotations

from launcher.diagnose.fault import Fault
from launcher.i18n import Text

HUB: tuple[Fault, ...] = (
    Fault(
        cls="hub_auth",
        action="stop",
        errors=(
            r"GatedRepoError|Cannot access gated repo|trying to access a gated repo",
            r"RepositoryNotFoundError|RevisionNotFoundError",
            r"40[13] (?:Client Error|Forbidden|Unauthorized)",
            r"is not a local folder and is not a valid model identifier",
            r"HFValidationError|Incorrect path_or_model_id",
            r"does not appear to have a file named|Error no file named \S+",
            r"RemoteEntryNotFoundError|(?<!Local)EntryNotFoundError|\.errors\.NotExistError",
            r"Invalid (?:user token|username or password)|LocalTokenNotFoundError|Token is required",
        ),
        cause=Text(
            "{where}: the Hub refuses this model or data set: gated, private, or the name (or local path) does not "
            "exist.",
            "{where}：Hub 拒绝访问该模型或数据集：需要授权、私有，或名称（本地路径）不存在。",
        ),
        remedy=Text(
            "Check model.path letter by letter; for gated repositories accept the licence and give HF_TOKEN in the "
            "environment.",
            "逐字检查 model.path；对需授权的仓库请先接受许可，并在环境变量中提供 HF_TOKEN。",
        ),
    ),
    Fault(
        cls="hub_transient",
        action="retry",
        errors=(
            r"(?:429|50[0234]) (?:Client|Server) Error",
            r"429 Too Many Requests",
            r"There was a specific connection error when trying to load",
            r"Consistency check failed: file should be of size",
            r"ChunkedEncodingError|IncompleteRead\(|RemoteDisconnected",
        ),
        cause=Text("{where}: the Hub was overloaded or briefly down.", "{where}：Hub 过载或短暂不可用。"),
        remedy=Text(
            "Run it again after a pause. To be independent of it, download the model once and give its folder in "
            "model.path.",
            "稍后重新运行。若不想依赖 Hub，请先下载模型并在 model.path 中填写本地目录。",
        ),
    ),
    Fault(
        cls="hub_unreachable",
        action="adjust:hub_offline",
        errors=(
            r"We couldn't connect to '[^']*' to load",
            r"LocalEntryNotFoundError",
            r"Cannot find the requested files in the disk cache and outgoing traffic has been disabled",
            r"Max retries exceeded with url|MaxRetryError",
            r"requests\.exceptions\.(?:ConnectionError|ProxyError|SSLError|ConnectTimeout|ReadTimeout)",
            r"OfflineModeIsEnabled",
        ),
        vague=(r"httpx2?\.(?:Connect|Read|Proxy)\w*",),
        cause=Text(
            "{where}: the Hub cannot be reached from this node, and the files are not in its cache.",
            "{where}：该节点无法访问 Hub，且缓存中没有所需文件。",
        ),
        remedy=Text(
            "Put the model on the shared file system and give its folder in model.path, or set env.HF_ENDPOINT to a "
            "mirror or env.HTTPS_PROXY.",
            "将模型放到共享文件系统并在 model.path 中填写目录，或设置 env.HF_ENDPOINT 镜像或 env.HTTPS_PROXY 代理。",
        ),
    ),
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        cls="import_abi",
        action="stop",
        errors=(
            r"(?:ImportError|OSError): .{0,300}undefined symbol",
            r"Failed to import \S+ because of the following error[^\n]*:\s*(?P<proof>\S[^\n]*)",
            r"cannot open shared object file",
            r"version `?GLIBC(?:XX)?_\S+ not found",
            r"\.dtype size changed",
            r"ImportError: .{0,120}(?:cannot import name|DLL load failed|requires )",
            r"cannot import name '\w+' from",
            r"ModuleNotFoundError: No module named",
            r"numpy\.core\.multiarray failed to import",
            r"AttributeError: module '(?:torch|transformers|numpy|deepspeed|peft|triton|bitsandbytes)[\w.]*' has no",
            r"ImportError: Using `?bitsandbytes|CUDA Setup failed despite|requires the latest version of",
        ),
        plainest=r"undefined symbol: \S+$",
        hints=(
            r"undefined symbol: \S+",
            r"compiled using NumPy 1\.x cannot be run in NumPy 2",
        ),
        cause=Text(
            "{where}: a Python package is missing, or was built for other versions of torch, CUDA, NumPy or the "
            "system libraries.",
            "{where}：缺少某个 Python 包，或其编译所依赖的 torch、CUDA、NumPy 或系统库版本不同。",
        ),
        remedy=Text(
            "Reinstall the package that the line names against this torch (`pip install --no-build-isolation "
            "--force-reinstall NAME`), the same on every node: use one image.",
            "针对当前 torch 重新安装报错中的包（`pip install --no-build-isolation --force-reinstall NAME`），"
            "并保证所有节点一致：使用同一镜像。",
        ),
    ),
    Fault(
        cls="user_code",
        action="adjust:ddp_settings",
        errors=(
            r"Expected to have finished reduction in the prior iteration",
            r"Expected to mark a variable ready only once",
            r"has been marked as ready twice",
        ),
        plainest=r"has been marked as ready twice",
        cause=Text(
            "{where}: DDP and the model disagree on which parameters take part in a step (unused ones, or "
            "re-entrant checkpointing).",
            "{where}：DDP 与模型在每步参与的参数上不一致（存在未使用参数，或使用了可重入的 checkpointing）。",
        ),
        remedy=Text(
            "Unused parameters: training.ddp_find_unused_parameters: true. Marked twice: false, and "
            "training.gradient_checkpointing_kwargs: use_reentrant: false.",
            "有未使用参数：training.ddp_find_unused_parameters: true。被标记两次：设为 false，并设置 "
            "training.gradient_checkpointing_kwargs 的 use_reentrant: false。",
        ),
    ),
    Fault(
        cls="user_code",
        action="stop",
        errors=(
            r"can't open file '[^']*': \[Errno 2\]",
            r"error: (?:unrecognized arguments|the following arguments are required|argument \S+:|ambiguous option)",
            r"HfArgumentParser|are not used by the HfArgumentParser",
        ),
        cause=Text("{where}: the command line of the program is wrong.", "{where}：程序的命令行有误。"),
        remedy=Text(
            "Mend the command: a script's path without a second `python` before it, and only options that the "
            "script knows.",
            "修正命令：脚本路径前不要再写 `python`，并且只使用脚本支持的参数。",
        ),
    ),
    Fault(
        cls="user_code",
        action="stop",
        errors=(r"BackendCompilerFailed", r"torch\._dynamo\.exc\.\w+", r"InductorError"),
        cause=Text("{where}: torch.compile cannot compile the model.", "{where}：torch.compile 无法编译该模型。"),
        remedy=Text(
            "Set training.torch_compile: false, or mend the code that the message names.",
            "设置 training.torch_compile: false，或修正报错指出的代码。",
        ),
    ),
    Fault(
        cls="user_code",
        action="adjust:data_prep",
        errors=(r"FileExistsError: \[Errno 17\]",),
        cause=Text(
            "{where}: several ranks made the same file or folder at once.",
            "{where}：多个 rank 同时创建了同一个文件或目录。",
        ),
        remedy=Text(
            "Let rank 0 alone make it while the others wait, or create it with exist_ok=True.",
            "只让 rank 0 创建、其他 rank 等待，或用 exist_ok=True 创建。",
        ),
    ),
    Fault(
        cls="preempted",
        action="retry",
        signals=(15,),
        plainest=r"DUE TO",
        scheduler=(
            r"DUE TO (?:PREEMPTION|JOB REQUEUE|TIME LIMIT|NODE FAILURE)",
            r"CANCELLED AT \S+",
            r"this job is preempted|Job has timed out",
            r"^ *(?:Normal|Warning) +(?:Preempted|Evicted|Preempting)\b|Preempted (?:by|in order to admit) ",
            r"[Pp]od was evicted|The node was low on resource: (?!memory)|[Ss]pot .{0,40}(?:interruption|reclaim)",
            r"srun: Force Terminated [Jj]ob|^Terminated$|tasks? [\d,\-]+: Terminated",
            r"SignalException: Process \d+ got signal: (?:15|1|2)\b",
            r"(?:[Rr]eceived|[Cc]aught) (?:signal |Signals\.)?(?:SIGTERM|SIGUSR1|SIGHUP)",
            r"(?:instance|node|pod).{0,40}(?:will be|is being|was) (?:preempted|reclaimed|evicted)",
            r"^KeyboardInterrupt$",
        ),
        cause=Text(
            "{where} was stopped from outside (scheduler, spot reclaim, time limit): nothing is wrong with the job.",
            "{where} 被外部停止（调度器、抢占回收、时间限制）：作业本身没有问题。",
        ),
        remedy=Text(
            "Submit it again with the same job.yaml and output_dir: it goes on from the last save. This does not "
            "count as a failure.",
            "使用相同的 job.yaml 和 output_dir 再次提交：会从上次保存处继续，不计入失败次数。",
        ),
    ),
    Fault(
        cls="user_code",
        action="stop",
        python=(
            r"(?:^|[\]):│]\x20|it/s\]|s/it\])(?:[A-Za-z_][\w.]*\.)?(?P<error>"
            r"(?!SystemExit|Dist(?:Backend|Network|Store)Err|ChildFailed|CalledProcess|Process(?:Exited|Raised)Exc)[A-Z]\w*(?:Error|Exception|Failed|Exit)(?::[^\n]*|$)"
            r"|Exception(?::[^\n]*|$))",
        ),
        hints=(r"(?P<error>CalledProcessError: [^\n]*)",),  # of a launcher it is an echo, of the program a cause
        cause=Text(
            "{where} raised an exception that a rerun would raise again: {error}",
            "{where} 抛出异常，重新运行仍会发生：{error}",
        ),
        remedy=Text(
            "Mend the program or its input at the line of code that is shown; a rerun would end the same way.",
            "请在所示的代码位置修正程序或输入；重新运行的结果会相同。",
        ),
    ),
)
