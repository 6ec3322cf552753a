"""The shape of the package: sizes of files and functions, directions of imports, private names."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest

ROOT = Path(__file__).parents[1] / "maxpipe"
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

# The one-way rule of docs/architecture.md: a package imports only from later rows.
TIERS = (
    ("commands",),
    ("api",),
    ("builder",),
    ("training",),
    ("comparison", "compiling", "render", "generation"),
    ("planning", "supervision"),
    ("pipeline",),
    ("hf", "migration"),
    ("checkpoint", "data", "model", "telemetry"),
    ("sharding", "devices", "storage"),
    ("config",),
)
TIER = {package: tier for tier, packages in enumerate(TIERS) for package in packages}


def module_of(path: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def package_of(module: str) -> str:
    """Return the part of the house that a module belongs to; commands are one part."""
    parts = module.split(".")
    is_command = len(parts) < 2 or parts[1] not in TIER or parts[-1] == "__main__"
    return "commands" if is_command else parts[1]


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of everything that a file imports from the package, lazily or not."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "maxpipe":
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in MODULES else (node.module, alias.name)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.split(".")[0] == "maxpipe")


def lazy_imports_of(path: Path) -> Iterator[tuple[str, ast.ImportFrom]]:
    """Yield (function, import) of everything that functions of a file import from the package."""
    for function in ast.walk(TREES[path]):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("maxpipe"):
                    yield function.name, node


def loads_slow_library(module: str, edges: dict[str, set[str]]) -> bool:
    """Return whether the import of a module loads a library for which errors should not wait."""
    slow = {"jax", "flax", "optax", "orbax", "grain", "ortools"}
    reached, waiting = {module}, [module]
    while waiting:
        new = edges.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    names = {
        name.split(".")[0]
        for each in reached & MODULES.keys()
        for node in TREES[MODULES[each]].body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
    }
    return bool(names & slow)


def runtime_edges() -> dict[str, set[str]]:
    """Return module -> modules that it imports when it is itself imported."""
    edges: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        typing_only = {
            inner
            for node in ast.walk(TREES[path])
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        lazy = {
            inner
            for node in ast.walk(TREES[path])
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(node)
        }
        targets = set()
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ImportFrom) and node not in typing_only and node not in lazy:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    targets |= {inner} & MODULES.keys() or {node.module or ""} & MODULES.keys()
        edges[module] = targets - {module}
    return edges


class TestSizes:
    LINES: ClassVar = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}

    def test_at_most_a_fifth_of_the_files_has_under_60_lines(self):
        small = sorted(str(path.relative_to(ROOT)) for path, n in self.LINES.items() if n < 60)
        assert len(small) <= len(FILES) / 5, small

    def test_no_file_has_over_500_lines(self):
        assert {str(path): n for path, n in self.LINES.items() if n > 500} == {}

    def test_no_function_has_over_80_lines(self):
        long = {
            f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": length
            for path, tree in TREES.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (length := node.end_lineno - node.lineno + 1) > 80
        }
        assert long == {}

    def test_train_step_has_at_most_40_lines(self):
        (step,) = (
            node
            for node in ast.walk(TREES[ROOT / "training" / "step.py"])
            if isinstance(node, ast.FunctionDef) and node.name == "train_step"
        )
        assert step.end_lineno - step.lineno + 1 <= 40


def test_any_is_used_at_most_120_times():
    uses = {
        str(path.relative_to(ROOT)): count
        for path, tree in TREES.items()
        if (count := sum(isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(tree)))
    }
    assert sum(uses.values()) <= 120, dict(sorted(uses.items(), key=lambda use: -use[1]))


class TestComments:
    """The heart of the code explains itself; CONTRIBUTING.md names its files."""

    HEART: ClassVar = (
        "pipeline/engines",
        "pipeline/engines/circular",
        "pipeline/engines/mpmd",
        "pipeline/engines/scheduled",
        "pipeline/engines/sequential.py",
        "pipeline/schedules/table.py",
        "training/loop.py",
        "training/step.py",
        "checkpoint/manager.py",
    )

    @pytest.mark.parametrize("part", HEART)
    def test_heart_has_at_least_8_comment_lines_per_100_of_code(self, part):
        files = sorted((ROOT / part).rglob("*.py")) or [ROOT / part]
        comments, code = (sum(counts) for counts in zip(*map(lines_of, files), strict=True))
        assert 100 * comments / code >= 8, f"{comments} comment lines to {code} of code"

    def test_contributing_names_the_heart(self):
        page = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
        (rule,) = [text for text in page.split("\n- ") if text.startswith("The heart of the code")]
        named = {name.rstrip("/") for name in re.findall("`maxpipe/(.+?)`", rule)}
        assert named <= {*self.HEART}
        assert all(any(part.startswith(name) for name in named) for part in self.HEART)

    def test_lines_of_counts_comments_and_code_without_docstrings(self, tmp_path):
        file = tmp_path / "example.py"
        file.write_text('"""Explain.\n\nMore.\n"""\n\n# why\nx = 1  # unit\ny = [\n    2,\n]\n')
        assert lines_of(file) == (2, 4)


def lines_of(path: Path) -> tuple[int, int]:
    """Return the numbers of lines with a comment, and of lines with code other than docstrings."""
    source = path.read_text(encoding="utf-8")
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    comments, code = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in layout:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(comments), len(code - docstrings)


class TestWords:
    EMPTY: ClassVar = {"found", "here", "mine", "asked", "one", "say"}  # say nothing as a name

    def test_names_say_what_they_hold(self):
        empty = [
            f"{path.relative_to(ROOT)}:{node.lineno} {name}"
            for path, tree in TREES.items()
            for node in ast.walk(tree)
            if (name := name_bound_by(node)).strip("_") in self.EMPTY
        ]
        assert empty == []

    @pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
    def test_docstrings_of_modules_and_functions_open_with_a_verb(self, path):
        kinds = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
        texts = [ast.get_docstring(n) for n in ast.walk(TREES[path]) if isinstance(n, kinds)]
        assert [text for text in texts if text and not is_imperative(text)] == []

    @pytest.mark.parametrize(
        "text",
        [
            "The loader: rows of every batch.",
            "What a run reports.",
            "Reads a step.",
            "Skipping steps.",
            "Documents: random access to texts.",
            "`Recorder`: the one object.",
            "Mixtures of sources.",
            "One owner of a run.",
            "Names of slices.",
            "Help: what a key does.",
            "ZB-V and DualPipeV.",
            "Path of a file.",
            "Configuration, typed.",
        ],
    )
    def test_is_imperative_refuses(self, text):
        assert not is_imperative(text)

    @pytest.mark.parametrize("text", ["Pass a batch on.", "Read a step.", "Bring batches."])
    def test_is_imperative_accepts(self, text):
        assert is_imperative(text)

    @pytest.mark.parametrize("folder", ["maxpipe", "docs"])
    def test_prose_has_no_beside_and_no_nobody(self, folder):
        files = [p for p in (ROOT.parent / folder).rglob("*") if p.suffix in (".py", ".md")]
        lines = [
            f"{path.relative_to(ROOT.parent)}:{number} {line.strip()}"
            for path in files
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if re.search(r"\b(beside|nobody)\b", line, flags=re.IGNORECASE)
        ]
        assert lines == []


def is_imperative(text: str) -> bool:
    """Return whether a docstring opens as one with a verb in the imperative does.

    Told by form: no article, question word or name; no plural, third person or gerund; and no noun
    that a colon or "of" follows.
    """
    first, following = re.match(r"(\S+?),?(?:\s+(\S*)|$)", text).groups()
    return (
        re.fullmatch("[A-Z][a-z]+", first) is not None
        and first
        not in ("A", "An", "The", "This", "What", "Whether", "Where", "How", "When", "All", "One")
        and re.search("([aeiou].*ing|[^s]s|tion|ness)$", first.lower()) is None
        and following != "of"
    )


def name_bound_by(node: ast.AST) -> str:
    """Return the variable, parameter, function or attribute that a node of a tree binds, or ""."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""


