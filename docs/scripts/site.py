"""What `make docs` does beside mkdocs: one page comes from outside of docs/.

The derivation of power attention lies beside the code that cites it, in kernels/power/README.md.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_OUTSIDE = "../kernels/power/README.md"
_INSIDE = "power-attention.md"


def on_files(files: Files, config: Any) -> Files:
    """Add the page."""
    text = (Path(config.docs_dir) / _OUTSIDE).read_text(encoding="utf-8")
    files.append(File.generated(config, _INSIDE, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to it, as they are in the checkout, lead to it in the site."""
    return markdown.replace(f"]({_OUTSIDE}", f"]({_INSIDE}")
