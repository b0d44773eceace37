"""The `kdskills` command: every command of it, in the order of its help.

Commands that run one operation are rows of `commands`; the others, which follow work, run it or open other doors, are
functions of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import typer

from kdskills.doors.cli import access, chat, commands, evals, jobs, packages, programs, supply, turn_commands
from kdskills.doors.cli.derived import HostSource

if TYPE_CHECKING:
    from kdskills.app import Host


#: Commands that are no rows, between the two lists that are.
own_commands = typer.Typer()
own_commands.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    programs.bench
)
own_commands.command("chat")(chat.chat)
own_commands.command("logs")(jobs.logs)
own_commands.command("run-script", context_settings=programs.AS_WRITTEN)(programs.run_script)
own_commands.command("tool")(programs.tool)
own_commands.command("worker")(programs.worker)

doors_commands = typer.Typer()
doors_commands.command("serve")(programs.serve)
doors_commands.command("ui")(programs.ui)
packages.env.command("shell")(programs.shell)
commands.mcp.callback(invoke_without_command=True)(programs.mcp)
commands.mcp.command("config")(programs.mcp_config)

LISTS: Final = (commands.skill_commands, supply.app, own_commands, commands.installation_commands, doors_commands)
GROUPS: Final = {
    "jobs": jobs.app,
    "turn": turn_commands.turn,
    "conversation": commands.conversation,
    "codex": commands.codex,
    "image": commands.image,
    "env": packages.env,
    "eval": evals.app,
    "trust": supply.trust,
    "mcp": commands.mcp,
    "token": access.token,
    "db": commands.db,
}


def build_cli(host: Host | None = None) -> typer.Typer:
    """Return a new application with the commands of *host*'s plugins; without one, commands make their own, and plugins add none."""
    cli = typer.Typer(
        name="kdskills",
        help="Agent Skills that can be trusted in production.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"obj": HostSource(host)},
    )
    cli.callback()(programs.version)
    cli.registered_commands = [command for commands_list in LISTS for command in commands_list.registered_commands]
    for name, group in GROUPS.items():
        cli.add_typer(group, name=name)
    if host is not None:
        host.answers.tell("kdskills_register_commands", cli=cli)
    return cli
