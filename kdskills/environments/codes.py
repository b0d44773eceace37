"""What can go wrong with an environment: one error, and what each of its codes means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kdskills.errors import OperatorMustAct

ENVIRONMENT_CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "environment_advisories_invalid": "The file of advisories is not one in the OSV format, or too large.",
        "environment_build_failed": "A source distribution cannot be built behind the wall; the message has the end of what was said.",
        "environment_conflict": "Two requirements exclude each other; the message has both sides.",
        "environment_hash_mismatch": "A file is not the one that was locked, or not one the requirement's hashes allow.",
        "environment_index_unreachable": "The index, or a file of it, does not answer, answers with an error, or is too slow.",
        "environment_invalid": "A requirement is not one by PEP 508, or names a file or address.",
        "environment_lock_invalid": "`kdskills.lock` cannot be read, or an entry of it is not one.",
        "environment_lock_missing": "Nothing is locked for the skill or script: `kdskills env lock`.",
        "environment_lock_stale": "What is locked is not what is asked for today: `kdskills env lock`.",
        "environment_missing": "It is locked and not built: `kdskills env build`.",
        "environment_no_space": "The disk of the cache is full.",
        "environment_off": "The setting `environments` is `off`.",
        "environment_package_refused": "A package of Node breaks a rule of archives; `details` has `file` and `reason`.",
        "environment_platform": "The Python or platform here is not one the requirement or the locked files are for.",
        "environment_source_only": "There is only a source distribution, and those are built with `--allow-source` alone.",
        "environment_unavailable": "There is no such package or version, or no wheel of it for this Python and platform.",
        "environment_wheel_refused": "A wheel breaks a rule of archives or of wheels; `details` has `file` and `reason`.",
    }
)


class EnvironmentFailed(OperatorMustAct, code="environment_unavailable"):
    """Packages that a script needs cannot be resolved, locked, built or found; codes are in `docs/reference/environments.md`."""


_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")


def without_credentials(text: str) -> str:
    """Return *text* with user names and passwords of its addresses left out."""
    return _CREDENTIALS.sub("", text)
