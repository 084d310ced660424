"""Write `launcher/config/training_keys.json`: the keys of Transformers' TrainingArguments, their types and choices.

Reads the installed Transformers as source (`ast`), so neither it nor torch is imported. Run it after raising the
version of Transformers:

    python scripts/gen_training_keys.py            # write the file
    python scripts/gen_training_keys.py --check    # exit 1 when the file is not up to date
"""

import argparse
import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "launcher" / "config" / "training_keys.json"
_TYPE_ORDER = ("bool", "int", "float", "str", "list", "dict", "any")
_ENUM_SOURCES = ("training_args.py", "trainer_utils.py", "debug_utils.py")


def transformers_folder() -> Path | None:
    """The folder of the installed Transformers, found without importing it; None when it is not installed."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def read_training_keys(folder: Path) -> dict[str, dict[str, Any]]:
    """Each TrainingArguments field -> `{"type": "int" or "str|list", ..., "nullable": bool, "choices": ...}`."""
    enums = {name: values for source in _ENUM_SOURCES for name, values in _string_enums(folder / source).items()}
    log_levels = [*_dict_keys(folder / "utils" / "logging.py", "log_levels"), "passive"]
    keys: dict[str, dict[str, Any]] = {}
    for statement in _class_body(folder / "training_args.py", "TrainingArguments"):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            keys[statement.target.id] = _describe(statement, enums, log_levels)
    return dict(sorted(keys.items()))


def _describe(field: ast.AnnAssign, enums: dict[str, list[str]], log_levels: list[str]) -> dict[str, Any]:
    types: set[str] = set()
    nullable = False
    choices: list[str] | None = None
    for alternative in _alternatives(field.annotation):
        name = ast.unparse(alternative)
        if name == "None":
            nullable = True
        elif name in enums:
            types.add("str")
            choices = enums[name]
        else:
            types.add(_simple_type(alternative))
    stated = _stated_choices(field, log_levels)
    return {
        "type": "|".join(sorted(types, key=_TYPE_ORDER.index)),
        "nullable": nullable,
        "choices": stated if stated is not None else choices,
    }


def _alternatives(annotation: ast.expr) -> list[ast.expr]:
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return [*_alternatives(annotation.left), *_alternatives(annotation.right)]
    return [annotation]


def _simple_type(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Subscript):
        if ast.unparse(annotation.value) == "Literal":
            return type(ast.literal_eval(annotation.slice)).__name__
        annotation = annotation.value
    name = ast.unparse(annotation)
    return name if name in _TYPE_ORDER else "any"


def _stated_choices(field: ast.AnnAssign, log_levels: list[str]) -> list[str] | None:
    """`metadata={"choices": ...}` of a field: a list in the source, or the names of the log levels."""
    for node in ast.walk(field):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "choices":
                    return log_levels if "log_levels" in ast.unparse(value) else list(ast.literal_eval(value))
    return None


def _string_enums(source: Path) -> dict[str, list[str]]:
    classes = [node for node in ast.parse(source.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
    enums = [node for node in classes if any("Enum" in ast.unparse(base) for base in node.bases)]
    return {node.name: [ast.literal_eval(i.value) for i in node.body if isinstance(i, ast.Assign)] for node in enums}


def _class_body(source: Path, name: str) -> list[ast.stmt]:
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise SystemExit(f"{source}: has no class {name}; this script needs a look at the new Transformers.")


def _dict_keys(source: Path, name: str) -> list[str]:
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return list(ast.literal_eval(ast.Expression(_names_only(node.value))))
    raise SystemExit(f"{source}: has no {name}; this script needs a look at the new Transformers.")


def _names_only(value: ast.expr) -> ast.expr:
    if not isinstance(value, ast.Dict):
        raise SystemExit(f"expected a dict in the source, found {ast.unparse(value)}")
    return ast.List([key for key in value.keys if key is not None], ast.Load())


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the TrainingArguments keys that job.yaml accepts.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is not up to date")
    arguments = parser.parse_args()
    folder = transformers_folder()
    if folder is None:
        print("Transformers is not installed here: pip install transformers", file=sys.stderr)
        return 2
    keys = read_training_keys(folder)
    lines = [f"  {json.dumps(name)}: {json.dumps(spec)}" for name, spec in keys.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if arguments.check:
        return 0 if TARGET.read_text("utf-8") == text else 1
    TARGET.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
