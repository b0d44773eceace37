"""What the server does, measured on the emulator and on the real binary alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdskills.remote.labmodel import ModelFailure, call, say, texts_of, tool_outputs

OURS = frozenset({"ping", "quux", "shop.order", "a-b", "a_b", "old", "new"})


def outputs(bench) -> list[str]:
    """What the model read of calls, oldest first."""
    return list(tool_outputs(bench.model.requests[-1]).values())


def rewrite(path: Path, tools: object) -> None:
    """Put other tools into a rollout's first line."""
    head, _, rest = path.read_text("utf-8").partition("\n")
    line = json.loads(head)
    line["payload"]["dynamic_tools"] = tools
    path.write_text(json.dumps(line) + "\n" + rest, "utf-8")


class TestHandshake:
    """Before anything else."""

    def test_order(self, bench):
        """Nothing works before `initialize`, which works once; the user agent names the version."""
        wire = bench.wire(hello=False)
        assert wire.refused("thread/start") == (-32600, "Not initialized")
        agent = wire.hello()["userAgent"]
        assert agent.startswith("judge/0.169.0 ")
        assert wire.refused("initialize", clientInfo={"name": "x", "version": "1"}) == (-32600, "Already initialized")

    def test_tools_need_the_capability(self, bench, tool):
        """Without `experimentalApi` a start with tools is refused."""
        wire = bench.wire(hello=False)
        wire.hello(experimental=False)
        code, text = wire.refused("thread/start", dynamicTools=[tool("ping")], cwd=str(bench.home))
        assert (code, "experimentalApi" in text) == (-32600, True)

    def test_unknown_methods_and_fields(self, bench):
        """Unknown methods and missing fields are invalid requests."""
        wire = bench.wire()
        code, text = wire.refused("thread/nope")
        assert (code, "unknown variant `thread/nope`" in text) == (-32600, True)
        code, text = wire.refused("thread/read")
        assert (code, text) == (-32600, "Invalid request: missing field `threadId`")

    @pytest.mark.parametrize(
        ("method", "params"),
        [
            ("thread/read", [1]),
            ("turn/start", {"input": "text"}),
            ("turn/start", {"input": [1]}),
            ("turn/start", {"input": [{"type": "text"}]}),
            ("turn/start", {"input": [{"type": "text", "text": 5}]}),
            ("thread/inject_items", {"items": "x"}),
            ("thread/start", {"dynamicTools": "x"}),
            ("thread/start", {"dynamicTools": [1]}),
        ],
        ids=["list", "text", "number", "no-text", "no-string", "items", "tools", "tool"],
    )
    def test_ill_typed_parameters(self, bench, tool, method, params):
        """Parameters of wrong types are refused, and the server goes on."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        if isinstance(params, dict):
            params = {"threadId": thread, "cwd": str(bench.home), **params}
        wire.send({"id": 999, "method": method, "params": params})
        answer = wire.until(lambda: wire.answered(999), method)
        assert answer["error"]["code"] == -32600
        assert wire.turn(thread, "!say on")["status"] == "completed"

    def test_garbage_is_ignored(self, bench):
        """Lines that are no message, answers nobody asked for, and ids of another type change nothing."""
        wire = bench.wire()
        for line in (b"garbage", b"[1]", b'{"id": 99, "result": {}}', b'{"id": "0", "error": {}}', b""):
            wire.send(line)
        assert wire.get("thread/loaded/list")["data"] == []


class TestTools:
    """What a start accepts, and what of it the model sees."""

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("", "must not be empty"),
            ("a b", "must match"),
            ("ä", "must match"),
            ("x" * 129, "at most 128"),
            ("mcp", "reserved"),
            ("mcp__x", "reserved"),
        ],
        ids=["empty", "blank", "letter", "long", "mcp", "mcp__"],
    )
    def test_bad_names(self, bench, tool, name, words):
        """A bad name fails the whole start."""
        wire = bench.wire()
        code, text = wire.refused("thread/start", dynamicTools=[tool("ping"), tool(name)], cwd=str(bench.home))
        assert (code, words in text) == (-32600, True)

    def test_bad_shapes(self, bench, tool):
        """Nothing of a tool is optional; a namespace has tools and is not `functions`; names are given once."""
        wire = bench.wire()
        bare = {"type": "function", "name": "ping", "inputSchema": {}}
        empty = {"type": "namespace", "name": "shop", "description": "d", "tools": []}
        taken = {"type": "namespace", "name": "functions", "description": "d", "tools": [tool("ping")]}
        faults = [
            ([bare], "missing field `description`"),
            ([empty], "at least one tool"),
            ([taken], "reserved"),
            ([tool("ping"), tool("ping")], "duplicate"),
            ([tool("ping", deferLoading=True)], "must include a namespace"),
        ]
        said = [wire.refused("thread/start", dynamicTools=tools, cwd=str(bench.home)) for tools, _ in faults]
        assert [(code, words in text) for (code, text), (_, words) in zip(said, faults, strict=True)] == [
            (-32600, True)
        ] * len(faults)

    def test_what_the_model_sees(self, bench, tool):
        """Functions and namespaces show; built-in names are dropped without a word; deferred tools do not show."""
        wire = bench.wire()
        spaced = {"type": "namespace", "name": "shop", "description": "d", "tools": [tool("order")]}
        hidden = {"type": "namespace", "name": "hid", "description": "d", "tools": [tool("den", deferLoading=True)]}
        mine = tool("exec_command", "mine")
        thread = wire.start(tool("ping"), spaced, mine, tool("a-b"), tool("a_b"), hidden)
        wire.turn(thread["id"], "!say hi")
        assert bench.shown(among=OURS) == ["a-b", "a_b", "ping", "shop.order"]
        assert "hid.den" not in bench.shown()
        descriptions = [one.get("description") for one in bench.model.requests[0]["tools"]]
        assert "mine" not in descriptions

    def test_stripped_keywords(self, bench, tool):
        """The server takes keywords out of schemas, and leaves the rest."""
        wire = bench.wire()
        loud = {"type": "string", "description": "d", "enum": ["q"], "title": "T", "default": "q", "nullable": True}
        loud |= {"pattern": "q", "format": "date", "examples": ["q"], "minimum": 1, "maximum": 2}
        schema = {"type": "object", "properties": {"a": loud}, "required": ["a"], "additionalProperties": False}
        thread = wire.start(tool("ping", schema=schema))
        wire.turn(thread["id"], "!say hi")
        [shown] = [one for one in bench.model.requests[0]["tools"] if one.get("name") == "ping"]
        assert shown["parameters"] == {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "d", "enum": ["q"]}},
            "required": ["a"],
            "additionalProperties": False,
        }

    def test_later_tools_change_nothing(self, bench, tool):
        """Resume, `turn/start`, settings and fork take `dynamicTools`, answer well, and change nothing."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        wire.turn(thread, "!say first", dynamicTools=[tool("quux")])
        wire.resume(thread, dynamicTools=[tool("quux")])
        wire.get("thread/settings/update", threadId=thread, dynamicTools=[tool("quux")])
        wire.turn(thread, "!say second")
        forked = wire.get("thread/fork", threadId=thread, dynamicTools=[tool("quux")])["thread"]["id"]
        wire.turn(forked, "!say third")
        assert [bench.shown(at, among=OURS) for at in range(3)] == [["ping"]] * 3


