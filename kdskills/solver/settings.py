"""How far a turn may go, and who answers which role."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from kdskills.models import ModelProvider
from kdskills.session.config import ScriptEnv

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class SolverSettings(BaseModel):
    """Bounds and choices of a solver's turns; times in seconds.

    Attributes:
        max_steps: Model calls for decisions; then one last call without tools.
        max_tool_calls: Tool calls of a turn.
        max_parallel: Calls of one reply that run at once.
        max_total_tokens: Tokens of all model calls of a turn, input and output.
        wall_s: Time a turn may take.
        tool_timeout_s: Time one tool call may take.
        model_timeout_s: Time one model call may take.
        model_retries: Further tries after a failure that may pass.
        models: Provider or model string by role; other roles use the decision model.
        skills_form: Which text of a skill generators get: `full` or `compact`.
        on_unknown_sid: What happens to a citation of no known source: `flag`, `retry` once, or `drop`.
        answer_role: The generator that writes the answer, or None: the decision model's own text is the answer.
        check_answers: Whether an answer that reports files which are not there is sent back once, and then `unverified`.
        final_call: Whether a turn out of steps or calls is given one last call without tools.
        run_scripts: None: exactly when the executor isolates; True asks for scripts without isolation; False: never.
        base_text: The bundle's or application's own text between rules and catalog.
        model_settings: Passed to the provider, such as `{"temperature": 0}`.
        secrets: Values masked as `***` in events, transcripts and results.
        script_env: Gives the variables of a skill's scripts; their values are masked likewise.
        work_dir: Where turn folders are made; None: the system's folder for temporary files. They are kept.
        transcripts: Folder that gets a `<turn id>.jsonl` for each turn, or None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    max_steps: Count = 24
    max_tool_calls: Count = 96
    max_parallel: Count = 8
    max_total_tokens: Count = 400_000
    wall_s: Seconds = 900.0
    tool_timeout_s: Seconds = 120.0
    model_timeout_s: Seconds = 120.0
    model_retries: Annotated[int, Field(ge=0)] = 4
    models: dict[str, str | ModelProvider] = Field(default_factory=dict)
    skills_form: Literal["full", "compact"] = "full"
    on_unknown_sid: Literal["flag", "retry", "drop"] = "flag"
    answer_role: str | None = None
    check_answers: bool = True
    final_call: bool = True
    run_scripts: bool | None = None
    base_text: str = ""
    model_settings: dict[str, Any] = Field(default_factory=dict)
    secrets: tuple[SecretStr, ...] = ()
    script_env: ScriptEnv | None = None
    work_dir: Path | None = None
    transcripts: Path | None = None

    def secret_values(self) -> tuple[str, ...]:
        """Return what is masked from the start: the secrets, and the values of headers sent to providers."""
        headers = self.model_settings.get("extra_headers")
        sent = headers.values() if isinstance(headers, Mapping) else ()
        return (*(secret.get_secret_value() for secret in self.secrets), *map(str, sent))
