"""Write the prose that installed Python packages carry into a file of JSON lines.

    python docs/scripts/machine_prose.py data/prose.jsonl

A line is a README, a licence or another text in Markdown or reStructuredText: `id` is its path
below site-packages, and `text` its content. A text that many packages carry is written once.
"""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_BEGINNINGS = ("licen", "copying", "notice")
_SUFFIXES = (".md", ".rst")
_LEAST = 500  # characters; shorter ones are rather notes than prose


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Path below the root and content of each text, in the order of their paths."""
    for path in sorted(root.rglob("*")):
        name = path.name.lower()
        is_readme = path.name == "METADATA"
        if not (is_readme or name.startswith(_BEGINNINGS) or name.endswith(_SUFFIXES)):
            continue
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        # The README of a package follows the fields of its metadata.
        text = text.partition("\n\n")[2] if is_readme else text
        if len(text) >= _LEAST:
            yield path.relative_to(root).as_posix(), text


def main() -> None:
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    seen, characters = set[str](), 0
    # platlib is where this Python's packages are, such as torch.
    roots = dict.fromkeys(Path(entry) for entry in sys.path if entry.endswith("-packages"))
    roots[Path(sysconfig.get_path("platlib"))] = None
    with target.open("w", encoding="utf-8") as file:
        for root in roots:
            for name, text in texts(root):
                digest = hashlib.sha256(text.encode()).hexdigest()
                if digest not in seen:
                    seen.add(digest)
                    characters += len(text)
                    file.write(json.dumps({"id": name, "text": text}) + "\n")
    print(f"{target}: {len(seen):,} texts, {characters:,} characters")


if __name__ == "__main__":
    main()
