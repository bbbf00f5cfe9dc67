import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.scheduling.prefix_key import block_key, namespace_of, prefix_keys, root_key

TOKENS = [1000 + 7 * n for n in range(64)]


@pytest.mark.parametrize("seed", [None, "1", "2"])
def test_every_process_gives_a_block_the_same_key(seed: str | None) -> None:
    """LMCache #1139, #2136: keys made of hash() never matched across processes."""
    program = (
        "from splitserve.scheduling.prefix_key import prefix_keys;"
        f"print(b''.join(prefix_keys({TOKENS}, 16, 'salt')).hex())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == b"".join(prefix_keys(TOKENS, 16, "salt")).hex(), done.stderr


def test_only_full_blocks_have_a_key() -> None:
    assert prefix_keys(TOKENS[:15], 16) == []
    assert len(prefix_keys(TOKENS[:16], 16)) == 1
    assert prefix_keys(TOKENS[:63], 16) == prefix_keys(TOKENS, 16)[:3]


def test_a_key_stands_for_everything_before_it() -> None:
    other = [TOKENS[0] + 1, *TOKENS[1:]]
    assert set(prefix_keys(TOKENS, 16)).isdisjoint(prefix_keys(other, 16))


def test_keys_of_different_namespaces_have_nothing_in_common() -> None:
    """vllm GHSA-rm76-4mrf-v9r8, #44701: a salt and an adapter of one name were the same."""
    namespaces = ["", namespace_of(salt="x"), namespace_of(adapter="x"), namespace_of(salt="y")]
    keys = [key for namespace in namespaces for key in prefix_keys(TOKENS, 16, namespace)]
    assert len(set(keys)) == len(keys) == 16


def test_no_field_reaches_into_the_next() -> None:
    """vllm PR#12621: fields that are strung together untagged can be made to collide."""
    assert namespace_of(salt="ab", adapter="c") != namespace_of(salt="a", adapter="bc")
    assert namespace_of(salt="x1:y") != namespace_of(salt="x", y="")
    assert block_key(b"ab", [1]) != block_key(b"a", [0x62, 1])
    assert block_key(root_key(), [1, 2]) != block_key(block_key(root_key(), [1]), [2])


def test_a_field_that_is_not_given_is_none_at_all() -> None:
    assert namespace_of() == namespace_of(salt=None) == ""
    assert namespace_of(salt="") != ""
    assert namespace_of(salt="x", adapter="y") == namespace_of(adapter="y", salt="x")


@given(
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
)
def test_namespaces_are_equal_only_when_their_fields_are(
    one: dict[str, str], other: dict[str, str]
) -> None:
    assert (namespace_of(**one) == namespace_of(**other)) == (one == other)
