"""Words of texts and questions: what is split, folded, stemmed and left out."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.search import words as words_module
from kdskills.search.words import MAX_WORD, Lexicon, runs, sign_of


def terms(text: str) -> list[str]:
    """Return all terms of a text, in order."""
    return [term for word in Lexicon.latest().words(text) for term in word.stems]


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
    assert b"a" * 10_000 not in Lexicon.latest()


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
    assert all(0 < len(term) <= 3 * MAX_WORD and len(sign_of(term)) == 1 for term in first)
    assert "\n" not in map(sign_of, first)


def test_half_characters_are_no_error() -> None:
    """A lone surrogate separates words or is one, and never raises."""
    assert "brief" in terms("brief\ud800 \udfffx")


def test_signs_are_the_same_on_every_machine() -> None:
    """A sign does not depend on the process: it is kept in files."""
    assert sign_of("review") == chr(0x100 + 2034467270 % 55040)


def test_words_that_share_a_sign_are_two() -> None:
    """Two stems with one sign are counted apart, and one stem in many forms is one word."""
    lexicon = Lexicon()
    stems: dict[str, str] = {}
    first, second = next(
        (stems[sign], stem)
        for stem in map(str, range(100_000))
        if stems.setdefault(sign := sign_of(stem), stem) != stem
    )
    one, other, again = lexicon.words(f"{first} {second} {first}")
    assert str(one) + "" == str(other) + ""
    assert len({one, other, again}) == 2
    assert len(set(lexicon.words("review Reviews REVIEWED reviewing"))) == 1
    assert lexicon.words("cuda cudaReview review")[1].parts == tuple(lexicon.words("Cuda reviews"))


def test_a_full_lexicon_is_followed_by_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is bounded, and who still compares words of the full one may."""
    monkeypatch.setattr(Lexicon, "_latest", Lexicon())
    monkeypatch.setattr(words_module, "_MOST_WORDS", 10)
    before = Lexicon.latest()
    held = before.words("one1 two2 three3 four4 five5 six6")
    assert before.full
    assert Lexicon.latest() is not before
    assert not Lexicon.latest()
    assert before.words("six6 five5")[0] is held[-1]


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