class TestImports:
    @pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
    def test_imports_point_one_way(self, path):
        package = package_of(module_of(path))
        for module, _ in imports_of(path):
            target = package_of(module)
            if target == package or module == "maxpipe":
                continue
            legal = f"{package} may import from {', '.join(sum(TIERS[TIER[package] + 1 :], ()))}"
            # Parts of one tier may import from each other, as long as there is no cycle.
            assert TIER[target] >= TIER[package], f"imports {module}: {legal}"

    def test_no_private_name_is_imported(self):
        private = [
            f"{path.relative_to(ROOT)}: {module}.{name}"
            for path in FILES
            for module, name in imports_of(path)
            if name.startswith("_") or any(part.startswith("_") for part in module.split(".")[1:])
        ]
        assert private == []

    @pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
    def test_lazy_imports_of_a_file_are_one_boundary(self, path):
        functions = {function for function, _ in lazy_imports_of(path)}
        assert len(functions) <= 1, f"package imports inside {', '.join(sorted(functions))}"
        # Nothing runs between the first of them and the last.
        lines = [range(n.lineno, n.end_lineno + 1) for _, n in lazy_imports_of(path)]
        assert all(after.start == before.stop for before, after in pairwise(lines))

    def test_lazy_imports_of_commands_are_in_main(self):
        functions = {
            path.name: function
            for path in ROOT.glob("*.py")
            for function, _ in lazy_imports_of(path)
        }
        assert {*functions.values()} == {"main"}, functions

    def test_lazily_imported_modules_load_a_slow_library(self):
        edges = runtime_edges()
        needless = {
            f"{path.relative_to(ROOT)}: {node.module}"
            for path in FILES
            for _, node in lazy_imports_of(path)
            if not loads_slow_library(node.module, edges)
        }
        assert needless == set()

    def test_there_is_no_cycle_of_files(self):
        assert cycle_in(runtime_edges()) == []

    def test_there_is_no_cycle_of_packages(self):
        edges: dict[str, set[str]] = {}
        for path in FILES:
            package = package_of(module_of(path))
            targets = {package_of(module) for module, _ in imports_of(path) if module != "maxpipe"}
            edges.setdefault(package, set()).update(targets - {package})
        assert cycle_in(edges) == []

    def test_schedules_and_simulator_import_no_jax(self):
        files = [*(ROOT / "pipeline" / "schedules").glob("*.py"), ROOT / "planning" / "simulate.py"]
        jax = [
            str(path.relative_to(ROOT))
            for path in files
            for node in ast.walk(TREES[path])
            if (isinstance(node, ast.Import) and any(a.name.startswith("jax") for a in node.names))
            or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax"))
        ]
        assert jax == []

    def test_catalogue_imports_nothing_of_the_package(self):
        modules = {module for module, _ in imports_of(ROOT / "config" / "catalog.py")}
        assert modules == {"maxpipe.config.engine_facts", "maxpipe.config.model_facts"}
        for name in ("engine_facts", "model_facts"):
            assert [*imports_of(ROOT / "config" / f"{name}.py")] == []


def cycle_in(edges: dict[str, set[str]]) -> list[str]:
    """Return one cycle of a directed graph, empty if there is none."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for target in sorted(edges.get(node, ())):
            if cycle := visit(target, [*trail, node]):
                return cycle
        done.add(node)
        return []

    return next((cycle for node in sorted(edges) if (cycle := visit(node, []))), [])


def test_cycle_in_finds_the_cycle():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    cycle = cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    assert [*pairwise(cycle)] == [("b", "c"), ("c", "b")]
