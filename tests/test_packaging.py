"""What is installed is what the checkout holds."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
SOURCE_FOLDERS = ("pipeline", "modules", "kernels", "datamodules", "configs", "slurm")


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
        if file.suffix in (".py", ".yaml", ".sbatch")
    }
    assert found == set(settings["packages"])
    assert holds_files <= found


def test_packages_come_from_this_checkout() -> None:
    for folder in SOURCE_FOLDERS:
        file = importlib.import_module(f"longhaul.{folder}").__file__
        assert file is not None
        assert Path(file).parent == CHECKOUT / folder


def test_no_init_file_makes_tests_a_package() -> None:
    assert not list((CHECKOUT / "tests").rglob("__init__.py"))


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from longhaul.pipeline.cli import main; main(['--help']); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


def test_the_readme_is_short() -> None:
    assert len((CHECKOUT / "README.md").read_text().splitlines()) <= 150
