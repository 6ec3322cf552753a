"""The shape of the package: sizes of files and functions, directions of imports, private names."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "maxpipe"
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

# The one-way rule of docs/architecture.md: a package imports only from later rows, or from its own
# as long as there is no cycle.
TIERS = (
    ("commands",),
    ("api",),
    ("builder",),
    ("training",),
    ("comparison", "compile", "render", "generate"),
    ("plan", "supervise"),
    ("pipeline",),
    ("hf", "migration"),
    ("checkpoint", "data", "model", "telemetry"),
    ("sharding", "devices", "storage"),
    ("config",),
)
TIER = {package: tier for tier, packages in enumerate(TIERS) for package in packages}


@cache
def trees() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): (
            ast.parse(path.read_text(encoding="utf-8"))
        )
        for path in sorted(ROOT.rglob("*.py"))
    }


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTION))


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return node.end_lineno - node.lineno + 1


def part_of(module: str) -> str:
    parts = module.split(".")
    is_command = len(parts) < 2 or parts[1] not in TIER or parts[-1] == "__main__"
    return "commands" if is_command else parts[1]


def imports_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in trees() else (node.module, alias.name)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def modules_of(tree: ast.AST) -> set[str]:
    return {module for module, _ in imports_of(tree) if module.startswith("maxpipe.")}


@cache
def loaded_by() -> dict[str, set[str]]:
    """Return for each module all that its import imports, by itself: not lazily, not for types."""
    loaded = {}
    for module, tree in trees().items():
        later = {
            node
            for outer in ast.walk(tree)
            if isinstance(outer, FUNCTION)
            or (isinstance(outer, ast.If) and getattr(outer.test, "id", "") == "TYPE_CHECKING")
            for node in ast.walk(outer)
        }
        now = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node not in later]
        loaded[module] = {
            name
            for node in now
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name, _ in imports_of(node)
        } - {module}
    return loaded


def loads_slow_library(module: str) -> bool:
    slow = {"jax", "flax", "optax", "orbax", "grain", "ortools"}
    reached, waiting = {module}, [module]
    while waiting:
        name = waiting.pop()
        new = {*loaded_by().get(name, ()), name.rpartition(".")[0]} - {"", *reached}
        reached |= new
        waiting += new
    return bool({name.split(".")[0] for name in reached} & slow)


def lazy_imports() -> Iterator[tuple[str, str, str]]:
    for module, tree in trees().items():
        for function in functions_of(tree):
            for imported in modules_of(function):
                yield module, function.name, imported


def test_no_file_has_over_500_lines():
    lines = {
        str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.rglob("*.py")
    }
    assert {path: n for path, n in lines.items() if n > 500} == {}


def test_packages_keep_to_their_budget_of_lines():
    """A number of `budget.tsv` only falls; a commit that raises one says why."""
    rows = (ROOT.parent / "tests" / "budget.tsv").read_text().splitlines()
    budget = {name: int(most) for name, most in (row.split("\t") for row in rows[1:])}
    files = {"commands": [*ROOT.glob("*.py")], "tests": [*(ROOT.parent / "tests").rglob("*.py")]}
    files |= {path.parent.name: [*path.parent.rglob("*.py")] for path in ROOT.glob("*/__init__.py")}
    lines = {name: sum(len(p.read_bytes().splitlines()) for p in of) for name, of in files.items()}
    over = {name: n for name, n in lines.items() if n > budget.pop(name)}
    assert (over, budget) == ({}, {})


def test_no_function_has_over_80_lines():
    long = {
        f"{module}:{node.lineno} {node.name}": length(node)
        for module, tree in trees().items()
        for node in functions_of(tree)
        if length(node) > 80
    }
    assert long == {}


def test_train_step_has_at_most_40_lines():
    functions = functions_of(trees()["maxpipe.training.step"])
    assert [length(node) <= 40 for node in functions if node.name == "train_step"] == [True]


def test_imports_point_one_way():
    against = {
        f"{module} imports {imported}"
        for module, tree in trees().items()
        for imported in modules_of(tree)
        if TIER[part_of(imported)] < TIER[part_of(module)]
    }
    assert against == set()


def test_there_is_no_cycle_of_files():
    TopologicalSorter(loaded_by()).prepare()  # raises CycleError, which names the cycle


def test_there_is_no_cycle_of_packages():
    edges: dict[str, set[str]] = {}
    for module, tree in trees().items():
        parts = {part_of(imported) for imported in modules_of(tree)}
        edges.setdefault(part_of(module), set()).update(parts - {part_of(module)})
    TopologicalSorter(edges).prepare()


def test_no_private_name_is_imported():
    private = {
        f"{module}: {imported}.{name}"
        for module, tree in trees().items()
        for imported, name in imports_of(tree)
        if imported.split(".")[0] == "maxpipe"
        and (name.startswith("_") or any(part.startswith("_") for part in imported.split(".")[1:]))
    }
    assert private == set()


def test_lazily_imported_modules_load_a_slow_library():
    needless = {
        f"{module}: {imported}"
        for module, _, imported in lazy_imports()
        if not loads_slow_library(imported)
    }
    assert needless == set()


def test_lazy_imports_of_commands_are_in_main():
    commands = {f"maxpipe.{path.stem}" for path in ROOT.glob("*.py")}
    functions = {
        f"{module}.{function}" for module, function, _ in lazy_imports() if module in commands
    }
    assert {name.rpartition(".")[2] for name in functions} == {"main"}, functions


def test_configurations_schedules_and_the_simulator_load_no_jax():
    light = (
        "maxpipe.config",
        "maxpipe.hf.families",
        "maxpipe.pipeline.schedules",
        "maxpipe.plan.simulate",
    )
    assert {m for m in trees() if m.startswith(light) and loads_slow_library(m)} == set()


def test_catalogue_imports_nothing_of_the_package():
    facts = {"maxpipe.config.engine_facts", "maxpipe.config.model_facts"}
    imported = {name: modules_of(trees()[name]) for name in {"maxpipe.config.catalog", *facts}}
    assert imported == {"maxpipe.config.catalog": facts, **{name: set() for name in facts}}
