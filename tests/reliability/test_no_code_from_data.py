"""No file that a run reads can make it execute code.

Nothing in the package unpickles, evaluates or imports by a name that comes from data.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "maxpipe"
MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.full_load",
}
# These import by name: what the catalogue names, and what the package offers, from a table.
IMPORTS_BY_NAME = {"config/imports.py", "__init__.py"}


def findings(source, imports_by_name=False):
    """Return what a module must not do, as (line, call or import)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            found += [(node.lineno, name) for name in names if name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or (name.endswith("import_module") and not imports_by_name):
                found.append((node.lineno, name))
            for keyword in node.keywords:
                is_true = not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                )
                if keyword.arg in ("allow_pickle", "trust_remote_code", "shell") and is_true:
                    found.append((node.lineno, keyword.arg))
    return found


def test_findings_report_dangerous_source_only():
    for source in (
        "import pickle",
        "from torch.serialization import load",
        "yaml.load(f, Loader=L)",
        "np.load(f, allow_pickle=True)",
        "importlib.import_module(name)",
    ):
        assert findings(source), source
    for source in ("np.load(f, allow_pickle=False)", "yaml.safe_load(f)", "re.compile(x)"):
        assert not findings(source), source


def test_package_has_no_dangerous_call():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    dangerous = {}
    for path in files:
        name = path.relative_to(PACKAGE).as_posix()
        if calls := findings(path.read_text(), name in IMPORTS_BY_NAME):
            dangerous[name] = calls
    assert dangerous == {}
