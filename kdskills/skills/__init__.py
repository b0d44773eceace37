"""Skills as files: model, parsing, companions, validation, roots, discovery, registry, index and selection."""

from kdskills.skills.arguments import render_body as render_body
from kdskills.skills.model import ParsedSkill as ParsedSkill
from kdskills.skills.model import RenderedBody as RenderedBody
from kdskills.skills.model import Skill as Skill
from kdskills.skills.model import SkillArgument as SkillArgument
from kdskills.skills.model import SkillContent as SkillContent
from kdskills.skills.model import SkillTool as SkillTool
from kdskills.skills.model import Verdict as Verdict
from kdskills.skills.model import estimate_tokens as estimate_tokens
from kdskills.skills.parse import parse_skill as parse_skill
from kdskills.skills.parse import parse_skill_bytes as parse_skill_bytes
from kdskills.skills.registry import SkillRegistry as SkillRegistry
from kdskills.skills.roots import SkillRoot as SkillRoot
from kdskills.skills.roots import agent_skill_roots as agent_skill_roots
from kdskills.skills.snapshot import InvalidSkill as InvalidSkill
from kdskills.skills.snapshot import RefreshReport as RefreshReport
from kdskills.skills.snapshot import RootState as RootState
from kdskills.skills.snapshot import Snapshot as Snapshot
from kdskills.skills.validate import validate_skill as validate_skill
