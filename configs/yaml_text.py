"""Reads YAML that anyone may have written: numbers as of YAML 1.2, and a bounded number of values.

All readers of YAML read it here.
"""

import re
from typing import Any

import yaml

MOST_VALUES = 100_000
"""Of a document, each counted at every place where an alias puts it."""

MOST_BRACKETS = 100
"""Open at once. The time that PyYAML takes grows with the square of their number."""


def parse_yaml(text: str | bytes) -> Any:
    """The value of YAML text, with no more built for it than the text is long.

    Raises:
        yaml.YAMLError: it is no YAML, or has a key twice.
        ValueError, OverflowError, RecursionError: it has too many values, or one that is too large.
    """
    return yaml.load(text, Loader)


class Loader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2 does, refuses what 1.1 and 1.2 read as different numbers.

    010 is 8 in YAML 1.1 and 10 in 1.2; 1:30 is 90 in 1.1 and text in 1.2. Both stay text here,
    which is refused where a number is wanted.
    """

    def __init__(self, stream: str | bytes) -> None:
        super().__init__(stream)
        self.name = "YAML"  # in messages, which name the file first
        self._merged = 0

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= MOST_BRACKETS:
            problem = f"found more than {MOST_BRACKETS} brackets inside one another"
            raise yaml.scanner.ScannerError(None, None, problem, self.get_mark())
        super().fetch_flow_collection_start(token)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the keys of `<<` into a mapping; ValueError at more than MOST_VALUES in all.

        They are copied wherever an alias merges them, and are multiplied by merges in merges.
        """
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(one, yaml.MappingNode):
                        self.flatten_mapping(one)
                        self._merged += 1 + len(one.value)
                        if self._merged > MOST_VALUES:
                            raise ValueError(f"found more than {MOST_VALUES} values")
        super().flatten_mapping(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Raise at a key that is no text, or there twice, of which YAML would take the last."""
        known: set[str] = set()
        for key, _ in node.value:
            problem = ""
            if not isinstance(key, yaml.ScalarNode):
                found = "list" if isinstance(key, yaml.SequenceNode) else "mapping"
                problem = f"found a key that is a {found}, wanted text"
            elif key.value in known and key.tag != "tag:yaml.org,2002:merge":
                problem = f"found duplicate key {key.value}"
            if problem:
                raise yaml.constructor.ConstructorError(
                    "while constructing a mapping", node.start_mark, problem, key.start_mark
                )
            known.add(key.value)
        return super().construct_mapping(node, deep)


Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rpartition(":")[2] in ("bool", "null", "merge")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)\Z"),
    list("-+0123456789"),
)
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""[-+]?([0-9][0-9_]*)\.[0-9_]*([eE][-+]?[0-9]+)?\Z
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+\Z
        |\.[0-9][0-9_]*([eE][-+]?[0-9]+)?\Z
        |[-+]?\.(inf|Inf|INF)\Z
        |\.(nan|NaN|NAN)\Z""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)
