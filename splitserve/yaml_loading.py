"""YAML as `yaml.safe_load` reads it, save that a key given twice is an error.

PyYAML keeps the last of them without a word, and YAML 1.2 (3.2.1.3) forbids them.
"""

from __future__ import annotations

from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line} gives the key {key.value!r} again")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """The one document in `text`, as plain objects. Raises yaml.YAMLError."""
    loader = _UniqueKeys(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
