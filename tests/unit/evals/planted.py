"""A model that answers each prompt as it was planted, and evaluations to plant answers for."""

from __future__ import annotations

from kdskills.evals.files import Eval
from kdskills.models import ModelReply, ModelRequest, TextDelta, Usage
from kdskills.testing.models import call, say


class PlantedModel:
    """Answers by the prompt and by how often it has decided about it: a reply, an error, or a function of the request."""

    name = "planted:model"
    context_window = None
    replayed = False

    def __init__(self, planted):
        self.planted, self.requests, self.closed = planted, [], 0

    async def reply(self, request: ModelRequest) -> ModelReply:
        self.requests.append(request)
        prompt = next(each.text for each in request.messages if each.text in self.planted)
        planted = self.planted[prompt][sum(each.role == "assistant" for each in request.messages)]
        if callable(planted):
            planted = planted(request)
        if isinstance(planted, Exception):
            raise planted
        return planted

    async def stream(self, request):
        reply = await self.reply(request)
        yield TextDelta(reply.text)
        yield reply

    async def aclose(self):
        self.closed += 1

    def asked(self, prompt):
        """How often the model decided about a prompt."""
        return sum(any(each.text == prompt for each in request.messages) for request in self.requests)


def load(name: str) -> ModelReply:
    """A reply that loads a skill and costs 110 tokens."""
    return call("skills_load", names=[name])


def answer(text: str = "done", tokens: int = 110) -> ModelReply:
    """A reply of text alone that costs so many tokens."""
    return say(text, usage=Usage(tokens - 10, 10))


def evaluation(name: str, skill: str | None = "acme.sales", **facts: object) -> Eval:
    """An evaluation whose prompt is its id."""
    return Eval(id=name, prompt=f"prompt {name}", skill=skill, **facts)


def quoted(text):
    """A judge's yes, with its evidence."""
    return call("final_answer", passed=True, evidence=text)
