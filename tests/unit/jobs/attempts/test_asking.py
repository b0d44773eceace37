"""What an engine is asked, decided from the order alone."""

from pathlib import Path

import pytest

from kdskills.errors import BadRequest
from kdskills.execution import Limits
from kdskills.execution.check import check_request
from kdskills.execution.request import MAX_BACKGROUND_S, EnvironmentMount, InputFile
from kdskills.jobs.attempts import OrderInput
from kdskills.jobs.exchange import EVERYTHING, MARKER, shows, to_request
from kdskills.jobs.model import FromArtifact, Inline, OnHttp, OnPort, ServiceSpec, TaskSpec

FOLDER = Path("/state/runs/t/1")


def test_command_is_asked_as_it_is(make_order):
    """Program, variables, folder, timeout and labels are those of the order; output goes to its logs."""
    order = make_order(("a", "$b"), env={"X": "$y `z`"}, cwd="sub", outputs=("r/*",), session="s", log_limit=2 << 20)
    request = to_request(order, FOLDER, {})
    assert (request.argv, request.env, request.workdir) == (("a", "$b"), {"X": "$y `z`"}, "sub")
    assert (request.outputs, request.limits.wall_s, request.background) == (("r/*",), 10.0, True)
    assert (request.logs.stdout, request.logs.stderr, request.logs.limit) == (
        FOLDER / "stdout.log",
        FOLDER / "stderr.log",
        2 << 20,
    )
    owner = request.owner
    assert (owner.project, owner.agent, owner.conversation, request.request_id) == ("p", "a", "s", "t.1")
    assert request.profile is None
    check_request(request)


def test_task_without_session_has_an_owner_of_its_own(make_order):
    """Engines that keep machines per owner give such a task one of its own."""
    assert to_request(make_order(), FOLDER, {}).owner.conversation == "t"


def test_environment_travels_with_the_order(make_order):
    """What a task was placed with is what its attempt asks for, also when the order was read back from its record."""
    order, mount = make_order(), EnvironmentMount("0" * 16, Path("/cache/environments/0"))
    placement = order.spec.placement.model_copy(update={"environment": mount})
    spec = TaskSpec.model_validate_json(order.spec.model_copy(update={"placement": placement}).model_dump_json())
    assert to_request(order.model_copy(update={"spec": spec}), FOLDER, {}).environment == mount
    assert to_request(order, FOLDER, {}).environment is None


def with_network(order):
    """Return *order* with a host granted, read back from its record."""
    placement = order.spec.placement.model_copy(update={"network": ("api.example.net",)})
    spec = TaskSpec.model_validate_json(order.spec.model_copy(update={"placement": placement}).model_dump_json())
    return order.model_copy(update={"spec": spec})


def test_the_network_travels_with_the_order(make_order):
    """Hosts a task was placed with are what its attempt asks for, with the secrets of its skill alone."""
    request = to_request(with_network(make_order()), FOLDER, {})
    assert (request.network, request.network_skills) == (("api.example.net",), ("x",))
    request = to_request(make_order(), FOLDER, {})
    assert (request.network, request.network_skills) == ("none", ())


@pytest.mark.parametrize(
    "service",
    [{"expose_ports": (3128,)}, {"ready": OnPort(tcp_port=3128)}, {"ready": OnHttp(port=3128, path="/")}],
)
def test_nobody_outside_speaks_to_the_proxy(make_order, service):
    """A service with a network neither exposes the port of its proxy nor is ready by it; without one it is a port."""
    order = make_order(service=True)
    order = order.model_copy(update={"spec": order.spec.model_copy(update={"service": ServiceSpec(**service)})})
    to_request(order, FOLDER, {})
    with pytest.raises(BadRequest, match="port 3128"):
        to_request(with_network(order), FOLDER, {})


def test_service_has_no_timeout(make_order):
    """A service is asked with the longest time there is, and no backstop."""
    order = make_order(service=True)
    assert to_request(order, FOLDER, {}).limits.wall_s == MAX_BACKGROUND_S
    assert [made.to_json()["backstop_s"] for made in (order, make_order(timeout_s=5.0))] == [None, 305.0]


