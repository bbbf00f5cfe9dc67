from __future__ import annotations

import pickle
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.errors import ProtocolError
from splitserve.request import Sampling
from splitserve.wire import messages as m
from splitserve.wire.codec import MAX_ARRAY_ITEMS, Decoder, decoder_for, encode
from tests.unit.wire.message_strategies import KINDS, UNIONS, messages_of

TOKENS = m.Tokens("epoch", (m.TokenRow("request", 0, 0, 5, (42,)),))

WRONG_SCALARS = (None, True, -1, 2**63, 2**64 - 1, 0.5, float("nan"), float("inf"), "x", b"x")
WRONG_SHAPES: tuple[Any, ...] = (
    (),
    (1,),
    ((),),
    {},
    {"a": 1},
    msgpack.Timestamp(1),
    msgpack.ExtType(5, b"x"),
)


@pytest.mark.parametrize(("union", "kind"), KINDS, ids=lambda v: getattr(v, "__name__", ""))
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_message_survives_the_round_trip(union: Any, kind: type, data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    decoded = decoder_for(union).decode(memoryview(encode(message)))
    assert decoded == message
    assert type(decoded) is kind


def wrong_value(data: st.DataObject) -> Any:
    return data.draw(st.sampled_from([*WRONG_SCALARS, *WRONG_SHAPES]))


def mutate(form: Any, data: st.DataObject) -> Any:
    """Change one place of a packed form: another value, one less, or one more."""
    if not isinstance(form, tuple | list) or not form or data.draw(st.integers(0, 5)) == 0:
        return wrong_value(data)
    items = list(form)
    place = data.draw(st.integers(0, len(items) - 1))
    match data.draw(st.sampled_from(["inside", "inside", "inside", "drop", "add"])):
        case "drop":
            del items[place]
        case "add":
            items.insert(place, wrong_value(data))
        case _:
            items[place] = mutate(items[place], data)
    return items


@pytest.mark.parametrize(("union", "kind"), KINDS, ids=lambda v: getattr(v, "__name__", ""))
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_mutated_form_is_a_message_or_a_protocol_error(
    union: Any, kind: type, data: st.DataObject
) -> None:
    form = msgpack.unpackb(encode(data.draw(messages_of(kind))), use_list=False)
    mutated = msgpack.packb(mutate(form, data))
    try:
        decoded = decoder_for(union).decode(mutated)
    except ProtocolError as error:
        assert 0 < len(str(error)) < 300
    else:  # whatever was let through is a message of the union that packs and unpacks
        assert decoder_for(union).decode(encode(decoded)) == decoded


@given(data=st.binary(max_size=200), name=st.sampled_from(sorted(UNIONS)))
def test_bytes_from_anywhere_raise_protocol_error(data: bytes, name: str) -> None:
    with pytest.raises(ProtocolError):
        decoder_for(UNIONS[name]).decode(data)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_flipped_bit_raises_nothing_but_protocol_error(data: st.DataObject) -> None:
    packed = bytearray(encode(data.draw(messages_of(m.Prefill))))
    place = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[place // 8] ^= 1 << place % 8
    try:
        decoder_for(m.ToWorker).decode(bytes(packed))
    except ProtocolError:
        return


def packed(*form: Any) -> bytes:
    return bytes(msgpack.packb(form))


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (("Nonsense", "e"), "unknown message 'Nonsense'"),
        (("Prefill", "e"), "unknown message 'Prefill'"),  # of another union
        (("Tokens",), "4 fields expected"),
        (("Tokens", "e", (), (), 0.0, 1), "4 fields expected"),
        (("Tokens", 7, (), (), 0.0), "Tokens.epoch: string expected"),
        (("Tokens", "e", "rows", (), 0.0), "Tokens.rows: array expected"),
        (("Tokens", "e", ((1, 2),), (), 0.0), "Tokens.rows: 7 fields expected"),
        (
            ("Tokens", "e", (("r", 0, 0, -1, (), None, None),), (), 0.0),
            "rows.first_index: integer in",
        ),
        (
            ("Tokens", "e", (("r", 0, 0, 1, (True,), None, None),), (), 0.0),
            "rows.tokens: integers expected",
        ),
        (
            ("Tokens", "e", (("r", 0, 0, 1, (2**63,), None, None),), (), 0.0),
            "rows.tokens: integers in",
        ),
        (
            ("Tokens", "e", (("r", True, 0, 1, (), None, None),), (), 0.0),
            "rows.attempt: integer in",
        ),
        (("Tokens", "e", (("r", 0, 0, 1, (), None, "eos"),), (), 0.0), "rows.finish: one of"),
        (("Failed", "r", 0, "e", "decode", "why", 1, False), "Failed.retriable: boolean expected"),
        (("HandedOver", "r", 0, "e", 1, (0.0, float("nan"), 0, 0, 0)), "transfer_s: finite number"),
    ],
)
def test_the_error_names_the_place_and_what_was_expected(form: Any, says: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decoder_for(m.ToCoordinator).decode(packed(*form))
    assert says in str(caught.value)


def test_received_values_do_not_reach_the_error() -> None:
    with pytest.raises(ProtocolError) as caught:
        decoder_for(m.ToCoordinator).decode(packed("Tokens", "e", "s" * 100_000))
    assert len(str(caught.value)) < 100


def test_a_whole_number_may_stand_for_a_float() -> None:
    decoded = decoder_for(m.ToWorker).decode(encode(m.Drain("e", 5)))
    assert decoded == m.Drain("e", 5.0)
    assert type(decoded.deadline_s) is float


def test_oversized_messages_are_refused_before_they_are_read() -> None:
    decoder: Decoder[m.Tokens] = Decoder(m.Tokens, max_bytes=10)
    with pytest.raises(ProtocolError, match="the limit is 10"):
        decoder.decode(encode(TOKENS))
    assert Decoder[m.Tokens](m.Tokens, max_bytes=len(encode(TOKENS))).decode(encode(TOKENS))


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd" + struct.pack(">I", 2**32 - 1),  # an array said to have 4 billion items
        b"\xdb" + struct.pack(">I", 2**32 - 1),  # a string of 4 GB
        b"\xc6" + struct.pack(">I", 2**32 - 1),
        b"\xdf" + struct.pack(">I", 2**32 - 1),
        b"\x91" * 100_000,  # deep nesting
        b"\x92\xa6Tokens\xc1",
        b"\x92\xa2\xff\xfe\x01",  # a tag that is not UTF-8
        packed("Tokens", "e", ()) + b"\x00",  # something behind the message
        packed("Tokens", "e", ())[:-1],
        packed(),
        packed(("Tokens",), "e"),
        msgpack.packb("Tokens"),
        msgpack.packb({"Tokens": "e"}),
        b"",
    ],
)
def test_malformed_input(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decoder_for(m.ToCoordinator).decode(data)


def test_too_many_items_are_refused() -> None:
    tokens = packed("Tokens", "e", (("r", 0, 0, 1, (1,) * (MAX_ARRAY_ITEMS + 1), None, None),))
    with pytest.raises(ProtocolError):
        decoder_for(m.ToCoordinator).decode(tokens)


def test_a_pickle_is_not_a_message() -> None:
    with pytest.raises(ProtocolError):
        decoder_for(m.ToCoordinator).decode(pickle.dumps(TOKENS))


def test_a_foreign_object_does_not_travel() -> None:
    sampling: Any = object()
    prefill = m.Prefill("r", 0, "e", (1,), 1, (), sampling, 1.0, 1.0)
    with pytest.raises(TypeError):
        encode(prefill)
    assert encode(m.Prefill("r", 0, "e", (1,), 1, (), Sampling(max_tokens=1), 1.0, 1.0))


@pytest.mark.parametrize("seconds", [1e31, -1e31, 1.7e308])
def test_durations_that_no_sum_survives_are_refused(seconds: float) -> None:
    """Two of them add up to infinity, which no answer can carry: one peer would break them all."""
    message = m.FirstToken("r", 0, "epoch", (), seconds, 0.5)
    with pytest.raises(ProtocolError, match="queued_s: finite number expected"):
        decoder_for(m.ToCoordinator).decode(encode(message))
