"""The rules on who may import whom, held by reading the imports; each is shown to catch a planted violation.

Imports count wherever they stand, in functions too. Those under `if TYPE_CHECKING:` name types and run nothing, so they
count for the rules on packages but not for cycles and loading.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {  # package → the packages of the project that it may import, besides itself
    "shards": set(),
    "extract": {"shards"},
    "train": {"shards"},
    "speculate": {"extract", "train", "shards"},
    "benchmarks": {"extract", "train", "shards", "speculate"},
    "tests": {"extract", "train", "shards", "speculate", "benchmarks"},
}
PRODUCT = {"shards", "extract", "train", "speculate"}
USES_TRANSFORMERS = {"extract", "speculate", "benchmarks", "tests"}
TOO_HEAVY_FOR_SHARDS = {"torch", "transformers"}
FOREIGN_TO_TRAINER = {"zarr", "transformers"}
SAYS_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc"}


@dataclass(frozen=True, kw_only=True)
class Import:
    module: str  # in full: of `from a import b` a.b where that is a module of the project, else a
    is_at_top: bool  # runs when the module is loaded
    is_typing_only: bool

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def modules(root: Path) -> dict[str, Path]:
    """Every module of the project by its full name; a package's is that of its __init__.py."""
    found = {}
    for package in MAY_IMPORT:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: set[str]) -> Iterator[Import]:
    def visit(node: ast.AST, *, is_at_top: bool, is_typing_only: bool) -> Iterator[Import]:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in inner]
        for name in names:
            yield Import(module=name, is_at_top=is_at_top, is_typing_only=is_typing_only)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_at_top=is_at_top and not is_function, is_typing_only=is_typing_only or is_typing)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), is_at_top=True, is_typing_only=False)


def violations(root: Path) -> list[str]:
    """One line for each import that breaks a rule, and for each module with a name that says nothing."""
    found = []
    paths = modules(root)
    graph = {name: list(imports(path, set(paths))) for name, path in paths.items()}
    for name, imported in graph.items():
        package = name.partition(".")[0]
        if name.rpartition(".")[2] in SAYS_NOTHING:
            found.append(f"{name}: the name says nothing")
        for item in imported:
            if item.package in MAY_IMPORT and item.package not in MAY_IMPORT[package] | {package}:
                found.append(f"{name} imports {item.module}: {package} may not import {item.package}")
            if item.package == "transformers" and package not in USES_TRANSFORMERS | {"train"}:  # train: below
                found.append(f"{name} imports transformers: only {', '.join(sorted(USES_TRANSFORMERS))} may")
            if item.package in TOO_HEAVY_FOR_SHARDS and package == "shards" and item.is_at_top:
                found.append(f"{name} imports {item.package} at module level")
            if item.package in PRODUCT | {"benchmarks"} and name.startswith("tests.reference"):
                found.append(f"{name} imports {item.module}: an oracle shares no code with the product")
    return found + foreign_to_trainer(graph) + cycles(graph)