def test_unsafe_profile_is_asked_for_by_name(make_order):
    """The caller's half of the double opt-in reaches the request, and only when it was given."""
    assert to_request(make_order(unsafe=True), FOLDER, {}).profile == "unsafe-local"


def test_session_is_given_and_taken_back_whole(make_order, tmp_path):
    """Files of the session come first, inputs take their place, everything is collected, with a mark that it was."""
    order = make_order(session_dir=tmp_path, outputs=("a",))
    request = to_request(order, FOLDER, {"a": (Path("/s/a"), 0o600), "run": (Path("/s/run"), 0o700)})
    assert request.inputs == (InputFile("a", Path("/s/a")), InputFile("run", Path("/s/run"), executable=True))
    assert request.outputs == ("a", EVERYTHING, MARKER)
    assert request.limits.output_files >= order.session_files
    assert request.limits.output_size >= request.limits.work_size


def test_inputs_take_the_place_of_session_files(make_order, tmp_path):
    """Bytes given inline and artifacts on this host are placed, over files of the same path."""
    inline = Inline(path="a", content_base64="aGk=")
    order = make_order(session_dir=tmp_path).model_copy(update={"inputs": (OrderInput(path="b", file=Path("/f")),)})
    command = order.spec.command.model_copy(update={"inputs": (inline, FromArtifact(path="b", artifact_id="x"))})
    order = order.model_copy(update={"spec": order.spec.model_copy(update={"command": command})})
    request = to_request(order, FOLDER, {"a": (Path("/s/a"), 0o600)})
    assert request.inputs == (InputFile("a", b"hi"), InputFile("b", Path("/f")))


@pytest.mark.parametrize("text", ["=", "a", "aGk=\n", "ключ"])
def test_input_that_is_no_base64_is_refused(make_order, text):
    """Content nobody can decode is a bad request that names the input."""
    order = make_order()
    command = order.spec.command.model_copy(update={"inputs": (Inline(path="a", content_base64=text),)})
    order = order.model_copy(update={"spec": order.spec.model_copy(update={"command": command})})
    with pytest.raises(BadRequest, match="'a'"):
        to_request(order, FOLDER, {})


def test_input_that_is_not_here_is_refused(make_order):
    """An artifact the worker did not bring is named, not left out."""
    order = make_order()
    command = order.spec.command.model_copy(update={"inputs": (FromArtifact(path="a", artifact_id="x"),)})
    order = order.model_copy(update={"spec": order.spec.model_copy(update={"command": command})})
    with pytest.raises(BadRequest, match="'a'"):
        to_request(order, FOLDER, {})


def test_many_inputs_have_descriptors_enough(make_order, tmp_path):
    """The launcher of a sandbox can open every file of a large session; few files change no limit."""
    files = {f"f{number}": (Path(f"/s/{number}"), 0o600) for number in range(1000)}
    order = make_order(session_dir=tmp_path, limits=Limits(nofile=64))
    assert to_request(order, FOLDER, files).limits.nofile > 1000
    assert to_request(order, FOLDER, dict(list(files.items())[:5])).limits.nofile == 64


def test_what_we_look_for_ourselves_is_nobodys_output(make_order):
    """The file whose absence proves a look is never shown, though `**` would name it."""
    order = make_order(outputs=("**",))
    assert (shows(order, "a/b"), shows(order, MARKER)) == (True, False)


def test_declared_outputs_are_told_from_the_sessions(make_order):
    """Only what a glob of the command names is an output of it."""
    order = make_order(outputs=("out/*.csv", "r"))
    seen = {path: shows(order, path) for path in ("out/a.csv", "r", "out/*.csv", "a", "out/b.txt", MARKER)}
    assert seen == {"out/a.csv": True, "r": True, "out/*.csv": True, "a": False, "out/b.txt": False, MARKER: False}
