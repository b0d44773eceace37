"""What is said to a model and what it answers, independent of any provider.

`messages` holds the frozen values (messages, tool calls, tool specs, requests, replies); `provider` the
`ModelProvider` protocol that shipped and foreign providers implement; `names` the model strings; `cassette` the form
of recorded replies. Nothing here talks to a network.
"""

from kdskills.models.messages import Message, ModelReply, ModelRequest, ToolCall, ToolSpec, Usage
from kdskills.models.names import ModelAddress, ModelFactory, open_model, parse_address, split_name
from kdskills.models.provider import ModelProvider, TextDelta
from kdskills.models.redact import Redactor

__all__ = [
    "Message",
    "ModelAddress",
    "ModelFactory",
    "ModelProvider",
    "ModelReply",
    "ModelRequest",
    "Redactor",
    "TextDelta",
    "ToolCall",
    "ToolSpec",
    "Usage",
    "open_model",
    "parse_address",
    "split_name",
]
