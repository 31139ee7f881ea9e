"""What is installed is what the checkout holds."""

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import longhaul

CHECKOUT = Path(__file__).parent.parent
SOURCE_FOLDERS = ("pipeline", "modules", "kernels", "datamodules", "configs", "slurm")
LIBRARY = "longhaul.pipeline.library"  # the folder that is installed as `longhaul` itself


def test_every_source_folder_is_listed_as_a_package() -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        "longhaul." + ".".join(init.parent.relative_to(CHECKOUT).parts)
        for folder in SOURCE_FOLDERS
        for init in (CHECKOUT / folder).rglob("__init__.py")
    }
    holds_files = {
        "longhaul." + ".".join(file.parent.relative_to(CHECKOUT).parts)
        for folder in SOURCE_FOLDERS
        for file in (CHECKOUT / folder).rglob("*")
        if file.suffix in (".py", ".yaml", ".sbatch", ".cpp", ".h")
    }
    assert found - {LIBRARY} | {"longhaul"} == set(settings["packages"])
    assert holds_files <= found


def test_packages_come_from_this_checkout() -> None:
    for folder in SOURCE_FOLDERS:
        file = importlib.import_module(f"longhaul.{folder}").__file__
        assert file is not None
        assert Path(file).parent == CHECKOUT / folder
    assert longhaul.__file__ == str(CHECKOUT / "pipeline/library/__init__.py")
    assert longhaul.__version__ == importlib.metadata.version("longhaul")


def test_no_init_file_makes_tests_a_package() -> None:
    assert not list((CHECKOUT / "tests").rglob("__init__.py"))


HELP = """
import sys
from contextlib import suppress
from longhaul.pipeline.cli import COMMANDS, main
main(["--help"])
for name in COMMANDS:
    with suppress(SystemExit):
        main([name, "--help"])
    slow = {"torch", "lightning", "mlflow", "matplotlib"} & set(sys.modules)
    if slow:
        sys.exit(f"{name} --help imports {slow}")
"""


def test_help_imports_nothing_slow() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", HELP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readme_is_short() -> None:
    assert len((CHECKOUT / "README.md").read_text().splitlines()) <= 150
