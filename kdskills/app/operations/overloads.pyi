"""Made by `.ci/reference` from the table of operations: what `call` and `run` of a Host answer."""

from collections.abc import Mapping
from typing import Any, Literal, overload

from pydantic import BaseModel

from kdskills.app.operations.audit_log import AuditLogOut
from kdskills.app.operations.backups import BackupOutput, CheckDatabaseOutput
from kdskills.app.operations.checking import CheckOutput, FixOutput, NewOutput, PluginsOutput, SchemaOutput
from kdskills.app.operations.clients import (
    AcceptOut,
    NewTokenOut,
    ProbeOutput,
    PublishedOut,
    ReceiptsOutput,
    TokenOut,
    TokensOut,
)
from kdskills.app.operations.conversation import (
    ConversationExport,
    ConversationOut,
    ConversationsOut,
    ForgottenConversations,
    ToolAnswer,
    UndoneTurn,
)
from kdskills.app.operations.environments import EnvironmentsOutput, SuggestOutput
from kdskills.app.operations.eval_jobs import EvalStatusOutput, StartedEvalsOutput
from kdskills.app.operations.eval_results import EvalIterationOutput, EvalsOutput
from kdskills.app.operations.evals import AddEvalOutput, EvalOutput, ScriptEvalsOutput
from kdskills.app.operations.fleet import DrainOutput, EvictOutput, FleetOutput, MetricsOutput, QuotaOutput
from kdskills.app.operations.machine import DoctorOutput, ImageOutput, UpgradeOut
from kdskills.app.operations.matrix import MatrixOutput
from kdskills.app.operations.project_versions import DiffOutput, InspectOutput
from kdskills.app.operations.projects import (
    DeletedOut,
    PieceOut,
    ProjectOut,
    ProjectsOut,
    SkillOut,
    SkillsOut,
    UploadOut,
    VersionsOut,
)
from kdskills.app.operations.scripts import ScriptRunOutput, StartsOutput
from kdskills.app.operations.showing import ListOutput, RenderOutput, SearchOutput, ShowOutput, WhyOutput
from kdskills.app.operations.skill_files import SkillFileOutput, SkillFilesOutput
from kdskills.app.operations.skill_findings import FindingsOutput
from kdskills.app.operations.supply import (
    AnchorRow,
    AnchorsOutput,
    AuditOutput,
    PublishOut,
    SignOutput,
    SupplyOutput,
    VerifyOutput,
)
from kdskills.app.operations.table import Context, Emit
from kdskills.app.operations.turn_archive import TurnFileOut, TurnOutput, TurnPairOutput, TurnsOutput
from kdskills.app.operations.turn_runs import StartedTurn, StopTurnOutput, WatchedTurnOut
from kdskills.app.operations.turns import RunOutput as TurnsRunOutput
from kdskills.app.operations.turns import ShowTurnOutput
from kdskills.app.operations.work_again import RepeatedOutput
from kdskills.app.operations.work_follow import (
    ArtifactOutput,
    CancelOutput,
    JobList,
    JobSnapshot,
    LogsOutput,
    TaskList,
    TaskSnapshot,
)
from kdskills.app.operations.work_run import ActivateOutput, ServiceOutput, StartedJobOutput, StartedOutput
from kdskills.app.operations.work_run import RunOutput as WorkRunRunOutput

