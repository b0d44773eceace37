"""Operations of plugins: what they may be called, and which of all the console may call."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kdskills.errors import NameTaken, PluginInvalid
from kdskills.hooks import Register

if TYPE_CHECKING:
    from kdskills.app.operations.table import Operation

RESERVED: Final = ("skills.", "kd.")
NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}(\.[a-z][a-z0-9_]{0,62}){1,3}")


class OperationRegister(Register["Operation"]):
    """Takes operations of plugins; shipped names and reserved ones are not to be had, whatever order plugins come in."""

    def __init__(self) -> None:
        super().__init__("operation")

    def __call__(self, name: str, entry: Operation) -> None:
        """Add an operation.

        Raises:
            PluginInvalid: The name is none, or not the operation's own.
            NameTaken: `name_reserved`, or another plugin has it.
        """
        from kdskills.app.operations import OPERATIONS
        from kdskills.app.operations.table import Operation

        if not isinstance(entry, Operation):
            raise PluginInvalid(
                f"the operation {name!r} of plugin {self.plugin or 'unknown'} cannot be used: it is no Operation",
                plugin=self.plugin,
                kind=self.kind,
                name=str(name),
            )
        if not NAME.fullmatch(name) or name != entry.name:
            raise PluginInvalid(
                f"{name!r} is no name of an operation: words in lower case joined by dots, as in `acme.report`",
                plugin=name,
            )
        if name.startswith(RESERVED) or name in OPERATIONS:
            raise NameTaken(
                f"the operation {name!r} is kdskills' own, and so is all that begins with {' or '.join(RESERVED)}",
                code="name_reserved",
                name=name,
                kind=self.kind,
            )
        super().__call__(name, entry)
