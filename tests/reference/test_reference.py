"""The committed reference is what it claims to be, and comparing with it tells right from wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitserve.models import resolve_model
from splitserve.tokenizer import Tokenizer
from tests.reference import Case, Verdict, compare, named_cases, prose_cases, tolerable
from tests.reference.make_reference import PROSE, QUESTIONS

# Found by earlier runs of transformers, by hand.
KNOWN = {
    "R1": [7042, 30, 198, 198, 504, 2988, 314, 42],
    "R2": [216, 40, 216, 41, 216, 33, 32, 216, 33, 33],
    "R3": [407, 339, 659, 450, 377, 1606, 428, 334, 312, 514, 198, 198],
    "R4": [19556, 17, 1073, 416, 339, 4237, 346, 1834, 47, 2],
    "R6": [504, 3575, 282, 4649, 314, 7042, 30, 2],
    "R7": [2, 198, 1, 4093, 198, 57],
    "R9": [10813, 114, 241] * 5 + [10813],
    "P3": [421, 88, 421, 421, 421, 421, 3250, 30, 198, 198],
    "P3-repetition": [88, 30, 198],
    "B1": [260, 3575, 282, 260],
    "B2": [28589] * 24,
    "L15": [7522, 29, 14013, 7522],
    "L16": [7522, 29, 14013, 7522],
    "L17": [3822, 284, 7522, 29],
    "L31": [582, 827, 1296, 1876],
    "L32": [582, 827, 1296],
    "L33": [827, 1296, 1876],
    "L48": [582, 827, 1296],
    "L64": [582, 827, 1296],
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name: str) -> None:
    case = named_cases()[name]
    assert list(case.answer(len(KNOWN[name]), ignore_eos=True)) == KNOWN[name]
    assert min(case.margins) > 2e-3


def test_known_numbers() -> None:
    cases = named_cases()
    assert cases["R1"].logprobs[0] == pytest.approx(-0.2581, abs=1e-3)
    assert cases["R7"].margins[0] == pytest.approx(3.3, abs=0.1)
    assert [len(cases[f"L{k}"].prompt_ids) for k in (15, 16, 17, 64)] == [15, 16, 17, 64]
    assert cases["R7"].answer(6) == (2,)
    assert len(cases["R4"].answer(24)) == 10
    assert 2 not in cases["R7-min-tokens"].token_ids[:2]


def test_prompts_encode_to_their_ids() -> None:
    tokenizer = Tokenizer(resolve_model("smollm2-135m").directory)
    for case in (*named_cases().values(), *prose_cases()):
        assert tuple(tokenizer.encode(case.prompt)) == case.prompt_ids, case.name
        if case.messages:
            assert tuple(tokenizer.apply_chat_template(case.messages)) == case.prompt_ids


def test_prose_prompts_vary() -> None:
    cases = prose_cases()
    assert len(cases) == 200
    lengths = sorted(len(case.prompt_ids) for case in cases)
    assert lengths[0] == 1 and 500 < lengths[-1] <= 600
    assert 15 < lengths[100] < 60  # log-uniform: the median is near the root of 600
    assert sum(case.prompt.endswith(QUESTIONS) for case in cases) >= 10
    text = PROSE.read_text(encoding="utf-8")
    cut_from_it = sum(case.prompt in text for case in cases)
    assert cut_from_it > 150  # the rest ask a question, or run over the end


# -- comparing ----------------------------------------------------------------------------------


CASE = Case("x", "", (), (), {}, (5, 6, 7, 8), (1.0, 1e-3, 1.0, 1.0), (0.0,) * 4, eos_token_id=7)


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        ([5, 6, 7, 8], Verdict.EQUAL),
        ([5, 9, 9, 9], Verdict.THIN),
        ([5, 9], Verdict.THIN),
        ([9, 6, 7, 8], Verdict.WRONG),
        ([5, 6, 9, 8], Verdict.WRONG),
        ([5, 6, 7], Verdict.WRONG),
        ([5], Verdict.WRONG),
        ([], Verdict.WRONG),
        ([5, 6, 7, 8, 9], Verdict.WRONG),
    ],
)
def test_verdicts(got: list[int], verdict: Verdict) -> None:
    assert compare(CASE, got, 4, ignore_eos=True) is verdict


def test_an_answer_ends_with_eos() -> None:
    assert compare(CASE, [5, 6, 7], 4) is Verdict.EQUAL
    assert compare(CASE, [5, 6, 7, 8], 4) is Verdict.WRONG
    assert compare(CASE, [5, 6], 2) is Verdict.EQUAL
    assert compare(replace(CASE, eos_token_id=0), [5, 6, 7, 8], 4) is Verdict.EQUAL


def test_few_thin_margins_are_tolerated_and_no_error() -> None:
    equal, thin, wrong = Verdict.EQUAL, Verdict.THIN, Verdict.WRONG
    assert tolerable([equal] * 196 + [thin] * 4)
    assert not tolerable([equal] * 195 + [thin] * 5)
    assert not tolerable([equal] * 199 + [wrong])