class OperationCalls:
    async def invoke(self, operation: str, arguments: Mapping[str, Any], context: Context) -> BaseModel: ...
    @overload
    async def call(
        self, operation: Literal["skills.check"], *, emit: Emit | None = None, **arguments: Any
    ) -> CheckOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.audit"], *, emit: Emit | None = None, **arguments: Any
    ) -> AuditOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.fix"], *, emit: Emit | None = None, **arguments: Any
    ) -> FixOutput: ...
    @overload
    async def call(
        self,
        operation: Literal["skills.add", "skills.remove", "skills.update", "skills.outdated", "skills.sync"],
        *,
        emit: Emit | None = None,
        **arguments: Any,
    ) -> SupplyOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.list"], *, emit: Emit | None = None, **arguments: Any
    ) -> ListOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.matrix"], *, emit: Emit | None = None, **arguments: Any
    ) -> MatrixOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.search"], *, emit: Emit | None = None, **arguments: Any
    ) -> SearchOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.show"], *, emit: Emit | None = None, **arguments: Any
    ) -> ShowOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.findings"], *, emit: Emit | None = None, **arguments: Any
    ) -> FindingsOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.files"], *, emit: Emit | None = None, **arguments: Any
    ) -> SkillFilesOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.file"], *, emit: Emit | None = None, **arguments: Any
    ) -> SkillFileOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.render"], *, emit: Emit | None = None, **arguments: Any
    ) -> RenderOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.why"], *, emit: Emit | None = None, **arguments: Any
    ) -> WhyOutput: ...
    @overload
    async def call(
        self, operation: Literal["solver.run"], *, emit: Emit | None = None, **arguments: Any
    ) -> TurnsRunOutput: ...
    @overload
    async def call(
        self, operation: Literal["turns.show"], *, emit: Emit | None = None, **arguments: Any
    ) -> ShowTurnOutput: ...
    @overload
    async def call(
        self, operation: Literal["turns.list"], *, emit: Emit | None = None, **arguments: Any
    ) -> TurnsOutput: ...
    @overload
    async def call(
        self, operation: Literal["turns.get"], *, emit: Emit | None = None, **arguments: Any
    ) -> TurnOutput: ...
    @overload
    async def call(
        self, operation: Literal["turns.file"], *, emit: Emit | None = None, **arguments: Any
    ) -> TurnFileOut: ...
    @overload
    async def call(
        self, operation: Literal["turns.compare"], *, emit: Emit | None = None, **arguments: Any
    ) -> TurnPairOutput: ...
    @overload
    async def call(
        self, operation: Literal["turns.start"], *, emit: Emit | None = None, **arguments: Any
    ) -> StartedTurn: ...
    @overload
    async def call(
        self, operation: Literal["turns.watch"], *, emit: Emit | None = None, **arguments: Any
    ) -> WatchedTurnOut: ...
    @overload
    async def call(
        self, operation: Literal["turns.stop"], *, emit: Emit | None = None, **arguments: Any
    ) -> StopTurnOutput: ...
    @overload
    async def call(
        self, operation: Literal["evals.add"], *, emit: Emit | None = None, **arguments: Any
    ) -> AddEvalOutput: ...
    @overload
    async def call(
        self,
        operation: Literal["evals.judge", "evals.report", "evals.run"],
        *,
        emit: Emit | None = None,
        **arguments: Any,
    ) -> EvalOutput: ...
    @overload
    async def call(
        self, operation: Literal["evals.list"], *, emit: Emit | None = None, **arguments: Any
    ) -> EvalsOutput: ...
    @overload
    async def call(
        self, operation: Literal["evals.get"], *, emit: Emit | None = None, **arguments: Any
    ) -> EvalIterationOutput: ...
    @overload
    async def call(
        self, operation: Literal["evals.start"], *, emit: Emit | None = None, **arguments: Any
    ) -> StartedEvalsOutput: ...
    @overload
    async def call(
        self, operation: Literal["evals.status"], *, emit: Emit | None = None, **arguments: Any
    ) -> EvalStatusOutput: ...
    @overload
    async def call(
        self,
        operation: Literal["evals.cancel", "skills.task_cancel", "skills.job_cancel"],
        *,
        emit: Emit | None = None,
        **arguments: Any,
    ) -> CancelOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.verify"], *, emit: Emit | None = None, **arguments: Any
    ) -> VerifyOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.sign"], *, emit: Emit | None = None, **arguments: Any
    ) -> SignOutput: ...
    @overload
    async def call(
        self, operation: Literal["trust.add", "trust.remove"], *, emit: Emit | None = None, **arguments: Any
    ) -> AnchorRow: ...
    @overload
    async def call(
        self, operation: Literal["trust.list"], *, emit: Emit | None = None, **arguments: Any
    ) -> AnchorsOutput: ...
    @overload
    async def call(
        self, operation: Literal["conversations.list"], *, emit: Emit | None = None, **arguments: Any
    ) -> ConversationsOut: ...
    @overload
    async def call(
        self, operation: Literal["conversations.get"], *, emit: Emit | None = None, **arguments: Any
    ) -> ConversationOut: ...
    @overload
    async def call(
        self, operation: Literal["conversations.export"], *, emit: Emit | None = None, **arguments: Any
    ) -> ConversationExport: ...
    @overload
    async def call(
        self, operation: Literal["conversations.undo"], *, emit: Emit | None = None, **arguments: Any
    ) -> UndoneTurn: ...
    @overload
    async def call(
        self, operation: Literal["conversations.delete"], *, emit: Emit | None = None, **arguments: Any
    ) -> ForgottenConversations: ...
    @overload
    async def call(
        self, operation: Literal["skills.publish"], *, emit: Emit | None = None, **arguments: Any
    ) -> PublishOut: ...
    @overload
    async def call(
        self, operation: Literal["doctor"], *, emit: Emit | None = None, **arguments: Any
    ) -> DoctorOutput: ...
    @overload
    async def call(
        self, operation: Literal["image.build"], *, emit: Emit | None = None, **arguments: Any
    ) -> ImageOutput: ...
    @overload
    async def call(
        self,
        operation: Literal[
            "environments.plan", "environments.lock", "environments.build", "environments.show", "environments.clean"
        ],
        *,
        emit: Emit | None = None,
        **arguments: Any,
    ) -> EnvironmentsOutput: ...
    @overload
    async def call(
        self, operation: Literal["environments.suggest"], *, emit: Emit | None = None, **arguments: Any
    ) -> SuggestOutput: ...
    @overload
    async def call(
        self, operation: Literal["scripts.run"], *, emit: Emit | None = None, **arguments: Any
    ) -> ScriptRunOutput: ...
    @overload
    async def call(
        self, operation: Literal["scripts.probe"], *, emit: Emit | None = None, **arguments: Any
    ) -> StartsOutput: ...
    @overload
    async def call(
        self, operation: Literal["evals.scripts"], *, emit: Emit | None = None, **arguments: Any
    ) -> ScriptEvalsOutput: ...
    @overload
    async def call(
        self,
        operation: Literal["skills.load", "skills.unload", "skills.read", "skills.run_script"],
        *,
        emit: Emit | None = None,
        **arguments: Any,
    ) -> ToolAnswer: ...
    @overload
    async def call(self, operation: Literal["new"], *, emit: Emit | None = None, **arguments: Any) -> NewOutput: ...
    @overload
    async def call(
        self, operation: Literal["schemas.show"], *, emit: Emit | None = None, **arguments: Any
    ) -> SchemaOutput: ...
    @overload
    async def call(
        self, operation: Literal["plugins"], *, emit: Emit | None = None, **arguments: Any
    ) -> PluginsOutput: ...
    @overload
    async def call(
        self, operation: Literal["projects.list"], *, emit: Emit | None = None, **arguments: Any
    ) -> ProjectsOut: ...
    @overload
    async def call(
        self, operation: Literal["projects.create"], *, emit: Emit | None = None, **arguments: Any
    ) -> ProjectOut: ...
    @overload
    async def call(
        self, operation: Literal["project_skills.upload"], *, emit: Emit | None = None, **arguments: Any
    ) -> UploadOut: ...
    @overload
    async def call(
        self, operation: Literal["project_skills.list"], *, emit: Emit | None = None, **arguments: Any
    ) -> SkillsOut: ...
    @overload
    async def call(
        self,
        operation: Literal["project_skills.get", "project_skills.patch", "project_skills.activate"],
        *,
        emit: Emit | None = None,
        **arguments: Any,
    ) -> SkillOut: ...
    @overload
    async def call(
        self, operation: Literal["project_skills.delete"], *, emit: Emit | None = None, **arguments: Any
    ) -> DeletedOut: ...
    @overload
    async def call(
        self, operation: Literal["project_skills.versions"], *, emit: Emit | None = None, **arguments: Any
    ) -> VersionsOut: ...
    @overload
    async def call(
        self,
        operation: Literal["project_skills.archive", "project_skills.file"],
        *,
        emit: Emit | None = None,
        **arguments: Any,
    ) -> PieceOut: ...
    @overload
    async def call(
        self, operation: Literal["project_skills.diff"], *, emit: Emit | None = None, **arguments: Any
    ) -> DiffOutput: ...
    @overload
    async def call(
        self, operation: Literal["project_skills.inspect"], *, emit: Emit | None = None, **arguments: Any
    ) -> InspectOutput: ...
    @overload
    async def call(
        self, operation: Literal["audit_log.list"], *, emit: Emit | None = None, **arguments: Any
    ) -> AuditLogOut: ...
    @overload
    async def call(
        self, operation: Literal["tokens.create"], *, emit: Emit | None = None, **arguments: Any
    ) -> NewTokenOut: ...
    @overload
    async def call(
        self, operation: Literal["tokens.list"], *, emit: Emit | None = None, **arguments: Any
    ) -> TokensOut: ...
    @overload
    async def call(
        self, operation: Literal["tokens.change", "tokens.revoke"], *, emit: Emit | None = None, **arguments: Any
    ) -> TokenOut: ...
    @overload
    async def call(
        self, operation: Literal["db.upgrade"], *, emit: Emit | None = None, **arguments: Any
    ) -> UpgradeOut: ...
    @overload
    async def call(
        self, operation: Literal["db.check"], *, emit: Emit | None = None, **arguments: Any
    ) -> CheckDatabaseOutput: ...
    @overload
    async def call(
        self, operation: Literal["backup.create", "backup.restore"], *, emit: Emit | None = None, **arguments: Any
    ) -> BackupOutput: ...
    @overload
    async def call(
        self, operation: Literal["fleet.show"], *, emit: Emit | None = None, **arguments: Any
    ) -> FleetOutput: ...
    @overload
    async def call(
        self, operation: Literal["quota.show"], *, emit: Emit | None = None, **arguments: Any
    ) -> QuotaOutput: ...
    @overload
    async def call(
        self, operation: Literal["fleet.drain", "fleet.undrain"], *, emit: Emit | None = None, **arguments: Any
    ) -> DrainOutput: ...
    @overload
    async def call(
        self, operation: Literal["fleet.evict"], *, emit: Emit | None = None, **arguments: Any
    ) -> EvictOutput: ...
    @overload
    async def call(
        self, operation: Literal["metrics.show"], *, emit: Emit | None = None, **arguments: Any
    ) -> MetricsOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.activate"], *, emit: Emit | None = None, **arguments: Any
    ) -> ActivateOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.run_cmd"], *, emit: Emit | None = None, **arguments: Any
    ) -> WorkRunRunOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.run_cmd_async"], *, emit: Emit | None = None, **arguments: Any
    ) -> StartedOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.run_service"], *, emit: Emit | None = None, **arguments: Any
    ) -> ServiceOutput: ...
    @overload
    async def call(
        self, operation: Literal["skills.start_job"], *, emit: Emit | None = None, **arguments: Any
    ) -> StartedJobOutput: ...
    @overload
    async def call(
        self, operation: Literal["tasks.again", "jobs.again"], *, emit: Emit | None = None, **arguments: Any
    ) -> RepeatedOutput: ...
    @overload
    async def call(
        self,
        operation: Literal["skills.task_status", "skills.task_watch"],
        *,
        emit: Emit | None = None,
        **arguments: Any,
    ) -> TaskSnapshot: ...
    @overload
    async def call(
        self, operation: Literal["skills.job_status", "skills.job_watch"], *, emit: Emit | None = None, **arguments: Any
    ) -> JobSnapshot: ...
    @overload
    async def call(
        self, operation: Literal["skills.task_logs"], *, emit: Emit | None = None, **arguments: Any
    ) -> LogsOutput: ...
    @overload
    async def call(
        self, operation: Literal["tasks.list"], *, emit: Emit | None = None, **arguments: Any
    ) -> TaskList: ...
    @overload
    async def call(self, operation: Literal["jobs.list"], *, emit: Emit | None = None, **arguments: Any) -> JobList: ...
    @overload
    async def call(
        self, operation: Literal["artifacts.get"], *, emit: Emit | None = None, **arguments: Any
    ) -> ArtifactOutput: ...
    @overload
    async def call(
        self, operation: Literal["mcp.published"], *, emit: Emit | None = None, **arguments: Any
    ) -> PublishedOut: ...
    @overload
    async def call(
        self, operation: Literal["mcp.accept"], *, emit: Emit | None = None, **arguments: Any
    ) -> AcceptOut: ...
    @overload
    async def call(
        self, operation: Literal["codex.probe"], *, emit: Emit | None = None, **arguments: Any
    ) -> ProbeOutput: ...
    @overload
    async def call(
        self, operation: Literal["codex.receipts"], *, emit: Emit | None = None, **arguments: Any
    ) -> ReceiptsOutput: ...
    @overload
    async def call(self, operation: str, *, emit: Emit | None = None, **arguments: Any) -> BaseModel: ...
    @overload
    def run(self, operation: Literal["skills.check"], **arguments: Any) -> CheckOutput: ...
    @overload
    def run(self, operation: Literal["skills.audit"], **arguments: Any) -> AuditOutput: ...
    @overload
    def run(self, operation: Literal["skills.fix"], **arguments: Any) -> FixOutput: ...
    @overload
    def run(
        self,
        operation: Literal["skills.add", "skills.remove", "skills.update", "skills.outdated", "skills.sync"],
        **arguments: Any,
    ) -> SupplyOutput: ...
    @overload
    def run(self, operation: Literal["skills.list"], **arguments: Any) -> ListOutput: ...
    @overload
    def run(self, operation: Literal["skills.matrix"], **arguments: Any) -> MatrixOutput: ...
    @overload
    def run(self, operation: Literal["skills.search"], **arguments: Any) -> SearchOutput: ...
    @overload
    def run(self, operation: Literal["skills.show"], **arguments: Any) -> ShowOutput: ...
    @overload
    def run(self, operation: Literal["skills.findings"], **arguments: Any) -> FindingsOutput: ...
    @overload
    def run(self, operation: Literal["skills.files"], **arguments: Any) -> SkillFilesOutput: ...
    @overload
    def run(self, operation: Literal["skills.file"], **arguments: Any) -> SkillFileOutput: ...
    @overload
    def run(self, operation: Literal["skills.render"], **arguments: Any) -> RenderOutput: ...
    @overload
    def run(self, operation: Literal["skills.why"], **arguments: Any) -> WhyOutput: ...
    @overload
    def run(self, operation: Literal["solver.run"], **arguments: Any) -> TurnsRunOutput: ...
    @overload
    def run(self, operation: Literal["turns.show"], **arguments: Any) -> ShowTurnOutput: ...
    @overload
    def run(self, operation: Literal["turns.list"], **arguments: Any) -> TurnsOutput: ...
    @overload
    def run(self, operation: Literal["turns.get"], **arguments: Any) -> TurnOutput: ...
    @overload
    def run(self, operation: Literal["turns.file"], **arguments: Any) -> TurnFileOut: ...
    @overload
    def run(self, operation: Literal["turns.compare"], **arguments: Any) -> TurnPairOutput: ...
    @overload
    def run(self, operation: Literal["turns.start"], **arguments: Any) -> StartedTurn: ...
    @overload
    def run(self, operation: Literal["turns.watch"], **arguments: Any) -> WatchedTurnOut: ...
    @overload
    def run(self, operation: Literal["turns.stop"], **arguments: Any) -> StopTurnOutput: ...
    @overload
    def run(self, operation: Literal["evals.add"], **arguments: Any) -> AddEvalOutput: ...
    @overload
    def run(self, operation: Literal["evals.judge", "evals.report", "evals.run"], **arguments: Any) -> EvalOutput: ...
    @overload
    def run(self, operation: Literal["evals.list"], **arguments: Any) -> EvalsOutput: ...
    @overload
    def run(self, operation: Literal["evals.get"], **arguments: Any) -> EvalIterationOutput: ...
    @overload
    def run(self, operation: Literal["evals.start"], **arguments: Any) -> StartedEvalsOutput: ...
    @overload
    def run(self, operation: Literal["evals.status"], **arguments: Any) -> EvalStatusOutput: ...
    @overload
    def run(
        self, operation: Literal["evals.cancel", "skills.task_cancel", "skills.job_cancel"], **arguments: Any
    ) -> CancelOutput: ...
    @overload
    def run(self, operation: Literal["skills.verify"], **arguments: Any) -> VerifyOutput: ...
    @overload
    def run(self, operation: Literal["skills.sign"], **arguments: Any) -> SignOutput: ...
    @overload
    def run(self, operation: Literal["trust.add", "trust.remove"], **arguments: Any) -> AnchorRow: ...
    @overload
    def run(self, operation: Literal["trust.list"], **arguments: Any) -> AnchorsOutput: ...
    @overload
    def run(self, operation: Literal["conversations.list"], **arguments: Any) -> ConversationsOut: ...
    @overload
    def run(self, operation: Literal["conversations.get"], **arguments: Any) -> ConversationOut: ...
    @overload
    def run(self, operation: Literal["conversations.export"], **arguments: Any) -> ConversationExport: ...
    @overload
    def run(self, operation: Literal["conversations.undo"], **arguments: Any) -> UndoneTurn: ...
    @overload
    def run(self, operation: Literal["conversations.delete"], **arguments: Any) -> ForgottenConversations: ...
    @overload
    def run(self, operation: Literal["skills.publish"], **arguments: Any) -> PublishOut: ...
    @overload
    def run(self, operation: Literal["doctor"], **arguments: Any) -> DoctorOutput: ...
    @overload
    def run(self, operation: Literal["image.build"], **arguments: Any) -> ImageOutput: ...
    @overload
    def run(
        self,
        operation: Literal[
            "environments.plan", "environments.lock", "environments.build", "environments.show", "environments.clean"
        ],
        **arguments: Any,
    ) -> EnvironmentsOutput: ...
    @overload
    def run(self, operation: Literal["environments.suggest"], **arguments: Any) -> SuggestOutput: ...
    @overload
    def run(self, operation: Literal["scripts.run"], **arguments: Any) -> ScriptRunOutput: ...
    @overload
    def run(self, operation: Literal["scripts.probe"], **arguments: Any) -> StartsOutput: ...
    @overload
    def run(self, operation: Literal["evals.scripts"], **arguments: Any) -> ScriptEvalsOutput: ...
    @overload
    def run(
        self, operation: Literal["skills.load", "skills.unload", "skills.read", "skills.run_script"], **arguments: Any
    ) -> ToolAnswer: ...
    @overload
    def run(self, operation: Literal["new"], **arguments: Any) -> NewOutput: ...
    @overload
    def run(self, operation: Literal["schemas.show"], **arguments: Any) -> SchemaOutput: ...
    @overload
    def run(self, operation: Literal["plugins"], **arguments: Any) -> PluginsOutput: ...
    @overload
    def run(self, operation: Literal["projects.list"], **arguments: Any) -> ProjectsOut: ...
    @overload
    def run(self, operation: Literal["projects.create"], **arguments: Any) -> ProjectOut: ...
    @overload
    def run(self, operation: Literal["project_skills.upload"], **arguments: Any) -> UploadOut: ...
    @overload
    def run(self, operation: Literal["project_skills.list"], **arguments: Any) -> SkillsOut: ...
    @overload
    def run(
        self,
        operation: Literal["project_skills.get", "project_skills.patch", "project_skills.activate"],
        **arguments: Any,
    ) -> SkillOut: ...
    @overload
    def run(self, operation: Literal["project_skills.delete"], **arguments: Any) -> DeletedOut: ...
    @overload
    def run(self, operation: Literal["project_skills.versions"], **arguments: Any) -> VersionsOut: ...
    @overload
    def run(
        self, operation: Literal["project_skills.archive", "project_skills.file"], **arguments: Any
    ) -> PieceOut: ...
    @overload
    def run(self, operation: Literal["project_skills.diff"], **arguments: Any) -> DiffOutput: ...
    @overload
    def run(self, operation: Literal["project_skills.inspect"], **arguments: Any) -> InspectOutput: ...
    @overload
    def run(self, operation: Literal["audit_log.list"], **arguments: Any) -> AuditLogOut: ...
    @overload
    def run(self, operation: Literal["tokens.create"], **arguments: Any) -> NewTokenOut: ...
    @overload
    def run(self, operation: Literal["tokens.list"], **arguments: Any) -> TokensOut: ...
    @overload
    def run(self, operation: Literal["tokens.change", "tokens.revoke"], **arguments: Any) -> TokenOut: ...
    @overload
    def run(self, operation: Literal["db.upgrade"], **arguments: Any) -> UpgradeOut: ...
    @overload
    def run(self, operation: Literal["db.check"], **arguments: Any) -> CheckDatabaseOutput: ...
    @overload
    def run(self, operation: Literal["backup.create", "backup.restore"], **arguments: Any) -> BackupOutput: ...
    @overload
    def run(self, operation: Literal["fleet.show"], **arguments: Any) -> FleetOutput: ...
    @overload
    def run(self, operation: Literal["quota.show"], **arguments: Any) -> QuotaOutput: ...
    @overload
    def run(self, operation: Literal["fleet.drain", "fleet.undrain"], **arguments: Any) -> DrainOutput: ...
    @overload
    def run(self, operation: Literal["fleet.evict"], **arguments: Any) -> EvictOutput: ...
    @overload
    def run(self, operation: Literal["metrics.show"], **arguments: Any) -> MetricsOutput: ...
    @overload
    def run(self, operation: Literal["skills.activate"], **arguments: Any) -> ActivateOutput: ...
    @overload
    def run(self, operation: Literal["skills.run_cmd"], **arguments: Any) -> WorkRunRunOutput: ...
    @overload
    def run(self, operation: Literal["skills.run_cmd_async"], **arguments: Any) -> StartedOutput: ...
    @overload
    def run(self, operation: Literal["skills.run_service"], **arguments: Any) -> ServiceOutput: ...
    @overload
    def run(self, operation: Literal["skills.start_job"], **arguments: Any) -> StartedJobOutput: ...
    @overload
    def run(self, operation: Literal["tasks.again", "jobs.again"], **arguments: Any) -> RepeatedOutput: ...
    @overload
    def run(self, operation: Literal["skills.task_status", "skills.task_watch"], **arguments: Any) -> TaskSnapshot: ...
    @overload
    def run(self, operation: Literal["skills.job_status", "skills.job_watch"], **arguments: Any) -> JobSnapshot: ...
    @overload
    def run(self, operation: Literal["skills.task_logs"], **arguments: Any) -> LogsOutput: ...
    @overload
    def run(self, operation: Literal["tasks.list"], **arguments: Any) -> TaskList: ...
    @overload
    def run(self, operation: Literal["jobs.list"], **arguments: Any) -> JobList: ...
    @overload
    def run(self, operation: Literal["artifacts.get"], **arguments: Any) -> ArtifactOutput: ...
    @overload
    def run(self, operation: Literal["mcp.published"], **arguments: Any) -> PublishedOut: ...
    @overload
    def run(self, operation: Literal["mcp.accept"], **arguments: Any) -> AcceptOut: ...
    @overload
    def run(self, operation: Literal["codex.probe"], **arguments: Any) -> ProbeOutput: ...
    @overload
    def run(self, operation: Literal["codex.receipts"], **arguments: Any) -> ReceiptsOutput: ...
    @overload
    def run(self, operation: str, **arguments: Any) -> BaseModel: ...
