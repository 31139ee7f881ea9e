"""What `make docs` does beside mkdocs: three pages come from outside of docs/.

The derivations of power attention and of the delta rule lie beside the code that cites them, and
with the first the table of the kernels that an emulator has executed.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_FOLDER = "../kernels/"
_PAGES = {
    "power/README.md": "power-attention.md",
    "power/executed.md": "executed.md",
    "delta/README.md": "delta-rule.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for outside, inside in _PAGES.items():
        text = (Path(config.docs_dir) / _FOLDER / outside).read_text(encoding="utf-8")
        files.append(File.generated(config, inside, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to them, as they are in the checkout, lead to them in the site."""
    for outside, inside in _PAGES.items():
        markdown = markdown.replace(f"]({_FOLDER}{outside}", f"]({inside}")
    return markdown
