"""Catalogs: their three shapes, their levels, a budget that holds, and descriptions that forge."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.prompts import LEVELS, CatalogEntry, prompt_environment, render_catalog
from kdskills.prompts.blocks import cut
from kdskills.skills.model import estimate_tokens

FRAME = "[SKILL CATALOG]\nLoad a skill with sk:<id> before you follow it."


def named(*names):
    """Entries with nothing but names."""
    return [CatalogEntry(f"SK{n}", f"a.{name}", name, name, "") for n, name in enumerate(names, start=1)]


def xml_characters(text):
    """What an XML parser gives back for *text*: forbidden characters replaced, line ends as LF."""
    legal = re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
    return legal.replace("\r\n", "\n").replace("\r", "\n")


# ---- shapes ------------------------------------------------------------------------------------------------------


def test_gallery(brief):
    """The gallery of the reference page, byte for byte."""
    assert render_catalog([brief]).text == (
        "[SKILL CATALOG]\n"
        "Load a skill with sk:<id> before you follow it.\n"
        "[SK1] acme.brief v2 (writing; summary, memo)\n"
        "  Turns long material into one page.\n"
        "  Use when: the user wants a summary; a report exceeds ten pages\n"
        "  Tools: web.search (required), io.save"
    )


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({}, "[SK1] a.b"),
        ({"version": "2"}, "[SK1] a.b v2"),
        ({"version": "v2.1"}, "[SK1] a.b v2.1"),
        ({"version": "vintage"}, "[SK1] a.b vvintage"),
        ({"category": "data"}, "[SK1] a.b (data)"),
        ({"tags": ("x", "y")}, "[SK1] a.b (x, y)"),
        ({"category": " ", "tags": ("\u200b",)}, "[SK1] a.b"),
        ({"description": " x\n\n\ty "}, "[SK1] a.b\n  x y"),
        ({"when_to_use": ("x", "", " \n")}, "[SK1] a.b\n  Use when: x"),
        ({"tools": (("t", False),)}, "[SK1] a.b\n  Tools: t"),
    ],
)
def test_absent_parts_are_omitted(facts, line):
    """What a skill does not say leaves no empty brackets and no empty line."""
    assert (
        render_catalog([CatalogEntry("SK1", "a.b", "b", "b", **{"description": "", **facts})]).text
        == f"{FRAME}\n{line}"
    )


@pytest.mark.parametrize(("form", "text"), [("gallery", "[SKILL CATALOG]\n(no skills)"), ("xml", ""), ("json", "[]")])
def test_no_skills(form, text):
    """An empty catalog says so; in XML it is nothing at all."""
    catalog = render_catalog([], form)
    assert (catalog.text, catalog.level, catalog.shown, catalog.total, catalog.diagnostics) == (text, 0, 0, 0, ())


def test_xml(brief):
    """The published shape: one tag or value a line, joined by LF, no final newline."""
    entry = dataclasses.replace(brief, description="a < b & \"c\" 'd' \x07")
    assert render_catalog([entry], "xml", locations="host").text == (
        "<available_skills>\n<skill>\n<name>\nbrief\n</name>\n<description>\na &lt; b &amp; &quot;c&quot; &#x27;d&#x27; \ufffd\n"
        "</description>\n<location>\n/srv/press/skills/acme/brief/SKILL.md\n</location>\n</skill>\n</available_skills>"
    )


@pytest.mark.parametrize(
    ("locations", "location"),
    [("host", "/srv/press/skills/acme/brief/SKILL.md"), ("logical", "skill://acme/brief/SKILL.md"), ("none", None)],
)
def test_locations(brief, locations, location):
    """A location is shown only as asked for; a skill without a path has its logical one."""
    found = ET.fromstring(render_catalog([brief], "xml", locations=locations).text).find("skill/location")
    assert (found.text.strip() if found is not None else None) == location
    for form in ("gallery", "json"):
        assert "/srv" not in render_catalog([brief], form, locations=locations).text
    assert "skill://acme" in render_catalog([dataclasses.replace(brief, path=None)], "xml").text


def test_order():
    """Gallery and JSON sort by full id, XML by name, then location; numbers are those given."""
    first = CatalogEntry("SK2", "b.x", "x", "m", "", location="skill://b")
    second = CatalogEntry("SK1", "a.x", "x", "m", "", location="skill://c")
    third = CatalogEntry("SK3", "c.x", "x", "l", "", location="skill://a")
    given_order = [first, second, third]
    assert re.findall(r"\[(SK\d)", render_catalog(given_order).text) == ["SK1", "SK2", "SK3"]
    assert [row["short_id"] for row in json.loads(render_catalog(given_order, "json").text)] == ["SK1", "SK2", "SK3"]
    text = render_catalog(given_order, "xml", locations="logical").text
    assert re.findall("skill://(.)", text) == ["a", "b", "c"]


def test_json(brief):
    """A list with the gallery's facts as fields, plus `short_id` and `digest`."""
    assert json.loads(render_catalog([brief], "json").text) == [
        {
            "short_id": "SK1",
            "id": "acme.brief",
            "name": "brief",
            "version": "2",
            "category": "writing",
            "tags": ["summary", "memo"],
            "description": "Turns long material into one page.",
            "when_to_use": ["the user wants a summary", "a report exceeds ten pages"],
            "tools": [{"id": "web.search", "required": True}, {"id": "io.save", "required": False}],
            "digest": "sha256:" + "0" * 64,
        }
    ]


