"""Typed answers: a type as the JSON Schema a model is shown, and what a model gives as a value of that type.

How a model is held to it is its provider's to say (`output_mode`): by the provider's own mode, by a call of the tool
`final_answer`, or by words alone. Whichever it is, an object in the text of an answer is read, too.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from kdskills.errors import BadRequest, ToolCallRefused
from kdskills.models import OutputMode, ToolSpec, finite_number, parse_object
from kdskills.models.schemas import schema_fault, value_faults
from kdskills.session.tools import pointer

T = TypeVar("T")

OUTPUT_TOOL: Final = "final_answer"
OutputType = type[Any] | Mapping[str, Any]
"""What an answer may be asked to be: a pydantic model, a dataclass, or a JSON Schema of an object."""

MAX_SCHEMA: Final = 65_536
"""Characters a schema may take, as JSON: it is sent with every model call."""
MAX_PROBLEMS: Final = 20
_TRIES: Final = 64

_RULES: Final[Mapping[OutputMode, str]] = {
    "native": "",
    "tool": f"Give the final answer by calling {OUTPUT_TOOL}, alone, once the work is done. Text alone is no answer.",
    "text": "The final answer is one JSON object of this JSON Schema, and nothing around it:\n{schema}",
}
_AGAIN: Final[Mapping[OutputMode, str]] = {
    "native": "Answer again, with one JSON object of the schema.",
    "tool": f"Call {OUTPUT_TOOL} again, with arguments of its schema.",
    "text": "Answer again, with one JSON object of the schema and nothing around it.",
}


class OutputInvalid(ToolCallRefused, code="output_invalid"):
    """An answer is not of the type asked for; `details` has `errors` as `{path, problem}`, paths are JSON pointers."""


@dataclass(frozen=True)
class TypedAnswer(Generic[T]):
    """An answer of the type asked for: its value, the JSON it was read from, and that as text."""

    value: T
    json: dict[str, Any]
    text: str


@dataclass(frozen=True)
class OutputForm(Generic[T]):
    """The type of an answer; `validate` returns the value of a JSON object, or raises OutputInvalid."""

    schema: Mapping[str, Any]
    validate: Callable[[Mapping[str, Any]], T]

    def read(self, text: str, change: Callable[[Any], Any]) -> TypedAnswer[T]:
        """Return the answer in *text*, its JSON as *change* makes it. Raises OutputInvalid."""
        fields = change(object_in(text))
        value = self.validate(fields)
        return TypedAnswer(value, fields, json.dumps(fields, ensure_ascii=False, allow_nan=False))

    def tool(self) -> ToolSpec:
        """Return the tool whose arguments are the answer."""
        words = "Gives the final answer: its arguments are the answer. Call it alone, once the work is done."
        return ToolSpec(OUTPUT_TOOL, words, self.schema, OUTPUT_TOOL)

    def rule(self, mode: OutputMode) -> str:
        """Return what the model is told about its answer; nothing where its provider holds it to the schema."""
        return _RULES[mode].replace("{schema}", json.dumps(self.schema, ensure_ascii=False))


def again(mode: OutputMode, error: OutputInvalid) -> str:
    """Return the words that send an answer back."""
    rows = [f"- {row['path'] or 'the answer'}: {row['problem']}" for row in error.details["errors"]]
    return "\n".join([f"{_AGAIN[mode]} The answer is not of the type asked for:", *rows])


def output_form(output_type: OutputType, *, answer_role: str | None = None) -> OutputForm[Any]:
    """Return the form of a type. Raises BadRequest `output_type_invalid`: no answer of it can be had."""
    if answer_role is not None:
        raise _unusable("cannot be had of a generator: answer_role is set")
    if isinstance(output_type, Mapping):
        shown = {key: value for key, value in output_type.items() if key not in {"$schema", "$id"}}
        fault = schema_fault(shown, own_names=False)
        if fault is not None:
            raise _unusable(f"is no JSON Schema that can be used: {fault}")
        return OutputForm(_object_schema(shown), partial(_conforming, shown))
    if not (inspect.isclass(output_type) and (issubclass(output_type, BaseModel) or is_dataclass(output_type))):
        raise _unusable("is no pydantic model, no dataclass and no JSON Schema")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(output_type)
        schema = adapter.json_schema()
    except (PydanticUserError, RecursionError, NameError) as error:
        raise _unusable(f"has no JSON Schema: {str(error).splitlines()[0]}") from None
    root = schema.get("$ref", "")
    if root:  # of a type that stands within itself: a root must say that it is an object
        schema = {**schema["$defs"][root.rpartition("/")[2]], "$defs": schema["$defs"]}
    return OutputForm(_object_schema(schema), partial(_validated, adapter))


def _object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *schema*, if it is one of an object that is not too large. Raises BadRequest."""
    if schema.get("type") != "object":
        raise _unusable('must be an object: the root of its schema must have "type": "object"')
    size = len(json.dumps(schema, ensure_ascii=False))
    if size > MAX_SCHEMA:
        raise _unusable(f"has a schema of {size} characters; at most {MAX_SCHEMA} can be sent with each model call")
    return schema


def _unusable(problem: str) -> BadRequest:
    errors = [{"path": "/output_type", "problem": problem}]
    return BadRequest(f"the output type {problem}", code="output_type_invalid", errors=errors)


def _validated(adapter: TypeAdapter[T], fields: Mapping[str, Any]) -> T:
    try:
        return adapter.validate_json(json.dumps(fields))
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_input=False, include_context=False)
    raise _invalid([{"path": pointer(item["loc"]), "problem": item["msg"]} for item in mistakes[:MAX_PROBLEMS]])


def _conforming(schema: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    faults = value_faults(schema, fields, MAX_PROBLEMS)
    if faults:
        raise _invalid([{"path": pointer(path), "problem": problem} for path, problem in faults])
    return dict(fields)


def _invalid(rows: list[dict[str, str]]) -> OutputInvalid:
    summary = "; ".join(f"{row['path'] or 'the answer'}: {row['problem']}" for row in rows[:5])
    return OutputInvalid(summary, errors=rows)


def object_in(text: str) -> dict[str, Any]:
    """Return the first JSON object in *text*, whatever words or fences stand around it. Raises OutputInvalid."""
    decoder = json.JSONDecoder(parse_float=finite_number, parse_constant=finite_number)
    start, tries = text.find("{"), 0
    while start >= 0 and tries < _TRIES:
        tries += 1
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        fields = parse_object(text[start:end])
        if fields is None:
            raise _invalid([{"path": "", "problem": "is nested too deeply"}])
        return fields
    raise _invalid([{"path": "", "problem": "holds no JSON object"}])


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with *change* made to each text in it; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_texts(member, change) for key, member in value.items()}
    return [map_texts(member, change) for member in value] if isinstance(value, list) else value


def texts_of(value: Any) -> list[str]:
    """Return the texts in a JSON value, in order."""
    texts: list[str] = []

    def collected(text: str) -> str:
        texts.append(text)
        return text

    map_texts(value, collected)
    return texts
