"""The code of an exported model: copies of the modules that it needs, as files of one folder.

The copies are found by following imports from the modules of the model's kinds, so that a kind
exports itself. Imports of longhaul become relative ones, which transformers follows as long as all
files are in one folder. Names that a package's __init__ re-exports are imported from where they
are defined: no __init__ is copied, nor what else it would import.

The names of all files end in a hash of the code. In one process transformers takes modules of one
name for the same, whatever folder they are from, and a model's code for that of all configs whose
class has the same module.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import NoReturn

from longhaul.modules.attention import AttentionConfig
from longhaul.pipeline import exporting

_HERE = exporting.__name__
_STAND_INS = {
    name: f"{_HERE}.stand_ins.{file}"
    for name, file in {
        "jaxtyping": "jaxtyping",
        "longhaul.kernels.backend": "backend",
        "longhaul.kernels.native": "native",
    }.items()
}
_TRITON = re.compile(r"longhaul\.kernels\.\w+\.triton")  # the kernels of an op
_ROOTS = (f"{_HERE}.configuration_longhaul", f"{_HERE}.modeling_longhaul")
_REGISTRATION = f"{_HERE}.architecture"
# Any machine that loads an export has these; numpy comes with transformers.
_PROVIDED = {*sys.stdlib_module_names, "numpy", "torch", "transformers"}
_RELATIVE = re.compile(r"^( *from \.)(\w+)(?= import )|^( *from \. import )(\w+)", re.MULTILINE)


def model_code(kinds: Sequence[AttentionConfig]) -> dict[str, str]:
    """The Python files of a model with layers of these kinds: names and contents.

    `file_of(code, "architecture")` is the name of such a file.

    Raises:
        ValueError: naming a kind whose code needs something that cannot be carried.
    """
    code = _Code(kinds[0].kind)
    for root in _ROOTS:
        code.add(root)
    lines = []
    for config in kinds:
        module = type(config).__module__
        code.kind = config.kind
        if not module.startswith("longhaul."):
            code.packages.add(module.partition(".")[0])
        code.add(module)
        lines.append(f"from .{_file(module)} import __name__ as _  # registers {config.kind}")
    code.files[_REGISTRATION] += "\n" + "\n".join(dict.fromkeys(lines)) + "\n"
    files = {_file(module): text for module, text in sorted(code.files.items())}
    digest = hashlib.sha256(repr(files).encode()).hexdigest()[:12]

    def with_digest(found: re.Match[str]) -> str:
        return f"{found[0]}_{digest}"

    return {f"{name}_{digest}.py": _RELATIVE.sub(with_digest, text) for name, text in files.items()}


def file_of(names: Iterable[str], module: str) -> str:
    """The one among `names` of files that is this module's of `model_code`, without its hash.

    Raises:
        ValueError: there is none, or there are several.
    """
    found = [name for name in names if re.fullmatch(rf"{module}_[0-9a-f]{{12}}\.py", name)]
    if len(found) != 1:
        raise ValueError(f"{module}: found {len(found)} files of this module, wanted 1")
    return found[0]


def _file(module: str) -> str:
    """The name of a module's file in the folder."""
    return module.removeprefix(f"{_HERE}.").removeprefix("longhaul.").replace(".", "_")


Import = ast.Import | ast.ImportFrom


