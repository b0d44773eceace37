"""Which skills this bundle has, and which of its agents may use which."""

CUSTOM_SKILLS_ROOT = "skills"

AGENTS_CONFIG = {
    # A deny layer over everybody, consumers not listed here included.
    "*": {"disabled": ["press.draft-*"]},
    # Decides and acts: everything but what the desk has put under embargo.
    "solver.react.decision": {"enabled": ["data.*", "press.*"], "disabled": ["press.embargo"]},
    # Writes the answer: may follow the writing skills and read the data set's guide, runs nothing.
    "answer.generator.strong": {"enabled": ["press.brief", "press.style", "data.flights"]},
    # Writes Python for the sandbox: data skills only.
    "solver.codegen": {"enabled": ["data.*"]},
    # The human desk sees all of it.
    "desk.editor": {},
}
