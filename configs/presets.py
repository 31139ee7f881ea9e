"""The presets in this package, by names such as run/demo.yaml."""

import difflib
import re
from importlib import resources
from pathlib import Path

_LAUNCH = re.compile(r"# longhaul train .*\n")


def presets() -> dict[str, str]:
    """The name of every preset, and the first sentence about it in its file."""
    folder = _folder()
    found = {}
    for file in sorted(folder.rglob("*.yaml")):
        comment = re.match(r"(?:#.*\n)*", _LAUNCH.sub("", file.read_text(encoding="utf-8")))
        assert comment is not None
        text = " ".join(line.lstrip("# ") for line in comment[0].splitlines())
        found[file.relative_to(folder).as_posix()] = re.split(r"(?<=\.) ", text)[0]
    return found


def find_preset(name: Path) -> Path | None:
    """The file of a preset, None if there is none of that name."""
    # From a checkout "configs/run/demo.yaml" is a file; from any other folder it is the preset.
    name = name.relative_to("configs") if name.parts[:1] == ("configs",) else name
    file = _folder() / name
    is_inside = not name.is_absolute() and ".." not in name.parts
    return file if is_inside and file.is_file() else None


def preset_name(file: Path) -> Path:
    """The name of a preset by its file; a file that is no preset stays as it is."""
    return file.relative_to(_folder()) if file.is_relative_to(_folder()) else file


def nearest_preset(name: str) -> str | None:
    """The preset whose name or last part of the name is most like this one, if any is."""
    known = [*presets()]
    # Of a run and a shape of one name it is the run, the last one.
    short = {Path(one).stem: one for one in known}
    near = difflib.get_close_matches(name, [*known, *short], n=1)
    return short.get(near[0], near[0]) if near else None


def _folder() -> Path:
    return Path(str(resources.files("longhaul.configs")))
