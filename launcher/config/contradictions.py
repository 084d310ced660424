"""Settings that are each right and cannot both be meant.

Works on what was *given* (plain data without defaults), because a default never contradicts anything.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.config.mistakes import KeyPath, Mistake

_NOT_WITH_COMMAND = (
    "model",
    "data",
    "training",
    "method",
    "lora",
    "qlora",
    "precision",
    "deepspeed",
    "sample_questions",
)


def find_contradictions(given: Mapping[str, Any]) -> tuple[Mistake, ...]:
    """All contradictions in the given settings; tolerates values of wrong types, which are reported elsewhere."""
    given = {key: value for key, value in given.items() if value is not None}
    return tuple(
        mistake for rule in (_command, _method, _deepspeed, _evaluation, _nodes, _drill) for mistake in rule(given)
    )


def _command(given: Mapping[str, Any]) -> Iterator[Mistake]:
    if "command" in given:
        for key in _NOT_WITH_COMMAND:
            if key in given:
                yield Mistake(
                    (key,),
                    "is given together with command",
                    accepted="either command (your own trainer) or model, data, training (the trainer of ftlaunch)",
                    remedy=f"remove {key} (your command decides it), or remove command",
                )
        return
    examples = {"model": "model: {path: Qwen/Qwen2.5-0.5B-Instruct}", "data": "data: {train: train.jsonl}"}
    for key, example in examples.items():
        if key not in given:
            yield Mistake(
                (key,),
                "is missing",
                accepted="model and data, or command (your own trainer)",
                remedy=f"add a line: {example}",
            )


def _method(given: Mapping[str, Any]) -> Iterator[Mistake]:
    method = given.get("method", "lora")
    if method == "full" and "lora" in given:
        remedy = "remove the section, or write method: lora"
        yield Mistake(("lora",), "is given, but method is full: every weight is trained, no adapter", remedy=remedy)
    if method != "qlora" and "qlora" in given and "command" not in given:
        remedy = "write method: qlora, or remove the section"
        yield Mistake(("qlora",), f"is given, but method is {method}: the base is not quantised", remedy=remedy)


def _deepspeed(given: Mapping[str, Any]) -> Iterator[Mistake]:
    section = _section(given, "deepspeed")
    if section.get("config") is not None:
        for key in ("stage", "offload_optimizer"):
            if key in section:
                yield Mistake(
                    ("deepspeed", key),
                    "is given together with deepspeed.config",
                    accepted="either your own JSON (config) or stage and offload_optimizer",
                    remedy=f"set it in {section['config']} under zero_optimization, or remove deepspeed.config",
                )
    if section.get("offload_optimizer") is True and section.get("stage") == 0:
        yield Mistake(
            ("deepspeed", "offload_optimizer"),
            "needs a ZeRO stage of 1, 2 or 3, but deepspeed.stage is 0",
            remedy="write deepspeed: {stage: 2, offload_optimizer: true}",
        )


def _evaluation(given: Mapping[str, Any]) -> Iterator[Mistake]:
    training, data = _section(given, "training"), _section(given, "data")
    if training.get("eval_strategy", "no") not in ("no", None) and "data" in given and not data.get("eval"):
        yield Mistake(
            ("training", "eval_strategy"),
            f"is {training['eval_strategy']}, but there is nothing to evaluate on",
            remedy="add data: {eval: eval.jsonl}, or remove training.eval_strategy",
        )


def _nodes(given: Mapping[str, Any]) -> Iterator[Mistake]:
    cluster = _section(given, "cluster")
    fewest, _, most = str(cluster.get("nodes", "")).partition(":")
    key: KeyPath = ("cluster", "nodes")
    if fewest.isdigit() and most.isdigit() and int(fewest) > int(most):
        yield Mistake(key, f"is {fewest}:{most}, MIN above MAX", remedy=f'write "{most}:{fewest}"')
    hosts, hostfile = cluster.get("hosts"), cluster.get("hostfile")
    if hosts and hostfile is not None:
        yield Mistake(
            ("cluster", "hostfile"),
            "is given together with cluster.hosts",
            accepted="the machines' names in one place: hosts, or hostfile",
            remedy="remove one of the two",
        )
    if not isinstance(hosts, list) or not hosts:
        return
    twice = sorted({str(host) for host in hosts if hosts.count(host) > 1})
    if twice:
        yield Mistake(("cluster", "hosts"), f"names {', '.join(twice)} twice", remedy="name each host once")
    wanted = most or fewest
    if wanted.isdigit() and int(wanted) > len(hosts):
        remedy = f"add the missing hosts, or write nodes: {_at_most(len(hosts), fewest, most)}"
        yield Mistake(key, f"asks for {wanted} nodes, but cluster.hosts names {len(hosts)}", remedy=remedy)


def _drill(given: Mapping[str, Any]) -> Iterator[Mistake]:
    for kill in _section(given, "drill").get("kill") or ():
        at = kill.get("at", "step_end") if isinstance(kill, Mapping) else ""
        if at in ("step_end", "save") and "batch" in kill:
            yield Mistake(
                ("drill", "kill", "batch"),
                f"is given, but the rank is to be killed at: {at}, where there are no batches",
                remedy="write at: micro_batch or at: evaluation, or remove batch",
            )
        if isinstance(kill, Mapping) and kill.get("hang") is not None and "signal" in kill:
            yield Mistake(("drill", "kill", "hang"), "is given beside signal", remedy="remove one of the two")


def _at_most(num_hosts: int, fewest: str, most: str) -> str:
    """`1:2` of `1:3` where two hosts are named."""
    return f'"{fewest}:{num_hosts}"' if most and fewest.isdigit() and int(fewest) < num_hosts else str(num_hosts)


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = given.get(name)
    return section if isinstance(section, Mapping) else {}