class TestCalls:
    """Calls and their answers."""

    def test_a_call(self, bench, tool):
        """A call carries thread, turn, call, namespace, tool and arguments; ids begin at 0 and are numbers."""
        wire = bench.wire()
        spaced = {"type": "namespace", "name": "shop", "description": "d", "tools": [tool("order")]}
        thread = wire.start(tool("ping"), spaced)["id"]
        turn = wire.turn(thread, '!call ping {"a": [1]}\n!call shop.order {}')
        first, second = wire.calls
        assert (first["id"], second["id"], first["method"]) == (0, 1, "item/tool/call")
        params = {key: first["params"].get(key) for key in ("threadId", "turnId", "namespace", "tool", "arguments")}
        assert params == {
            "threadId": thread,
            "turnId": turn["id"],
            "namespace": None,
            "tool": "ping",
            "arguments": {"a": [1]},
        }
        assert (second["params"]["namespace"], second["params"]["tool"]) == ("shop", "order")
        assert first["params"]["callId"] == bench.model.requests[1]["input"][-1]["call_id"]

    @pytest.mark.parametrize("arguments", ["[1]", "5", '"text"', "null"])
    def test_arguments_are_any_json(self, bench, tool, arguments):
        """Arguments arrive as the model wrote them, whatever kind of value they are."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        wire.turn(thread, f"!call ping {arguments}")
        assert wire.calls[0]["params"]["arguments"] == json.loads(arguments)

    def test_calls_that_never_arrive(self, bench, tool):
        """Malformed arguments and unknown tools are answered by the server itself."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        wire.turn(thread, '!call ping {"a":\n!call nope {}')
        first, second = outputs(bench)
        assert first.startswith("failed to parse function arguments: ")
        assert (second, wire.calls) == ("unsupported call: nope", [])

    @pytest.mark.parametrize(
        ("answer", "read"),
        [
            ({"error": {"code": -1, "message": "boom"}}, "dynamic tool request failed"),
            ({"result": {"x": 1}}, "dynamic tool response was invalid"),
            ({"result": {"contentItems": [{"type": "zork"}], "success": True}}, "dynamic tool response was invalid"),
            ({"result": {"contentItems": [{"type": "inputText", "text": "no"}], "success": False}}, "no"),
        ],
        ids=["error", "shape", "item", "failure"],
    )
    def test_what_the_model_reads(self, bench, tool, answer, read):
        """Errors and bad shapes read as fixed sentences; of a failure the model reads the text alone."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        wire.turn(thread, "!call ping {}", lambda _call: answer)
        told = [one["item"] for one in wire.told("item/completed") if one["item"]["type"] == "dynamicToolCall"]
        assert outputs(bench) == [read]
        assert [(item["status"], item["success"]) for item in told] == [("failed", False)]

    def test_long_answers_are_cut(self, bench, tool):
        """An answer over some 12,000 characters loses its middle; one of 11,000 arrives whole."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        texts = iter(["a" * 11_000, "b" * 50_000])

        def reply(_call):
            items = [{"type": "inputText", "text": next(texts)}]
            return {"result": {"contentItems": items, "success": True}}

        wire.turn(thread, "!call ping {}\n!call ping {}", reply)
        whole, shortened = outputs(bench)
        assert whole == "a" * 11_000
        assert 11_900 < len(shortened) < 12_300
        assert "truncated" in shortened

    def test_parallel_calls_arrive_at_once(self, bench, tool):
        """Calls of one model step arrive together, and may be answered in any order."""
        wire = bench.wire()

        def brain(request):
            done = request["input"][-1].get("type") == "function_call_output"
            return [say("done")] if done else [call("ping", {"n": n}) for n in range(3)]

        bench.model.brain = brain
        thread = wire.start(tool("ping"))["id"]
        turn = wire.begin(thread, "go")
        wire.until(lambda: len(wire.calls) == 3, "three calls")
        for one in reversed(wire.calls):
            wire.answer(one, f"n={one['params']['arguments']['n']}")
        assert wire.ended(thread, turn)["status"] == "completed"
        assert outputs(bench) == ["n=0", "n=1", "n=2"]

    def test_second_answers_and_late_ones(self, bench, tool):
        """The first answer counts; another to the same id is ignored, also after the turn."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        turn = wire.begin(thread, "!call ping {}")
        asked = wire.called(0)
        wire.answer(asked, "first")
        wire.answer(asked, "second")
        assert wire.ended(thread, turn)["status"] == "completed"
        wire.answer(asked, "late")
        wire.turn(thread, "!say on")
        assert outputs(bench) == ["first"]

    def test_an_id_of_another_type_answers_nothing(self, bench, tool):
        """The text `0` does not answer the call 0."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        turn = wire.begin(thread, "!call ping {}")
        asked = wire.called(0)
        wire.answer({**asked, "id": str(asked["id"])}, "wrong")
        assert wire.get("thread/read", threadId=thread)["thread"]["status"]["type"] == "active"
        wire.answer(asked, "right")
        wire.ended(thread, turn)
        assert outputs(bench) == ["right"]

    def test_a_call_comes_again_to_who_resumes(self, bench, tool):
        """Resuming a thread that waits for an answer brings the same call, under its old id."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        turn = wire.begin(thread, "!call ping {}")
        first = wire.called(0)
        assert wire.get("thread/unsubscribe", threadId=thread) == {"status": "unsubscribed"}
        wire.resume(thread)
        again = wire.called(1)
        assert again == first
        wire.answer(again)
        assert wire.ended(thread, turn)["status"] == "completed"


class TestTurns:
    """Turns, steering, interrupting, failing."""

    def test_a_second_start_steers(self, bench, tool):
        """`turn/start` during a turn joins it: same turn, and the text reaches the model."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        turn = wire.begin(thread, "!call ping {}")
        asked = wire.called(0)
        assert wire.begin(thread, "and this") == turn
        wire.answer(asked)
        wire.ended(thread, turn)
        wire.until(lambda: any("and this" in texts_of(one, "user") for one in bench.model.requests), "the steer")
        assert len(wire.get("thread/turns/list", threadId=thread)["data"]) == 1

    def test_interrupt(self, bench, tool):
        """An interrupt ends the turn; the model later reads that the call was cancelled."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        turn = wire.begin(thread, "!call ping {}")
        wire.called(0)
        wire.get("turn/interrupt", threadId=thread, turnId=turn)
        assert wire.ended(thread, turn)["status"] == "interrupted"
        assert wire.refused("turn/interrupt", threadId=thread, turnId=turn)[0] == -32600
        wire.turn(thread, "!say on")
        assert outputs(bench) == ["dynamic tool call was cancelled before receiving a response"]
        assert any("<turn_aborted>" in text for text in texts_of(bench.model.requests[-1], "user"))

    def test_model_errors(self, bench, tool):
        """A turn whose model fails is `failed`, the thread is in `systemError`, and the next turn works."""

        def fail(_request):
            raise ModelFailure(500, "boom")

        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        brain, bench.model.brain = bench.model.brain, fail
        assert wire.turn(thread, "hello")["status"] == "failed"
        assert wire.get("thread/read", threadId=thread)["thread"]["status"] == {"type": "systemError"}
        bench.model.brain = brain
        assert wire.turn(thread, "!say on")["status"] == "completed"

    def test_unknown_threads(self, bench):
        """Unknown threads, and ids that are none, are refused with words to tell them by."""
        wire = bench.wire()
        unknown = "01a20109-ee99-77b1-88bf-bda965fe7ee2"
        for method, words in (("turn/start", "thread not found"), ("thread/resume", "no rollout found")):
            code, text = wire.refused(method, threadId=unknown, input=[])
            assert (code, words in text) == (-32600, True)
        assert "invalid thread id" in wire.refused("thread/read", threadId="nope")[1]


class TestFiles:
    """Rollout files: when they are there, and what a change in them does."""

    def test_before_the_first_turn_there_is_none(self, bench, tool):
        """A fresh thread has a path, no file, and cannot be resumed; naming it writes the file without a model call."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))
        path = Path(thread["path"])
        assert not path.exists()
        wire.refused("thread/turns/list", threadId=thread["id"])
        _code, text = wire.refused("thread/resume", threadId=thread["id"])
        assert text.startswith(("no rollout found", "list_turns is not supported yet"))  # which one depends on timing
        wire.get("thread/name/set", threadId=thread["id"], name="mine")
        line = json.loads(path.read_text("utf-8").split("\n")[0])
        assert (line["type"], line["payload"]["id"]) == ("session_meta", thread["id"])
        assert [one["name"] for one in line["payload"]["dynamic_tools"]] == ["ping"]
        assert wire.get("thread/read", threadId=thread["id"])["thread"]["name"] == "mine"
        assert bench.model.requests == []

    def test_injecting_writes_it_too(self, bench, tool):
        """`thread/inject_items` writes the file, and the items reach the model."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "injected"}]}
        wire.get("thread/inject_items", threadId=thread["id"], items=[item])
        assert Path(thread["path"]).exists()
        assert wire.refused("thread/inject_items", threadId=thread["id"], items=[])[0] == -32600
        wire.turn(thread["id"], "!say hi")
        assert "injected" in texts_of(bench.model.requests[-1], "user")

    def test_ephemeral_threads_have_none(self, bench, tool):
        """An ephemeral thread has no path and cannot be resumed once it is known by its file only."""
        wire = bench.wire()
        thread = wire.start(tool("ping"), ephemeral=True)
        assert (thread["path"], thread["ephemeral"]) == (None, True)
        assert "no rollout found" in wire.refused("thread/resume", threadId=thread["id"])[1]

    def test_a_rewritten_first_line_changes_the_tools(self, bench, tool):
        """Tools put into the first line of an unloaded thread's file are the tools after a cold resume, and a restart."""
        wire = bench.wire()
        thread = wire.start(tool("old"))
        path, name = Path(thread["path"]), thread["id"]
        wire.turn(name, "!call old {}")
        wire.unload(name)
        assert wire.get("thread/read", threadId=name)["thread"]["status"] == {"type": "notLoaded"}
        rewrite(path, [tool("new")])
        wire.resume(name)
        wire.turn(name, '!call new {"n": 1}')
        assert (bench.shown(among=OURS), wire.calls[-1]["params"]["tool"]) == (["new"], "new")
        assert "!call old {}" in texts_of(bench.model.requests[-1], "user")
        wire.close()
        again = bench.wire()
        again.resume(name)
        again.turn(name, "!say still")
        assert bench.shown(among=OURS) == ["new"]

    @pytest.mark.parametrize("tools", [None, []], ids=["null", "empty"])
    def test_no_tools(self, bench, tool, tools):
        """None and an empty list mean no tools."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))
        wire.turn(thread["id"], "!say hi")
        wire.unload(thread["id"])
        rewrite(Path(thread["path"]), tools)
        wire.resume(thread["id"])
        wire.turn(thread["id"], "!say on")
        assert bench.shown(among=OURS) == []

    def test_a_bad_entry_makes_the_thread_unreadable(self, bench, tool):
        """A bad entry fails resume and read; the old line makes it whole again."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))
        name, path = thread["id"], Path(thread["path"])
        wire.turn(name, "!say hi")
        wire.unload(name)
        good = path.read_bytes()
        rewrite(path, [{"type": "function", "name": "x"}])
        for method in ("thread/resume", "thread/read"):
            code, text = wire.refused(method, threadId=name)
            assert (code, "failed to read session metadata" in text) == (-32603, True)
        path.write_bytes(good)
        wire.resume(name)
        wire.turn(name, "!say on")
        assert bench.shown(among=OURS) == ["ping"]

    def test_revert(self, bench, tool):
        """`thread/revert` takes turns away from history and moves the file; newest turns come first in the list."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))
        turns = [wire.turn(thread["id"], f"!say number {n}")["id"] for n in range(3)]
        assert [one["id"] for one in wire.get("thread/turns/list", threadId=thread["id"])["data"]] == turns[::-1]
        moved = wire.get("thread/revert", threadId=thread["id"], beforeTurnId=turns[1])["thread"]["path"]
        assert (moved != thread["path"], Path(moved).exists(), Path(thread["path"]).exists()) == (True, True, True)
        wire.turn(thread["id"], "!say after")
        said = [text for text in texts_of(bench.model.requests[-1], "user") if text.startswith("!say")]
        assert said == ["!say number 0", "!say after"]
        assert "turn not found" in wire.refused("thread/revert", threadId=thread["id"], beforeTurnId="nope")[1]
        assert "unknown variant" in wire.refused("thread/rollback", threadId=thread["id"], numTurns=1)[1]

    def test_archive_and_delete(self, bench, tool):
        """An archived thread cannot be resumed until it is unarchived; a deleted one is gone."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        wire.turn(thread, "!say hi")
        wire.get("thread/archive", threadId=thread)
        assert "is archived" in wire.refused("thread/resume", threadId=thread)[1]
        wire.get("thread/unarchive", threadId=thread)
        wire.resume(thread)
        wire.get("thread/delete", threadId=thread)
        assert wire.refused("thread/read", threadId=thread)[0] == -32600


