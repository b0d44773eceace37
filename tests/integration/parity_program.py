"""Everything the skills in force here answer: run in process, and as generated code in every engine."""

import hashlib

import kdskills
from kdskills.turn import get_active_view


def outcome(answer):
    """Return a grant or refusal as plain values."""
    if isinstance(answer, kdskills.Granted):
        return ["granted", answer.full_id, answer.skill.body[:200], answer.skill.digest]
    return ["refused", answer.code, answer.full_id]


QUESTIONS = ("", "write a brief for the press", "who is it for, and what is new?", "the walrus eats at noon")


def found(result):
    """Return an answer as plain values."""
    hits = [[hit.full_id, hit.short_id, hit.name, hit.score, dict(hit.why)] for hit in result.hits]
    return [hits, result.total, result.more, result.abstained]


def answers(refs):
    """Return what can be seen and had here, as JSON."""
    view = get_active_view()
    assert kdskills.get_active_skills_subsystem() is not None
    block = kdskills.build_skills_instruction_block(refs)
    compact = kdskills.build_skills_instruction_block(refs, variant="compact")
    closure = view.closure(refs)
    return {
        "skills": sorted(view.skills),
        "listed": sorted(view.listed),
        "short_ids": dict(view.short_ids),
        "names": dict(view.names),
        "digest": view.digest,
        "resolve": {
            f"{by}:{ref}": outcome(view.resolve(ref, by=by)) for ref in refs for by in ("model", "user", "code")
        },
        "order": [skill if isinstance(skill, str) else skill.full_id for skill in closure.order],
        "refused": [[item.code, item.ref] for item in closure.refused],
        "facade": {ref: kdskills.resolve_skill_ref(ref) for ref in refs},
        "import": list(kdskills.import_skillset(refs)),
        "catalog": str(kdskills.skills_gallery_text(consumer=view.consumer)),
        "block": hashlib.sha256(block.encode()).hexdigest(),
        "block_text": str(block),
        "compact": str(compact),
        "search": {question: found(view.search(question)) for question in QUESTIONS},
        "trees": {skill.full_id: skill.tree_digest() for skill in map(view.skills.get, sorted(view.skills))},
    }


if __name__ == "__main__":
    import kdskills_runtime

    kdskills_runtime.report(answers(REFS))  # noqa: F821 - a contract global
