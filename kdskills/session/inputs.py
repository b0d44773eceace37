"""Arguments of the four tools: pydantic models, their JSON Schemas and problems as JSON pointers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from kdskills.errors import ToolCallRefused
from kdskills.models import ToolSpec
from kdskills.session.codes import invalid

MAX_ENUM: Final = 250

_Text = WithJsonSchema({"type": "string"})
_Seconds = WithJsonSchema({"type": "number", "exclusiveMinimum": 0})


class _Input(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoadInput(_Input):
    """Arguments of `skills.load`."""

    names: list[str] = Field(
        description="Names or ids of the skills to load, in the order they should apply.", min_length=1, max_length=64
    )
    mode: Annotated[
        Literal["replace", "add", ""] | None, WithJsonSchema({"type": "string", "enum": ["replace", "add"]})
    ] = Field(
        "replace",
        description="replace: only these skills are loaded afterwards. add: they come after the ones already loaded.",
    )


class UnloadInput(_Input):
    """Arguments of `skills.unload`."""

    names: list[str] = Field(default_factory=list, description="Names or ids of the skills to unload.", max_length=64)
    all: bool = Field(False, description="Unload every skill; wins over names.")


class ReadInput(_Input):
    """Arguments of `skills.read`."""

    path: str = Field(description="File to read, relative to the skill's folder, such as references/guide.md.")
    skill: Annotated[str | None, _Text] = Field(None, description="A loaded skill; the one loaded last when omitted.")
    encoding: Literal["text", "binary"] = Field("text", description="text for UTF-8 text, binary for bytes as base64.")
    offset: int = Field(0, ge=0, description="Where to begin: characters of text, bytes of binary.")


class RunScriptInput(_Input):
    """Arguments of `skills.run_script`."""

    path: str = Field(description="Script to run, relative to the skill's folder; it begins with scripts/.")
    skill: Annotated[str | None, _Text] = Field(None, description="A loaded skill; the one loaded last when omitted.")
    args: list[str] = Field(default_factory=list, description="Arguments of the script; no shell reads them.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the script.")
    workdir: str = Field(
        ".",
        description="Where to start: a folder of the skill, or turn: and a folder of the user's files, such as turn:. for their top.",
    )
    timeout_s: Annotated[float | None, _Seconds] = Field(
        None, description="Seconds the script may take.", gt=0, allow_inf_nan=False
    )


INPUTS: Final[Mapping[str, type[_Input]]] = MappingProxyType(
    {
        "skills.load": LoadInput,
        "skills.unload": UnloadInput,
        "skills.read": ReadInput,
        "skills.run_script": RunScriptInput,
    }
)
"""The four tools by dotted id, in the order they are offered."""

DESCRIPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "skills.load": "Load skills so that their instructions apply from the next step on.",
        "skills.unload": "Unload skills whose instructions are no longer needed.",
        "skills.read": "Read a file of a loaded skill.",
        "skills.run_script": "Run a script of a loaded skill in isolation and return its output.",
    }
)

I = TypeVar("I", bound=_Input)  # noqa: E741 - the one input model a call parses into


def parse(model: type[I], arguments: Mapping[str, Any] | str) -> I:
    """Return *arguments* as *model*.

    Args:
        model: One of `INPUTS`.
        arguments: A mapping, or JSON text as a model wrote it.

    Raises:
        ToolCallRefused: `invalid_argument` with one JSON pointer and problem per finding.
    """
    try:
        return model.model_validate_json(arguments) if isinstance(arguments, str) else model.model_validate(arguments)
    except ValidationError as error:
        raise _problems(error) from None


def _problems(error: ValidationError) -> ToolCallRefused:
    problems = [(pointer(item["loc"]), item["msg"]) for item in error.errors(include_url=False, include_input=False)]
    summary = "; ".join(f"{path or 'the arguments'}: {problem}" for path, problem in problems[:5])
    return invalid(f"invalid arguments: {summary}", *problems)


def pointer(loc: Sequence[int | str]) -> str:
    """Return a JSON pointer; `""` is the whole object."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in loc)


def schema(tool_id: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments.

    Every object says `additionalProperties: false`; there is no `$ref`, `anyOf` or null. With 1 to 250 *names* the
    skill fields carry them as an `enum`: it guides, the gate decides.
    """
    raw = json.loads(_schema_text(tool_id))
    properties = {name: _plain(field) for name, field in raw["properties"].items()}
    if 0 < len(names) <= MAX_ENUM:
        if "names" in properties:
            properties["names"] = {**properties["names"], "items": {"type": "string", "enum": list(names)}}
        if "skill" in properties:
            properties["skill"] = {**properties["skill"], "enum": list(names)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(raw.get("required", ())),
        "additionalProperties": False,
    }


@cache
def _schema_text(tool_id: str) -> str:
    """Return the schema of a tool without names: text, so that no caller can change another's."""
    return json.dumps(INPUTS[tool_id].model_json_schema())


def _plain(field: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in field.items() if key != "title" and not (key == "default" and value is None)}


def safe_name(tool_id: str) -> str:
    """Return the spelling of *tool_id* every model API takes: `skills.load` becomes `skills_load`."""
    return tool_id.replace(".", "_")


def specs(tools: Sequence[str], names: Sequence[str], style: str = "safe") -> tuple[ToolSpec, ...]:
    """Return the specs of *tools* in the given order and spelling (`safe` or `dotted`)."""
    return tuple(
        ToolSpec(
            name=safe_name(tool) if style == "safe" else tool,
            description=DESCRIPTIONS[tool],
            input_schema=schema(tool, names),
            tool_id=tool,
        )
        for tool in tools
    )
