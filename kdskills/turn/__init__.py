"""The skills in force for a turn: SkillsSubsystem, SkillView, the context variable and its facade."""
