"""Hand a global back as the result's value."""

import kdskills_runtime

kdskills_runtime.report({"given": GIVEN, "twice": len(GIVEN) * 2})
