"""The one table of operations says who may call each, and no argument widens that."""

from __future__ import annotations

import pytest

from kdskills.app.identity import PROFILES, SCOPES
from kdskills.app.operations import OPERATIONS
from kdskills.app.operations.calling import HOST_WORDS, host_words
from kdskills.app.operations.table import Shipped

#: Words by which a caller could choose its own gate. A field whose name holds one is the host's to say, or stands below.
GATE_WORDS = frozenset(
    [
        "account",
        "admin",
        "agent",
        "approval",
        "approve",
        "approved",
        "binary",
        "bundle",
        "by",
        "consumer",
        "door",
        "engine",
        "executor",
        "host",
        "identity",
        "internal",
        "local",
        "model",
        "namespace",
        "person",
        "policy",
        "profile",
        "project",
        "role",
        "root",
        "scope",
        "scopes",
        "sudo",
        "tenant",
        "token",
        "tool",
        "tools",
        "trust",
        "user",
        "who",
    ]
)
#: Fields with such a word that open nothing, each with the reason.
HARMLESS = {
    ("mode",): "how a skill is loaded, not who loads it",
    ("project",): "another project than the token's is not found",
    ("namespace", "skills.search"): "narrows what is found among skills the caller is shown",
    ("namespace", "skills.matrix"): "narrows what is told among skills the caller is shown",
    ("model", "turns.start"): "judged by the operation: one of the setting turns.models",
    ("scopes", "tokens.change"): "never wider than the token was",
    ("allowed_tools", "tokens.change"): "never wider than the token was",
    ("who", "audit_log.list"): "narrows what is told of the caller's own project",
    ("agent", "tokens.create"): "an administrator administers every agent of its project",
    ("scopes", "tokens.create"): "never wider than the maker's",
    ("allowed_tools", "tokens.create"): "never wider than the maker's",
    ("tools", "tokens.create"): "never wider than the maker's",
    ("person", "tokens.create"): "never wider than the maker's",
    (
        "host",
        "fleet.drain",
    ): "a machine of the roster, which its row alone opens nothing of; other projects' administrators are refused",
    ("host", "fleet.undrain"): "as for fleet.drain",
    ("host", "fleet.evict"): "as for fleet.drain",
}
ELSEWHERE = sorted(name for name, row in OPERATIONS.items() if not row.local)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_an_operation_has_a_profile(name: str) -> None:
    """Each says which list of tools it belongs to; what needs the scope `admin` is the operator's, and nothing else is."""
    row = OPERATIONS[name]
    assert row.profile in PROFILES
    assert row.scope in SCOPES
    assert (row.profile == "operator") == (row.scope == "admin")


def test_a_new_operation_must_choose() -> None:
    """There is no profile that a shipped operation has by silence."""
    with pytest.raises(TypeError, match="profile"):
        Shipped("acme.new", "Do it.", "showing:list_skills")  # type: ignore[call-arg]


def test_what_a_model_works_with_is_not_of_the_machine() -> None:
    """No operation of the profile `skills` works on files of the machine."""
    assert [name for name, row in OPERATIONS.items() if row.profile == "skills" and row.local] == []


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_caller_elsewhere_chooses_its_gate(name: str) -> None:
    """An argument that could widen what a caller may do is declared the host's, or harmless with the reason."""
    row = OPERATIONS[name]
    declared = host_words(row)
    for field in row.input.model_fields:
        risky = bool(GATE_WORDS & set(field.split("_")))
        harmless = (field,) in HARMLESS or (field, name) in HARMLESS
        assert not risky or field in declared or harmless, f"{name}: {field}: the host's, or harmless? say which"


def test_the_declaration_has_no_dead_words() -> None:
    """Each word that is the host's is a field of some operation."""
    assert set(HOST_WORDS) - {field for row in OPERATIONS.values() for field in row.input.model_fields} == set()