def cycles(graph: dict[str, list[Import]]) -> list[str]:
    needs = {name: {i.module for i in found if not i.is_typing_only} - {name} for name, found in graph.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return [f"modules import each other in a circle: {' → '.join(error.args[1])}"]
    return []


def foreign_to_trainer(graph: dict[str, list[Import]]) -> list[str]:
    """What `train` imports, itself or through `shards`, late imports too, that a trainer does without."""
    found = []
    waiting = ["shards", *(name for name in graph if name.partition(".")[0] == "train")]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        for item in graph[name]:
            if item.package in FOREIGN_TO_TRAINER:
                found.append(f"{name} imports {item.package}: a trainer does without")
            if item.package in MAY_IMPORT["train"] and item.module not in seen and not item.is_typing_only:
                seen.add(item.module)
                waiting.append(item.module)
    return found


def loaded_by_trainer(root: Path) -> set[str]:
    """The top-level modules in a fresh process that has loaded what a trainer runs."""
    code = "import json, sys, train.run; print(json.dumps(list(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(process.stdout)}


def test_the_project_holds_the_rules() -> None:
    assert violations(ROOT) == []


def test_a_trainer_loads_neither_zarr_nor_transformers() -> None:
    loaded = loaded_by_trainer(ROOT)
    assert "torch" in loaded
    assert not loaded & FOREIGN_TO_TRAINER


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project that holds every rule."""
    write(tmp_path, "shards/__init__.py", "")
    write(tmp_path, "shards/manifest.py", "import json\ndef show():\n    import torch")
    write(tmp_path, "extract/run.py", "import transformers, torch\nfrom shards.manifest import show")
    write(tmp_path, "train/run.py", "from shards import manifest\nfrom train.step import step")
    write(tmp_path, "train/step.py", "if TYPE_CHECKING:\n    from train.run import Run")
    write(tmp_path, "speculate/run.py", "import transformers\nimport extract.run\nimport train.run")
    write(tmp_path, "benchmarks/step.py", "import transformers\nfrom train.run import Run")
    write(tmp_path, "tests/reference/mask.py", "import torch\nfrom tests.reference import drafter")
    write(tmp_path, "tests/reference/drafter.py", "")
    write(
        tmp_path, "tests/test_run.py", "import transformers\nfrom benchmarks.step import x\nfrom train.run import Run"
    )
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_small_project_holds_the_rules(tree: Path) -> None:
    assert violations(tree) == []


PLANTED = {
    "shards imports a stage": ("shards/x.py", "import train.step", "shards may not import train"),
    "extract imports train": ("extract/x.py", "from train.step import step", "extract may not import train"),
    "train imports extract": ("train/x.py", "from extract import run", "train may not import extract"),
    "train imports extract late": ("train/x.py", "def f():\n    import extract.run", "train may not import extract"),
    "extract imports speculate": ("extract/x.py", "import speculate.run", "extract may not import speculate"),
    "a product imports tests": ("train/x.py", "import tests.test_run", "train may not import tests"),
    "a product imports benchmarks": ("speculate/x.py", "import benchmarks.step", "speculate may not import benchmarks"),
    "train imports transformers": ("train/x.py", "from transformers import AutoModel", "a trainer does without"),
    "shards imports transformers late": ("shards/x.py", "def f():\n    import transformers", "imports transformers"),
    "train imports zarr": ("train/x.py", "def f():\n    import zarr", "a trainer does without"),
    "train imports what imports zarr": ("shards/manifest.py", "def f():\n    import zarr", "a trainer does without"),
    "train loads what imports zarr": ("shards/__init__.py", "import zarr.core", "a trainer does without"),
    "shards imports torch": ("shards/x.py", "class X:\n    import torch.nn", "imports torch at module level"),
    "a circle of two": ("train/step.py", "from train.run import Run", "train.step → train.run"),
    "a late circle": ("train/step.py", "def f():\n    from train import run", "circle"),
    "a circle through a package": ("shards/__init__.py", "from shards.manifest import show\nimport shards.x", "circle"),
    "an oracle imports the product": ("tests/reference/x.py", "from train.step import step", "shares no code"),
    "an oracle imports benchmarks": ("tests/reference/x.py", "import benchmarks.step", "shares no code"),
    **{f"a module named {name}": (f"train/{name}.py", "", "says nothing") for name in sorted(SAYS_NOTHING)},
    "a package named helpers": ("train/helpers/__init__.py", "", "says nothing"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_violation_is_found(tree: Path, planted: str) -> None:
    name, text, message = PLANTED[planted]
    write(tree, name, text)
    if planted == "a circle through a package":
        write(tree, "shards/x.py", "import shards")
    found = violations(tree)
    assert len(found) == 1, found
    assert message in found[0]


def test_relative_imports_are_not_overlooked(tree: Path) -> None:
    write(tree, "train/x.py", "from . import step")
    with pytest.raises(AssertionError, match="relative import in line 1"):
        violations(tree)


@pytest.mark.parametrize("foreign", sorted(FOREIGN_TO_TRAINER))
def test_what_a_trainer_loads_by_a_detour_is_found(tree: Path, foreign: str) -> None:
    write(tree, f"{foreign}.py", "")
    write(tree, "somewhere.py", f"import {foreign}")
    write(tree, "train/run.py", "import somewhere")
    assert foreign in loaded_by_trainer(tree)
