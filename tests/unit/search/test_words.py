"""Words of texts and questions: what is split, folded, stemmed and left out."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.search.words import MAX_WORD, SIGNS, STEMS, runs


def terms(text: str) -> list[str]:
    """Return all terms of a text, in order."""
    return [term for run in runs(text) for term in STEMS[run]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("code-review", ["code", "review"]),
        ("snake_case name", ["snake", "case", "name"]),
        ("parseHTMLDocument", ["pars", "html", "document"]),
        ("cudaStream2", ["cuda", "stream", "2"]),
        ("GPUs", ["gpu"]),
        ("LLMs and APIs", ["llm", "api"]),
        ("H264", ["h", "264"]),
        ("S3 bucket", ["s", "3", "bucket"]),
        ("Reviewing reviews reviewed", ["review", "review", "review"]),
        ("", []),
        ("the of and with", []),
        ("—…“”", []),
    ],
)
def test_words_are_split_at_punctuation_case_and_digits(text: str, expected: list[str]) -> None:
    """Runs are split where case or digits begin; grammar counts for nothing; English words are stemmed."""
    assert terms(text) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ﬁle", "file"),  # NFKC
        ("ＡＰＩ", "api"),
        ("Straße", "STRASSE"),
        ("café menus", "CAFÉ menu"),
        ("отчёты", "отчёт"),
        ("αναφορές", "ΑΝΑΦΟΡΕΣ"),
    ],
)
def test_forms_of_a_word_are_one_term(one: str, other: str) -> None:
    """Compatibility forms, case and inflection do not part a word from itself."""
    assert set(terms(one)) & set(terms(other))


def test_scripts_without_blanks_count_by_pairs_of_characters() -> None:
    """A question of two characters finds a longer run that holds them."""
    assert terms("数据分析报告") == ["数据", "据分", "分析", "析报", "报告"]
    assert set(terms("分析")) <= set(terms("数据分析报告"))
    assert terms("GPU加速") == ["gpu", "加速"]
    assert set(terms("データ")) <= set(terms("データ分析"))


def test_overlong_runs_are_cut() -> None:
    """A run longer than a word can be, such as base64, costs what one word costs, and is not remembered."""
    assert terms("a" * 10_000) == ["a" * MAX_WORD]
    assert "a" * 10_000 not in STEMS


def test_marks_belong_to_their_word() -> None:
    """Vowel signs and accents part no word."""
    assert terms("हिन्दी में") == terms("हिन्दी") + terms("में")
    assert len(terms("हिन्दी")) == 1
    assert len(terms("naïve cafe\u0301s")) == 2


def test_ascii_with_dashes_is_split_as_any_other_text() -> None:
    """The quick way for texts that are ASCII but for punctuation gives what the slow one gives."""
    text = "Profile → a “CSV” table — types, gaps… don’t 100%"
    assert runs(text) == runs(text + " é")[:-1]


@given(st.text(max_size=300))
def test_any_text_has_words(text: str) -> None:
    """No text raises, every term is short and has one sign, and what is remembered is what is worked out."""
    first = terms(text)
    assert first == terms(text)
    assert all(0 < len(term) <= 3 * MAX_WORD and len(SIGNS[term]) == 1 for term in first)
    assert "\n" not in map(SIGNS.__getitem__, first)


def test_half_characters_are_no_error() -> None:
    """A lone surrogate separates words or is one, and never raises."""
    assert "brief" in terms("brief\ud800 \udfffx")


def test_signs_are_the_same_on_every_machine() -> None:
    """A sign does not depend on the process: it is kept in files."""
    assert SIGNS["review"] == chr(0x100 + 2034467270 % 55040)


def test_many_threads_stem_at_once() -> None:
    """The stemmer's state is not shared by two threads at a time."""
    words = [f"running{number}s jumping{number}ed" for number in range(2000)]
    answers: list[list[str]] = []

    def work() -> None:
        answers.append([term for word in words for term in terms(word)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer == answers[0] for answer in answers)
    assert len(answers) == 8