def test_misuse_raises(brief):
    """Unknown formats and locations are the caller's mistakes."""
    with pytest.raises(ValueError, match="catalog format"):
        render_catalog([brief], "yaml")
    with pytest.raises(ValueError, match="locations"):
        render_catalog([brief], "xml", locations="remote")


# ---- levels and budget -------------------------------------------------------------------------------------------


def at_level(entries, level, form="gallery", **options):
    """The catalog at the largest budget that gives *level*."""
    full = render_catalog(entries, form, **options).tokens
    for budget in range(full, -1, -max(1, full // 200)):
        catalog = render_catalog(entries, form, budget=budget, **options)
        if catalog.level >= level:
            return catalog
    raise AssertionError(f"no budget gives level {level}")


def test_levels(brief):
    """Each level leaves out more: lists, long descriptions, descriptions, skills."""
    long = dataclasses.replace(brief, description="word " * 100)
    trimmed, short, names = (at_level([long], level).text for level in (1, 2, 3))
    assert trimmed == f"{FRAME}\n[SK1] acme.brief v2\n  {('word ' * 100).strip()}\n  Use when: the user wants a summary"
    assert short == f"{FRAME}\n[SK1] acme.brief v2\n  {('word ' * 48).strip()}…"
    spread = dataclasses.replace(brief, description="word \n  " * 100)
    assert at_level([spread], 2).text == short
    assert names == f"{FRAME}\n[SK1] acme.brief"
    assert LEVELS == ("full", "trimmed", "short", "names", "partial", "ranked")


def test_short_descriptions_come_in_three_lengths(many):
    """240, then 120, then 60 characters, at a word end, with an ellipsis."""
    lengths = set()
    for budget in range(1, render_catalog(many).tokens, 40):
        catalog = render_catalog(many, budget=budget)
        if catalog.level == 2:
            descriptions = re.findall(r"^  (.*)$", catalog.text, re.MULTILINE)
            assert all(d.endswith("…") for d in descriptions)
            lengths |= {len(d) - 1 for d in descriptions}
    assert sorted(lengths) == [len(cut(" ".join(many[0].description.split()), n)) - 1 for n in (60, 120, 240)]


@pytest.mark.parametrize(
    ("text", "length", "result"),
    [
        ("abc", 3, "abc"),
        ("abc def", 3, "abc…"),
        ("abc def", 5, "abc…"),
        ("abcdef", 3, "abc…"),
        ("abc  def", 4, "abc…"),
        ("abc def", 4, "abc…"),
        ("ab. cd", 4, "ab.…"),
    ],
)
def test_cut(text, length, result):
    """Cuts fall between words; a single long word is cut as it is."""
    assert cut(text, length) == result


@pytest.mark.parametrize("form", ["gallery", "xml", "json"])
def test_partial(many, form):
    """Level 4 shows pinned skills, then as many names as fit, and says how many of how many, with the hint."""
    catalog = at_level(
        many, 4, form, pinned=["acme.skill-40", "skill-39", "SK38"], search_hint="Find more with\nskills.search."
    )
    assert (catalog.level, catalog.total) == (4, 40)
    assert 3 < catalog.shown < 40
    names = re.findall(r"skill-(\d\d)(?=[\n\"])", catalog.text)
    ids = list(dict.fromkeys(names))
    assert ids == ["38", "39", "40", *(f"{n:02}" for n in range(1, catalog.shown - 2))]
    if form == "gallery":
        assert catalog.text.endswith(f"\n(shown {catalog.shown}/40) Find more with skills.search.")
    elif form == "xml":
        root = ET.fromstring(catalog.text)
        assert (root.attrib, root.find("more").text) == (
            {"shown": str(catalog.shown), "total": "40"},
            "\nFind more with skills.search.\n",
        )
    else:
        assert json.loads(catalog.text)[-1] == {
            "shown": catalog.shown,
            "total": 40,
            "more": "Find more with skills.search.",
        }


@pytest.mark.parametrize("form", ["gallery", "xml", "json"])
def test_one_name_more_would_not_fit(many, form):
    """As many names as fit are shown, not fewer: each budget shows one more than the one before it could not hold."""
    shown = {}
    for budget in range(1, 2000):
        catalog = render_catalog(many[:10], form, budget=budget, count=len)
        if catalog.level < 4:
            break
        if catalog.text:
            shown.setdefault(catalog.shown, catalog.tokens - budget)
    assert len(shown) > 5
    assert shown == dict.fromkeys(range(len(shown)), 0)


def test_the_hint_goes_before_the_names_do():
    """A hint too long for the budget is left out rather than the whole catalog."""
    catalog = render_catalog(named(*"abcdefghijklmnop"), budget=30, search_hint="x" * 400)
    assert catalog.text.endswith("/16)")


@pytest.mark.parametrize("form", ["gallery", "xml", "json"])
@pytest.mark.parametrize("budget", [0, -5, 1])
def test_too_small(many, form, budget):
    """Without room for the frame there is no text, and a finding says so."""
    catalog = render_catalog(many, form, budget=budget)
    assert (catalog.text, catalog.shown, catalog.total, catalog.tokens) == ("", 0, 40, 0)
    assert [f.code for f in catalog.diagnostics] == ["budget_too_small"]


def test_an_empty_catalog_keeps_its_budget():
    """Even `(no skills)` needs room."""
    assert render_catalog([], budget=2).diagnostics[0].code == "budget_too_small"
    assert render_catalog([], "xml", budget=0).diagnostics == ()


COUNTERS = [
    estimate_tokens,
    len,
    lambda text: text.count("\n") * 7,
    lambda text: len(text.split()),
    lambda text: -len(text),
]


@pytest.mark.parametrize("form", ["gallery", "xml", "json"])
def test_the_budget_is_never_exceeded(entries, form):
    """With any counter, growing with the text or not, the text counted is within the budget."""

    @given(
        entries,
        st.integers(-1, 300),
        st.sampled_from(COUNTERS) | st.functions(like=lambda text: 0, returns=st.integers(0, 400), pure=True),
    )
    def check(listed, budget, count):
        catalog = render_catalog(listed, form, budget=budget, count=count, pinned=["SK1"], search_hint="more")
        assert not catalog.text or count(catalog.text) <= budget
        assert bool(catalog.diagnostics) == (
            not catalog.text and not (form == "xml" and not listed and count("") <= budget)
        )

    check()


@pytest.mark.parametrize("form", ["gallery", "json"])
def test_numbers_never_change_with_the_level(many, form):
    """Whatever is left out, a number stands for the same skill."""
    pairs = {(entry.short_id, entry.full_id) for entry in many}
    pattern = r"\[(SK\d+)\] (\S+)" if form == "gallery" else r'"short_id":"(SK\d+)","id":"([^"]+)"'
    levels = set()
    for budget in range(0, render_catalog(many, form).tokens + 1, 13):
        catalog = render_catalog(many, form, budget=budget, pinned=["acme.skill-07"])
        found = re.findall(pattern, catalog.text)
        assert set(found) <= pairs
        assert len(found) == catalog.shown
        levels.add(catalog.level)
    assert levels >= {1, 2, 3, 4}


def test_tokens_are_those_of_the_counter(many):
    """`tokens` is what the counter says of the text."""
    for budget in (None, 3000, 900, 100):
        catalog = render_catalog(many, budget=budget, count=len)
        assert catalog.tokens == len(catalog.text)


def test_equal_arguments_give_equal_bytes(many):
    """Nothing but the arguments decides the text."""
    assert render_catalog(many, budget=500) == render_catalog(list(reversed(many)), budget=500)


# ---- hostile texts -----------------------------------------------------------------------------------------------


def test_descriptions_cannot_add_lines(entries):
    """Whatever the texts hold, a gallery has its frame, one line a skill and three indented kinds of line."""

    @given(entries)
    def check(listed):
        lines = render_catalog(listed).text.split("\n")
        if not listed:
            return
        assert lines[:2] == FRAME.split("\n")
        assert sum(not line.startswith("  ") for line in lines[2:]) == len(listed)
        assert len(lines) <= 2 + 4 * len(listed)
        joined = "".join(lines)
        assert not re.search("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028\u2029\ufeff\ud800-\udfff]", joined)

    check()


@pytest.mark.parametrize("locations", ["host", "logical", "none"])
def test_xml_parses_to_exactly_the_entries(entries, locations):
    """Whatever the texts hold, an XML parser finds the entries and their values, and nothing else."""

    @given(entries)
    def check(listed):
        text = render_catalog(listed, "xml", locations=locations).text
        if not listed:
            assert text == ""
            return
        root = ET.fromstring(text)
        found = [{part.tag: part.text[1:-1] for part in skill} for skill in root]
        wanted = []
        for entry in sorted(listed, key=lambda e: (e.display_name, e.location)):
            values = {"name": entry.display_name, "description": entry.description}
            if locations != "none":
                values["location"] = (entry.path or entry.location) if locations == "host" else entry.location
            wanted.append({key: xml_characters(f"\n{value}\n")[1:-1] for key, value in values.items()})
        assert (root.tag, root.attrib, [skill.tag for skill in root]) == (
            "available_skills",
            {},
            ["skill"] * len(listed),
        )
        assert found == wanted

    check()


def test_json_is_json(entries):
    """Whatever the texts hold, the list parses and can be encoded."""

    @given(entries)
    def check(listed):
        text = render_catalog(listed, "json").text
        assert len(json.loads(text)) == len(listed)
        text.encode()

    check()


def test_template_code_in_a_text_is_text(brief):
    """Values are never templates."""
    entry = dataclasses.replace(brief, description="{{ 7*7 }} {% for x in y %}")
    assert "  {{ 7*7 }} {% for x in y %}" in render_catalog([entry]).text


# ---- templates ---------------------------------------------------------------------------------------------------


def replaced(**templates):
    """An environment in which a plugin replaced templates."""
    environment = prompt_environment()
    environment.loader = jinja2.ChoiceLoader([jinja2.DictLoader(templates), environment.loader])
    return environment


def test_a_template_can_be_replaced(brief):
    """A plugin's template gets values already escaped; the others stay."""
    environment = replaced(
        **{"available_skills.xml.j2": "<s>{% for e in entries %}<n>{{ e.name }}</n>{% endfor %}</s>"}
    )
    entry = dataclasses.replace(brief, display_name="a<b")
    assert render_catalog([entry], "xml", environment=environment).text == "<s><n>a&lt;b</n></s>"
    assert render_catalog([entry], environment=environment).text == render_catalog([entry]).text


def test_the_environment_is_strict_and_sandboxed(brief):
    """An undefined name is an error, and templates cannot reach into Python."""
    with pytest.raises(jinja2.UndefinedError):
        render_catalog([brief], environment=replaced(**{"gallery.j2": "{{ nothing }}"}))
    with pytest.raises(jinja2.exceptions.SecurityError):
        render_catalog([brief], environment=replaced(**{"gallery.j2": "{{ ''.__class__.__mro__ }}"}))


def test_each_environment_is_new():
    """Extending one Host's environment leaves the next one as it was."""
    prompt_environment().filters["shout"] = str.upper
    assert "shout" not in prompt_environment().filters


# ---- what is not rendered because it cannot fit -------------------------------------------------------------------


def plain_count(text):
    """The estimate under another name: catalogs cannot know what it counts, and render every level."""
    return estimate_tokens(text)


@given(
    st.lists(st.text(max_size=300), min_size=1, max_size=12),
    st.integers(0, 1200),
    st.sampled_from(["host", "logical", "none"]),
)
def test_levels_passed_over_could_not_have_fitted(descriptions, budget, locations):
    """Bounding a text's size instead of rendering it changes no catalog, whatever the descriptions hold."""
    entries = [
        CatalogEntry(f"SK{n}", f"a.s{n}", f"s{n}", f"s{n}", text, location=f"skill://a/s{n}/SKILL.md", path=f"/x/{n}")
        for n, text in enumerate(descriptions, start=1)
    ]
    found = render_catalog(entries, "xml", budget=budget, locations=locations)
    assert found == render_catalog(entries, "xml", budget=budget, locations=locations, count=plain_count)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_an_exact_budget_is_used_up(many, level):
    """A text that fits to the last byte is not passed over."""
    wanted = at_level(many, level, "xml") if level != 1 else render_catalog(many, "xml")
    again = render_catalog(many, "xml", budget=wanted.tokens)
    assert (again.text, again.tokens) == (wanted.text, wanted.tokens)


def test_a_template_that_shows_less_gets_the_room_it_leaves(many):
    """What the shipped template would need decides nothing about one put in its place."""
    env = prompt_environment()
    shorter = {"available_skills.xml.j2": "{% for entry in entries %}{{ entry.name }} {% endfor %}"}
    env.loader = jinja2.ChoiceLoader([jinja2.DictLoader(shorter), env.loader])
    budget = render_catalog(many, "xml", environment=env).tokens
    assert render_catalog(many, "xml", environment=env, budget=budget).level == 0


@pytest.mark.parametrize("count", [len, lambda text: len(text) ** 2, lambda text: int(len(text) ** 0.5)])
def test_guessing_finds_what_halving_found(many, count):
    """However a counter grows, as many names are shown as fit: the next larger number of names never does."""
    sizes = {}
    for characters in range(60, 1900, 10):
        catalog = render_catalog(many, "json", budget=count("x" * characters), count=count)
        assert catalog.tokens <= count("x" * characters)
        if catalog.level == 4 and catalog.text:
            sizes.setdefault(catalog.shown, catalog.tokens)
            larger = [tokens for shown, tokens in sizes.items() if shown > catalog.shown]
            assert all(tokens > count("x" * characters) for tokens in larger)
    assert len(sizes) > 20
    assert list(sizes) == sorted(sizes)