@dataclass
class _Code:
    """The modules carried so far."""

    kind: str  # whose imports are being followed
    files: dict[str, str] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)  # of kinds that are not longhaul's own

    def add(self, module: str) -> None:
        """Carry a module, and all that it imports."""
        if module in self.files:
            return
        self.files[module] = ""  # so that a circle of imports ends
        text = self._source(module)
        lines = [f"{line}\n" for line in text.rstrip("\n").split("\n")]
        changes: list[tuple[Import, list[str]]] = []
        for node in _imports(ast.parse(text)):
            new = self._rewritten(node, module)
            if new is not None:
                changes.append((node, new))
        for node, new in sorted(changes, key=lambda change: change[0].lineno, reverse=True):
            indent = " " * node.col_offset
            text = "".join(f"{indent}{line}\n" for line in new)
            lines[node.lineno - 1 : node.end_lineno] = [text]
        self.files[module] = f"# {module}, as `longhaul export` found it.\n" + "".join(lines)

    def _source(self, module: str) -> str:
        spec = _spec(module)
        if module == "__main__" or spec is None or not (spec.origin or "").endswith(".py"):
            self._refuse(f"is defined in {module}, which is no file that an export can copy")
        return Path(str(spec.origin)).read_text(encoding="utf-8")

    def _rewritten(self, node: Import, module: str) -> list[str] | None:
        """The statements that replace an import; None keeps it."""
        if isinstance(node, ast.Import):
            new = [self._whole(alias, module) for alias in node.names]
            if not any(new):
                return None
            return [
                line
                for alias, one in zip(node.names, new, strict=True)
                for line in (one or [ast.unparse(ast.Import([alias]))])
            ]
        source = node.module or ""
        if node.level:
            package = module if _is_package(module) else module.rpartition(".")[0]
            source = resolve_name("." * node.level + source, package)
        if self._is_provided(source, module):
            return None
        named: dict[str, list[str]] = {}
        modules: list[str] = []
        for alias in node.names:
            if alias.name == "*":
                self._refuse(f"imports * from {source} in {module}; wanted names")
            found, name = self._origin(source, alias.name, module)
            bound = alias.asname or alias.name
            if name is None:
                modules += self._module(found, bound)
            else:
                self.add(_copied(found))
                names = named.setdefault(_file(_copied(found)), [])
                names.append(name if name == bound else f"{name} as {bound}")
        return [
            f"from .{file} import {', '.join(names)}" for file, names in named.items()
        ] + modules

    def _whole(self, alias: ast.alias, module: str) -> list[str] | None:
        """For `import name as alias`."""
        if self._is_provided(alias.name, module):
            return None
        if alias.asname is None and "." in alias.name:
            self._refuse(f"has `import {alias.name}` in {module}; wanted `import ... as ...`")
        return self._module(alias.name, alias.asname or alias.name)

    def _module(self, module: str, name: str) -> list[str]:
        """Bind a copied module to a name."""
        self.add(_copied(module))
        file = _file(_copied(module))
        # transformers looks for the files that such lines name, and overlooks the second one.
        return [f"from .{file} import __name__ as _", f"from . import {file} as {name}"]

    def _is_provided(self, source: str, module: str) -> bool:
        """Whether an import can stay as it is."""
        top = source.partition(".")[0]
        if top in _PROVIDED:
            return True
        is_carried = top in self.packages or source.startswith(
            ("longhaul.modules", "longhaul.kernels", _HERE)
        )
        if _copied(source) == source and not is_carried:
            self._refuse(
                f"imports {source} in {module}, which an export cannot carry; wanted torch, numpy, "
                "jaxtyping, longhaul.modules or longhaul.kernels"
            )
        return False

    def _origin(self, source: str, name: str, module: str) -> tuple[str, str | None]:
        """Where `from source import name` finds it: a module, and a name in it or None."""
        if _copied(source) != source or not _is_package(source):
            return source, name
        spec = _spec(source)
        initial = Path(str(spec.origin)) if spec is not None and spec.origin else None
        tree = ast.parse(initial.read_text(encoding="utf-8") if initial is not None else "")
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        below = "." * node.level + (node.module or "")
                        return self._origin(resolve_name(below, source), alias.name, module)
        if _spec(f"{source}.{name}") is None:
            self._refuse(
                f"imports {name} from the package {source} in {module}; wanted it from the module "
                "that defines it"
            )
        return f"{source}.{name}", None

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"attention.kind: found {self.kind}, whose code {reason}")


def _copied(module: str) -> str:
    """The module whose code is carried in place of this one: itself, or its stand-in."""
    if _TRITON.fullmatch(module):
        return f"{_HERE}.stand_ins.triton"
    return _STAND_INS.get(module, module)


def _imports(tree: ast.AST) -> Iterator[Import]:
    """All imports but those in a `try`, which the module can do without."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not isinstance(node, ast.Try):
            yield from _imports(node)


def _spec(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except (ImportError, ValueError):
        return None


def _is_package(module: str) -> bool:
    spec = _spec(module)
    return spec is not None and spec.submodule_search_locations is not None
