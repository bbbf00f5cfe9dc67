"""Hypothesis strategies for messages that are well-formed and make no sense."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from hypothesis import strategies as st

from tests.unit.wire.message_strategies import messages_of


def noise(union: Any, **likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any message of a union; fields named in `likely` often have a value that is known here."""
    kinds = get_args(union) or (union,)
    return st.sampled_from(kinds).flatmap(lambda kind: _of(kind, likely))


def _of(kind: type, likely: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    names = [field.name for field in dataclasses.fields(kind) if field.name in likely]
    chosen = st.fixed_dictionaries({}, optional={name: likely[name] for name in names})
    return st.tuples(messages_of(kind), chosen).map(
        lambda pair: dataclasses.replace(pair[0], **pair[1])
    )
