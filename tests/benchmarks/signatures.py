"""Judge a folder of signed skills against the reference verifier, or measure what a policy costs discovery.

    python tests/benchmarks/signatures.py FOLDER --certificate PEM | --key PEM
    python tests/benchmarks/signatures.py --discovery [--count 1000] [--rounds 15]

With a folder, every skill below it is judged by this product and by `model-signing`, called as its documentation says; exit 1
when the two differ for one. With `--discovery`, cold discovery of so many locked and signed skills is measured without a
policy, with the strictest one and verdicts kept from an earlier start, and once with none kept; the first two alternate, the
median counts, and exit 1 says that the policy costs more than 15 %. It is done for the smallest skills and for usual ones,
and as in `skills.py`: with an index that is written, as at the first start on a machine, and with none.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from kdskills.bundle import SkillsDescriptor
from kdskills.bundle.descriptor import TrustPolicy
from kdskills.bundle.lock_file import lock_of
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot
from kdskills.skills.safe_open import read_tree, tree_digest_of
from kdskills.supply.lock import LockedSkill, skills_text
from kdskills.supply.signatures import SIGNATURE_FILE, TrustAnchor, TrustAnchors, make_anchor, sign_folder, signature_of
from kdskills.supply.verification import judge_of

MOST = 1.15
STRICTEST = TrustPolicy(lock="enforce", signatures="require")


def reference_accepts(skill: Path, option: str, pem: Path) -> bool:
    """Whether the package's own verifier accepts a skill."""
    import model_signing

    config = model_signing.verifying.Config()
    try:
        if option == "key":
            config.use_elliptic_key_verifier(public_key=pem)
        else:
            config.use_certificate_verifier(certificate_chain=[pem])
        config.verify(skill, skill / SIGNATURE_FILE)
    except Exception:  # noqa: BLE001 - it raises what it likes
        return False
    return True


def compare(top: Path, option: str, pem: Path) -> int:
    """Judge every skill below *top* twice and print where the two differ."""
    files: dict[str, Any] = {option: pem}
    anchor: TrustAnchor = make_anchor("publisher", **files)
    counts: Counter[str] = Counter()
    for skill in sorted(path.parent for path in top.rglob("SKILL.md")):
        verdict = signature_of(skill, [anchor])
        with contextlib.redirect_stdout(sys.stderr):  # the package prints about bundles of old
            accepted = reference_accepts(skill, option, pem)
        equal = (verdict.kind == "ok") == accepted
        counts.update([verdict.kind, "equal" if equal else "unequal"])
        if not equal or verdict.kind != "ok":
            facts = ", ".join(verdict.files[:5]) or verdict.reason
            print(f"{'equal  ' if equal else 'UNEQUAL'} {skill.relative_to(top)}: {verdict.kind}: {facts}")
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()) or "no skills")
    return 1 if counts["unequal"] or not counts else 0


def write_skills(top: Path, count: int, *, usual: bool = False) -> TrustAnchor:
    """Write a bundle of *count* signed and locked skills, and return who signed them.

    The smallest have two files and 4 KB of text; the *usual* ones three to six, and 7 KB.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    (top / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (top / "key.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    locked: dict[str, LockedSkill] = {}
    for number in range(count):
        folder = top / f"bundle/skills/lab{number % 10}/skill-{number}"
        (folder / "scripts").mkdir(parents=True)
        front = f"name: skill-{number}\ndescription: Does thing {number}, when somebody asks for it.\nversion: 1.0.{number}\n"
        text = "One line of many in a text.\n" * (250 if usual else 150)
        (folder / "SKILL.md").write_text(f"---\n{front}---\n# Thing {number}\n\n{text}")
        (folder / "scripts/run.py").write_text(f"print({number})\n" * 40)
        for each in range(number % 4 if usual else 0):
            (folder / "references").mkdir(exist_ok=True)
            (folder / f"references/part-{each}.md").write_text(f"# Part {each}\n" * 60)
        sign_folder(folder, top / "key.pem")
        files = read_tree(folder)
        locked[f"lab{number % 10}/skill-{number}"] = LockedSkill("./x", digest=tree_digest_of(files), files=files)
    for path in (top / "bundle").rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    lock = lock_of(top / "bundle")
    lock.write_text(skills_text(lock, locked))
    return make_anchor("publisher", key=top / "key.pub")


def discover(top: Path, policy: TrustPolicy, index: Path | None) -> float:
    """Return the processor seconds of one cold discovery with a judge of its own: a busy machine adds none to them."""
    if index is not None:
        shutil.rmtree(index, ignore_errors=True)
    gc.collect()
    begin = time.process_time()
    judge = judge_of(SkillsDescriptor(), top / "bundle", top / "state", usual=policy, cache=top / "cache")
    registry = SkillRegistry(
        [SkillRoot("bundle://skills", top / "bundle/skills", "skills", "bundle")], index_dir=index, judge=judge
    )
    snapshot = registry.snapshot()
    seconds = time.process_time() - begin
    assert snapshot.skills, "a benchmark of no skills"
    assert not snapshot.invalid
    return seconds


def measure(count: int, rounds: int) -> int:
    """Print what the strictest policy costs cold discovery."""
    ratios = []
    for usual in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            top = Path(folder)
            TrustAnchors(top / "state").add(write_skills(top, count, usual=usual))
            first = discover(top, STRICTEST, None)
            print(
                f"cold discovery of {count} {'usual' if usual else 'smallest'} skills; {first:.2f} s with nothing kept"
            )
            for index in (top / "index", None):
                pairs = [(discover(top, TrustPolicy(), index), discover(top, STRICTEST, index)) for _ in range(rounds)]
                ratio = statistics.median(on / off for off, on in pairs)
                off, on = (statistics.median(each) for each in zip(*pairs, strict=True))
                words = "no index" if index is None else "index written"
                print(f"  {words:13} without a policy {off:.3f} s, with {on:.3f} s: ratio {ratio:.2f} (at most {MOST})")
                ratios.append(ratio)
    return 0 if max(ratios) <= MOST else 1


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--discovery", action="store_true")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    words = parser.parse_args()
    if words.discovery:
        return measure(words.count, words.rounds)
    if words.folder is None or (words.key is None) == (words.certificate is None):
        parser.error("a folder, and either --certificate or --key; or --discovery")
    option = "key" if words.certificate is None else "certificate"
    return compare(words.folder, option, words.key or words.certificate)


if __name__ == "__main__":
    sys.exit(main())