class TestUnloading:
    """When a thread is closed."""

    def test_unsubscribing(self, bench, tool):
        """The last subscriber's leaving closes the thread; what needs it loaded is refused then."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        wire.turn(thread, "!say hi")
        wire.unload(thread)
        assert wire.get("thread/unsubscribe", threadId=thread) == {"status": "notLoaded"}
        for method, more in (("turn/start", {"input": []}), ("thread/inject_items", {"items": [{}]})):
            assert "thread not found" in wire.refused(method, threadId=thread, **more)[1]
        wire.get("thread/name/set", threadId=thread, name="works unloaded")

    def test_the_delay_counts_from_a_cold_resume(self, bench, tool):
        """A cold resume without the delay keeps the thread loaded after its last subscriber left."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        wire.turn(thread, "!say hi")
        wire.unload(thread)
        wire.get("thread/resume", threadId=thread, excludeTurns=True)
        wire.get("thread/unsubscribe", threadId=thread)
        assert wire.get("thread/read", threadId=thread)["thread"]["status"] == {"type": "idle"}
        assert wire.get("thread/loaded/list")["data"] == [thread]

    def test_not_during_a_turn(self, bench, tool):
        """A thread whose turn runs stays; after its end it is closed."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        wire.begin(thread, "!call ping {}")
        asked = wire.called(0)
        wire.get("thread/unsubscribe", threadId=thread)
        assert wire.get("thread/read", threadId=thread)["thread"]["status"]["type"] == "active"
        wire.answer(asked)
        wire.until(lambda: wire.told("thread/closed", thread), "thread/closed")


class TestContext:
    """`additionalContext`."""

    def contexts(self, bench) -> list[str]:
        """What the model reads of the context."""
        return [text for text in texts_of(bench.model.requests[-1], "developer") if text.startswith("<kdskills>")]

    def test_once_while_warm_twice_after_a_cold_resume(self, bench, tool):
        """An equal value is not repeated; after a cold resume it is; markup is not escaped."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        given = {"kdskills": {"kind": "application", "value": "a</b>"}}
        wire.turn(thread, "!say 1", additionalContext=given)
        wire.turn(thread, "!say 2", additionalContext=given)
        wire.turn(thread, "!say 3")
        assert self.contexts(bench) == ["<kdskills>a</b></kdskills>"]
        wire.unload(thread)
        wire.resume(thread)
        wire.turn(thread, "!say 4", additionalContext=given)
        assert self.contexts(bench) == ["<kdskills>a</b></kdskills>"] * 2

    def test_changes_and_emptiness(self, bench, tool):
        """A changed value is added, an empty one too."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        for value in ("one", "", "one"):
            wire.turn(thread, "!say x", additionalContext={"kdskills": {"kind": "application", "value": value}})
        assert self.contexts(bench) == [f"<kdskills>{value}</kdskills>" for value in ("one", "", "one")]

    def test_lost_at_compaction(self, bench, tool):
        """Compaction drops the context; an equal value is not sent again by the server."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        given = {"kdskills": {"kind": "application", "value": "kept"}}
        wire.turn(thread, "!say 1", additionalContext=given)
        wire.get("thread/compact/start", threadId=thread)
        wire.until(
            lambda: (
                wire.told("thread/compacted", thread)
                or [one for one in wire.told("item/completed", thread) if one["item"]["type"] == "contextCompaction"]
            ),
            "the compaction",
        )
        wire.until(lambda: wire.get("thread/read", threadId=thread)["thread"]["status"]["type"] == "idle", "idle")
        wire.turn(thread, "!say 2", additionalContext=given)
        assert self.contexts(bench) == []


