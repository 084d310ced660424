"""What the documents say is what the code does: links, commands, configurations, tables, generated pages."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from launcher.cli.main import COMMANDS, build_parser
from launcher.config.load import load_job
from launcher.errors import ExitCode
from launcher.platforms.nesting import OUTER_LAUNCHERS
from launcher.platforms.row import Platform
from launcher.platforms.table import BY_HAND, PLATFORMS
from launcher.preflight.checks import CHECKS
from tests.unit.preflight.test_checks import CASES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
_LEFT_OUT = {
    ".git",
    ".venv",
    ".bench",
    "runs",
    "dist",
    "build",
    "node_modules",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def _documents() -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in files if name.endswith(".md")]
    return sorted(found)


DOCUMENTS = _documents()


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _blocks(path: Path, *languages: str) -> list[str]:
    return [text for language, text in _FENCE.findall(path.read_text("utf-8")) if language in languages]


def _prose(path: Path) -> str:
    return _FENCE.sub("", path.read_text("utf-8"))


def _without_comments(text: str) -> str:
    return "\n".join(re.sub(r"\s*(?:^|\s)#.*$", "", line).rstrip() for line in text.splitlines())


# links


def _anchors(path: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.+)$", _prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in _LINK.findall(_prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        there = (path.parent / target).resolve() if target else path
        if not there.exists() or (anchor and anchor not in _anchors(there)):
            broken.append(link)
    assert not broken


def test_pages_that_the_code_names_are_there() -> None:
    named = {
        page
        for file in [*ROOT.glob("launcher/**/*.py"), ROOT / "configs" / "demo.yaml", ROOT / "CONTRIBUTING.md"]
        for page in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text("utf-8"))
    }
    assert named
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page in reached:
            continue
        reached.add(page)
        links = (link.partition("#")[0] for link in _LINK.findall(_prose(page)))
        queue += [(page.parent / link).resolve() for link in links if link.endswith(".md") and ":" not in link]
    assert [_name(page) for page in sorted((ROOT / "docs").rglob("*.md")) if page not in reached] == []


# commands


def _commands(path: Path) -> Iterator[str]:
    """Every `ftlaunch ...` of shell blocks and inline code, cut at the first shell operator."""
    lines = [line.strip() for block in _blocks(path, "sh") for line in block.replace("\\\n", " ").splitlines()]
    for text in [*lines, *_INLINE.findall(_prose(path))]:
        found = re.match(r"(?:\$ |exec |nohup )*(ftlaunch [^|;>&#]+)", text)
        if found and not found[1].startswith("ftlaunch ..."):
            yield found[1].strip()


def _parses(command: str) -> bool:
    arguments = shlex.split(command)[1:]
    if arguments and arguments[0].split("=")[0] in ("--config", "--set", "--json"):
        arguments.insert(0, "run")
    # The options of a command that is not built yet are not settled: its name must be known.
    if COMMANDS.get(arguments[0], ("", ""))[0] == "launcher.cli.later":
        return True
    try:
        build_parser().parse_args(arguments)
    except SystemExit as end:
        return end.code == 0
    return True


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_commands_are_accepted_by_the_command_line(path: Path) -> None:
    assert [command for command in _commands(path) if not _parses(command)] == []


def test_a_wrong_command_would_be_found() -> None:
    assert not _parses("ftlaunch plan --confg job.yaml")
    assert not _parses("ftlaunch plam")


def test_every_command_has_its_page() -> None:
    later = _prose(ROOT / "docs" / "commands" / "later.md")
    for name, (module, _) in COMMANDS.items():
        if module == "launcher.cli.later":
            assert f"`ftlaunch {name}`" in later
        else:
            assert (ROOT / "docs" / "commands" / f"{name}.md").is_file()


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for path in DOCUMENTS:
        code = [*_blocks(path, "sh"), *_INLINE.findall(_prose(path))]
        named = {
            word
            for text in code
            for line in re.findall(r"^make ([a-z -]+)", text, re.MULTILINE)
            for word in line.split()
        }
        assert named <= targets, _name(path)


# configurations


def _jobs() -> list[tuple[str, str]]:
    return [
        (f"{_name(path)}:{number}", text)
        for path in DOCUMENTS
        for number, text in enumerate(_blocks(path, "yaml"))
        if text.startswith("# job.yaml\n")
    ]


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in _jobs()])
def test_job_files_in_documents_load(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, "utf-8")
    assert load_job(path, [], {}).config.data is not None


def test_the_documents_have_job_files() -> None:
    assert len(_jobs()) >= 4


# tables


def _rows(path: Path, pattern: str) -> list[str]:
    return re.findall(rf"^\| {pattern} \|", path.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", [*READMES, ROOT / "docs" / "exit-codes.md"], ids=_name)
def test_exit_codes_are_those_of_the_code(path: Path) -> None:
    assert [int(code) for code in _rows(path, r"(\d+)")] == sorted(ExitCode)


def _declared_packages() -> set[tuple[str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {"runtime": project["dependencies"], **project["optional-dependencies"]}
    names = ((re.split(r"[\[<>=!~; ]", text)[0], extra) for extra, texts in extras.items() for text in texts)
    return {(name, extra) for name, extra in names if name != project["name"]}


@pytest.mark.parametrize("path", READMES, ids=_name)
def test_dependencies_are_those_of_pyproject(path: Path) -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| (\w+) \| \S", path.read_text("utf-8"), re.MULTILINE)
    assert set(rows) == _declared_packages()
    assert len(rows) == len(set(rows))


def test_checks_have_a_heading_each() -> None:
    ids = re.findall(r"^### `([a-z_]+\.[a-z_]+)`$", (ROOT / "docs" / "checks.md").read_text("utf-8"), re.MULTILINE)
    assert ids == list(CHECKS)


def test_the_ten_complaints_name_a_check_and_the_case_that_shows_it() -> None:
    page = (ROOT / "docs" / "preflight.md").read_text("utf-8")
    rows = re.findall(r"^\| [^|]+ \| `([a-z_.]+)` \| ([^|]+) \|$", page, re.MULTILINE)
    assert len(rows) == 10
    assert [(name, case) for name, case in rows if case not in CASES or CASES[case].id != name] == []


@pytest.mark.parametrize("platform", [*PLATFORMS, BY_HAND], ids=lambda platform: str(platform.name))
def test_platforms_names_every_platform_its_variables_and_its_source(platform: Platform) -> None:
    text = (ROOT / "docs" / "platforms.md").read_text("utf-8")
    assert re.search(rf"^\| {re.escape(platform.name)} \|", text, re.MULTILINE)
    section = text.split(f"### {platform.name}\n")[1].split("\n#")[0]
    assert [name for name in platform.names if f"`{name}" not in section] == []
    assert f"[{platform.certainty.value}] {platform.source}" in section


def test_platforms_names_what_says_that_ftlaunch_is_nested() -> None:
    text = (ROOT / "docs" / "platforms.md").read_text("utf-8")
    assert [name for outer in OUTER_LAUNCHERS for name in outer.all_of if f"`{name}`" not in text] == []


_TEST = re.compile(r"\[(test_\w+)\]\(\.\./([\w/]+\.py)\)")


def test_every_fault_of_checkpoints_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "checkpoint-faults.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]
    assert len(rows) >= 40
    assert [row for row in rows if not _TEST.search(row)] == []
    named = _TEST.findall(page)
    missing = [name for name, file in named if f"\ndef {name}(" not in (ROOT / file).read_text("utf-8")]
    assert missing == []


def _emitted() -> dict[str, set[str]]:
    """Event -> the fields that the code gives it by name."""
    events: dict[str, set[str]] = {}
    for file in ROOT.glob("launcher/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit"):
                continue
            if node.args and isinstance(node.args[0], ast.Constant):
                fields = events.setdefault(str(node.args[0].value), set())
                fields |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return events


def test_events_and_their_fields_are_those_of_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", (ROOT / "docs" / "events.md").read_text("utf-8"), re.MULTILINE
    )
    documented = {event: set(_INLINE.findall(fields)) for event, fields in rows}
    emitted = _emitted()
    assert set(documented) == set(emitted)
    missing = {event: fields - documented[event] for event, fields in emitted.items() if fields - documented[event]}
    assert missing == {}


def test_packages_import_only_downward_as_the_architecture_says() -> None:
    (layers,) = _blocks(ROOT / "docs" / "architecture.md", "text")
    level = {name: depth for depth, line in enumerate(layers.splitlines()) for name in line.split(", ")}
    upward = []
    for file in ROOT.glob("launcher/*/**/*.py"):
        package = file.relative_to(ROOT / "launcher").parts[0]
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            module = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
            parts = module.split(".")
            if parts[0] == "launcher" and len(parts) > 1 and parts[1] != package and level[parts[1]] <= level[package]:
                upward.append(f"{_name(file)} imports {module}")
    assert upward == []


# generated pages and the two READMEs


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gen_job_docs", "gen_fault_docs", "gen_platform_docs", "gen_check_docs"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    script = _script(name)
    assert script.TARGET.read_text("utf-8") == script.page(), f"run: python scripts/{name}.py"


def test_every_class_of_fault_has_its_heading() -> None:
    page = (ROOT / "docs" / "faults.md").read_text("utf-8")
    assert set(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == _script("gen_fault_docs").classes()


def test_both_readmes_say_the_same() -> None:
    english, chinese = (path.read_text("utf-8") for path in READMES)
    for pattern in (r"^## ", r"^\| ", r"^\d+\. ", r"^- "):
        assert len(re.findall(pattern, english, re.MULTILINE)) == len(re.findall(pattern, chinese, re.MULTILINE)), (
            pattern
        )
    for language in ("sh", "yaml", "text"):
        blocks = [[_without_comments(block) for block in _blocks(path, language)] for path in READMES]
        assert blocks[0] == blocks[1]


def test_the_example_jobs_are_valid() -> None:
    """Their paths are the reader's; everything else must be right as it stands."""
    examples = sorted((ROOT / "configs").glob("*.yaml"))
    assert len(examples) >= 4
    for path in examples:
        assert load_job(path, [], {}).config.method in ("lora", "qlora", "full"), path
