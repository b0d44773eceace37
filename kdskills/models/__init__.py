"""What is said to a model and what it answers, independent of any provider.

`messages` holds the frozen values (messages, tool calls, tool specs, requests, replies); `provider` the
`ModelProvider` protocol that shipped and foreign providers implement. Nothing here talks to a network.
"""

from kdskills.models.messages import Message, ModelReply, ModelRequest, ToolCall, ToolSpec, Usage
from kdskills.models.provider import ModelProvider, TextDelta

__all__ = ["Message", "ModelProvider", "ModelReply", "ModelRequest", "TextDelta", "ToolCall", "ToolSpec", "Usage"]