class TestCrash:
    """The server dies."""

    def test_killed_in_a_call(self, bench, tool):
        """Nothing is replayed, history says `aborted`, tools stay, and ids begin at 0 again."""
        wire = bench.wire()
        thread = wire.start(tool("ping"))["id"]
        wire.begin(thread, "!call ping {}")
        assert wire.called(0)["id"] == 0
        wire.kill()
        again = bench.wire()
        again.resume(thread)
        again.turn(thread, "!call ping {}")
        assert [one["id"] for one in again.calls] == [0]
        assert outputs(bench) == ["aborted", "pong"]
        assert bench.shown(among=OURS) == ["ping"]


class TestRoots:
    """`skills/extraRoots/set`."""

    def test_roots_reach_open_threads_and_replace(self, bench, tool):
        """Roots reach open threads at their next turn; a second call replaces them; a skill item brings its body."""
        wire = bench.wire()
        for name in ("hello", "other"):
            folder = bench.home / f"roots-{name}" / name
            folder.mkdir(parents=True)
            (folder / "SKILL.md").write_text(
                f"---\nname: {name}\ndescription: Greets {name}\n---\nSay {name} loudly.\n"
            )
        thread = wire.start(tool("ping"))["id"]
        wire.turn(thread, "!say before")
        for name in ("hello", "other"):
            changes = len(wire.told("skills/changed"))
            wire.get("skills/extraRoots/set", extraRoots=[str(bench.home / f"roots-{name}")])
            wire.until(lambda seen=changes: len(wire.told("skills/changed")) > seen, "skills/changed")
        wire.turn(thread, "!say after")
        newest = [text for text in texts_of(bench.model.requests[-1], "developer") if "skills_instructions" in text][-1]
        assert ("Greets other" in newest, "Greets hello" in newest) == (True, False)
        path = str(bench.home / "roots-other" / "other" / "SKILL.md")
        given = [{"type": "skill", "name": "other", "path": path}, {"type": "text", "text": "!say with"}]
        turn = wire.get("turn/start", threadId=thread, input=given)["turn"]["id"]
        wire.ended(thread, turn)
        assert any("Say other loudly." in text for text in texts_of(bench.model.requests[-1], "user"))


@pytest.mark.needs("codex")
@pytest.mark.codex_real
@pytest.mark.parametrize("bench", ["codex"], indirect=True)
def test_tools_of_models_that_write_code(bench, tool):
    """With code mode alone tools are declarations in the text of `exec`; they are read there, too, namespaces flattened."""
    wire = bench.wire(args=("--enable", "code_mode_only"))
    spaced = {"type": "namespace", "name": "shop", "description": "d", "tools": [tool("order")]}
    thread = wire.start(tool("ping"), spaced)["id"]
    wire.turn(thread, "!say hi")
    assert {"exec", "ping", "shop__order"} <= set(bench.shown())
    assert "shop.order" not in bench.shown()
