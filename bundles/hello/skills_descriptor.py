"""The smallest useful bundle: one skill, and one rule about who may use it."""

CUSTOM_SKILLS_ROOT = "skills"

AGENTS_CONFIG = {
    "solver.react.decision": {"enabled": ["hello"]},
}
