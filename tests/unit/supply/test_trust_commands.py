"""Commands of trust: who is trusted, what verify says, and that the reference page has every code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.settings import TrustSettings
from kdskills.doors.cli.main import build_cli
from tests.unit.supply.signing_lab import Publisher, make_skill


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with two skills, one of them signed by somebody whose key is beside it."""
    for name in ("brief", "notes"):
        make_skill(tmp_path / "bundle/skills/acme" / name)
    Publisher.with_key(tmp_path / "publisher").sign(tmp_path / "bundle/skills/acme/brief")
    return tmp_path / "bundle"


def _call(tmp_path: Path, *words: object, **trust: object) -> Result:
    settings = Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", trust=TrustSettings(**trust))
    cli = get_command(build_cli(Host(settings, entry_points=False)))
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_verify(tmp_path: Path, bundle: Path) -> None:
    """Verify tells how each skill stands, and ends with 1 only where the policy forbids one; trust changes the answer."""
    result = _call(tmp_path, "verify", bundle)
    assert result.exit_code == 0, result.output
    assert "acme.brief untrusted signer" in result.output
    key = tmp_path / "publisher/key.pub"
    assert _call(tmp_path, "trust", "add", "acme", "--key", key).exit_code == 0
    result = _call(tmp_path, "verify", bundle, "--json", signatures="require")
    assert result.exit_code == 1
    rows = {row["skill"]: row for row in json.loads(result.stdout)["skills"]}
    assert (rows["acme.brief"]["forbidden"], rows["acme.brief"]["signer"]) == (False, "acme")
    assert (rows["acme.notes"]["forbidden"], rows["acme.notes"]["verdict"]) == (True, "unsigned")
    assert _call(tmp_path, "verify", bundle / "skills/acme/brief", signatures="require").exit_code == 0
    assert _call(tmp_path, "trust", "remove", "acme").exit_code == 0
    assert _call(tmp_path, "verify", bundle / "skills/acme/brief", signatures="require").exit_code == 1


def test_verify_what_cannot_be_used(tmp_path: Path, bundle: Path) -> None:
    """A skill that no longer parses, and one that is locked and gone, are told and forbidden like any other."""
    (bundle / "kdskills.lock").write_text('[skill."acme/gone"]\nsource = "./x"\n')
    (bundle / "skills/acme/notes/SKILL.md").write_text("---\nname: [\n---\n")
    result = _call(tmp_path, "verify", bundle, "--json", lock="enforce")
    assert result.exit_code == 1
    rows = {row["skill"]: row["verdict"] for row in json.loads(result.stdout)["skills"]}
    assert rows == {"acme.brief": "unlocked", "acme.gone": "changed", "acme.notes": "unlocked"}


def test_verify_what_cannot_be_judged(tmp_path: Path, bundle: Path) -> None:
    """A lock or a file of anchors that cannot be read is an error, also of a bundle without skills and a policy."""
    (tmp_path / "empty/skills").mkdir(parents=True)
    for folder in (bundle, tmp_path / "empty"):
        assert _call(tmp_path, "verify", folder).exit_code == 0
        (folder / "kdskills.lock").write_text("[")
        result = _call(tmp_path, "verify", folder)
        assert (result.exit_code, "lock_invalid" in result.output) == (1, True), result.output
        (folder / "kdskills.lock").unlink()
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state/trust.json").write_text("[")
    result = _call(tmp_path, "verify", tmp_path / "empty")
    assert (result.exit_code, "anchors_unreadable" in result.output) == (1, True), result.output


@pytest.mark.parametrize("command", ["verify", "check"])
def test_policies_of_no_namespace(tmp_path: Path, bundle: Path, command: str) -> None:
    """A policy of a namespace that no skill has is told, with the name that was probably meant, and fails then."""
    descriptor = bundle / "skills_descriptor.json"
    descriptor.write_text(json.dumps({"trust": {"amce": {"lock": "warn"}}}))
    result = _call(tmp_path, command, bundle)
    assert (result.exit_code, "did you mean 'acme'?" in " ".join(result.output.split())) == (1, True), result.output
    descriptor.write_text(json.dumps({"trust": {"elsewhere": {"lock": "warn"}, "*": {}, "acme": {}}}))
    result = _call(tmp_path, command, bundle)
    assert (result.exit_code, result.output.count("trust_namespace_unknown")) == (0, 1), result.output


def test_sign(tmp_path: Path, bundle: Path) -> None:
    """Sign makes what verify takes; a folder that is no skill and a key that is none are refused in one line."""
    key = tmp_path / "publisher/key.pem"
    assert _call(tmp_path, "trust", "add", "acme", "--key", key.with_suffix(".pub")).exit_code == 0
    assert _call(tmp_path, "sign", bundle / "skills/acme/notes", "--key", key).exit_code == 0
    assert _call(tmp_path, "verify", bundle, signatures="require").exit_code == 0
    unwritable = make_skill(tmp_path / "unwritable")
    (unwritable / "skill.oms.sig").mkdir()
    for words, code in [
        (("sign", bundle, "--key", key), "path_missing"),
        (("sign", bundle / "skills/acme/notes", "--key", bundle / "none.pem"), "anchor_unreadable"),
        (("sign", bundle / "skills/acme/notes", "--key", key.with_suffix(".pub")), "signing_failed"),
        (("sign", unwritable, "--key", key), "path_unwritable"),
        (("trust", "add", "acme"), "anchor_invalid"),
        (("trust", "remove", "nobody"), "anchor_unknown"),
        (("verify", bundle / "none"), "path_missing"),
    ]:
        result = _call(tmp_path, *words)
        assert (result.exit_code != 0, code in result.output) == (True, True), result.output


def test_every_code_is_on_the_page(repo: Path) -> None:
    """The reference page explains every code that judging, anchors and signing give."""
    sources = [repo / "kdskills/supply" / name for name in ("signatures.py", "verification.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    codes = set(re.findall(r'code="([a-z_]+)"', text)) | set(re.findall(r'"((?:lock|signature|signer)_[a-z]+)"', text))
    page = (repo / "docs/reference/trust.md").read_text(encoding="utf-8")
    assert codes >= {"lock_mismatch", "signature_invalid", "signer_untrusted", "anchors_unreadable"}
    assert [code for code in sorted(codes - {"signature_of"}) if f"| `{code}` |" not in page] == []
