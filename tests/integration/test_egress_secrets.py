"""Secrets that code never sees reach their hosts and nobody else; both networks of the test are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.integration.egress_secrets_world import SECRET
from tests.integration.egress_world import OTHER, PUBLIC
from tests.integration.test_egress import ENGINES

pytestmark = [
    pytest.mark.needs("bubblewrap"),
    pytest.mark.skipif(os.geteuid() != 0, reason="networks of its own are root's to make"),
]
STARS = "*" * len(f"Bearer {SECRET}")


@pytest.fixture(scope="module", params=ENGINES)
def world(request):
    """Run the programs in sandboxes of an engine, and return their answers, the rows, the log and who was visited."""
    program = [sys.executable, "-m", "tests.integration.egress_secrets_world", request.param]
    done = subprocess.run(
        ["unshare", "--net", "--mount", *program], capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "client", ["urllib", "post", "requests", "requests_again", "inside", "inside_dropped", "pipelined"]
)
def test_clients_reach_a_host_with_its_secret(world, client):
    """Ordinary clients trust the run's authority; what the host repeats of the secret is starred."""
    answer = world["answers"][client]
    assert "REACHED" in answer, answer
    assert f"Authorization: {STARS}" in answer
    assert SECRET not in answer


def test_curl_reaches_a_host_with_its_secret(world):
    """The host's curl does, too."""
    if not world["curl"]:
        pytest.skip("there is no curl")
    assert f"Authorization: {STARS}" in world["answers"]["curl"]


def test_hosts_get_the_secret_in_its_headers(world):
    """The host gets exactly the operator's headers, over HTTP/1.1, and nothing of what the program put there."""
    visits = [
        visit for visit in world["visits"] if visit.get("port") == 443 and visit.get("head", "").startswith("GET /echo")
    ]
    visits = [visit for visit in visits if "Host: api.example.net" in visit["head"]]
    rows = []
    for visit in visits:
        lines = visit["head"].split("\r\n")
        own = [line for line in lines if line.lower().replace("_", "-").startswith(("authorization", "x-api-key"))]
        rows.append(own)
        assert visit["protocol"] == "http/1.1"
    assert rows.count([]) == 2  # script and task of the skill that has the network alone
    assert rows.count([f"Authorization: Bearer {SECRET}", f"X-Api-Key: {SECRET}"]) == len(rows) - 2 >= 11


def test_the_secret_goes_nowhere_else(world):
    """Other hosts, redirects, plain requests that nobody allowed and servers that are not trusted never get it."""
    for visit in world["visits"]:
        if SECRET in json.dumps(visit):
            host = "www.example.net" if visit["port"] == 80 else "api.example.net"
            assert (visit["address"], f"Host: {host}\r\n" in visit["head"]) == (PUBLIC, True)
    assert any(visit.get("address") == OTHER for visit in world["visits"])
    answers = world["answers"]
    assert [answers[name][:8] for name in ("untrusted", "misnamed")] == ["HTTP 502"] * 2
    assert "REACHED" in answers["redirect"]
    assert "REACHED" in answers["no_secret"]
    assert "REACHED" in answers["plain_of_tls"]
    assert "***" in answers["plain_explicit"]
    assert "***" not in answers["plain_of_tls"] + answers["tls_of_plain"] + answers["no_secret"] + answers["redirect"]
    assert answers["other_port"].startswith("HTTP/1.1 403 ")


def test_only_hosts_with_secrets_are_opened(world):
    """TLS with every other host goes through untouched."""
    assert world["answers"]["issuer_api"] == "kdskills: one run"
    assert world["answers"]["issuer_other"] == "trusted"


def test_a_planted_secret_is_never_readable_inside(world):
    """It is in no file, no variable, no memory of any process of the sandbox, after all these answers."""
    answers = world["answers"]
    assert answers["looked"]["files"] > 10
    assert answers["looked"]["memories"] >= 1
    assert answers["traces"] == []
    outside = json.loads(answers["memory"].partition("}")[0] + "}")
    assert (outside["processes"] >= 2, outside["holders"]) == (
        True,
        [],
    )  # the program and the helper, as root reads them
    assert answers["private_keys"] == []
    assert SECRET not in json.dumps(answers)
    assert set(answers["variables"].values()) == {"/run/trust/certificates.pem"}


def test_a_planted_secret_is_never_told(world):
    """It is in no row, no log, no state and no words about settings; rows name the headers."""
    assert SECRET not in json.dumps([world["rows"], world["log"], world["nobody"], world["skills"]])
    assert not world["skills"]["state"]
    assert world["leftovers"] == []
    assert {tuple(row["secret_headers"]) for row in world["rows"] if row["host"] == "api.example.net" and row["outcome"] == "ok"} == {
        (), ("Authorization", "X-Api-Key"),
    }  # fmt: skip
    assert {
        row["outcome"] for row in world["rows"] if row["host"] in {"untrusted.example.net", "misnamed.example.net"}
    } == {"server_untrusted"}


def test_requests_within_are_held_to_the_same_rules(world):
    """What could be read in two ways, or names another host, is refused within the tunnel, too."""
    refused = {name: answer for name, answer in world["answers"].items() if name.startswith("REFUSED_")}
    assert len(refused) >= 16
    for name, answer in refused.items():
        assert answer.startswith("HTTP/1.1 400 "), (name, answer)
    assert world["answers"]["h2_only"].startswith("HTTP/1.1 400 ")
    assert world["answers"]["pipelined"].count("REACHED") == 1
    assert "REACHED" not in world["answers"]["plain_in_tunnel"] + world["answers"]["other_name"]


@pytest.mark.parametrize("path", ["split", "header", "token", "gzip"])
def test_repeated_secrets_are_masked(world, path):
    """In pieces, in headers, without its scheme; hosts are asked for answers that are not packed."""
    assert "***" in world["answers"][path]
    assert "PACKED" not in world["answers"][path]


def test_what_no_mask_hides(world):
    """A host that gives the secret away in another form shows it to the program: the operator trusts the host."""
    assert SECRET in world["forms"]["chunked"]
    assert SECRET[::-1] in world["forms"]["reversed"]


def test_a_granted_skill_has_its_secrets(world):
    """The script of a skill gets the secrets of settings; one of the same namespace that has the network alone does not."""
    assert f"Authorization: {STARS}" in world["skills"]["fetch"]
    assert world["skills"]["other"].startswith("REACHED")
    assert "Authorization" not in world["skills"]["other"]


@pytest.mark.parametrize("name", ["lab.fetch", "job", "service"])
def test_background_work_has_the_secrets_of_its_skill(world, name):
    """A task, a step of a job and a service reach the host with the secret, in the sandbox of a worker."""
    assert f"Authorization: {STARS}" in world["skills"]["work"][name]


def test_background_work_has_what_its_skill_is_granted(world):
    """A task of a skill that has the network alone gets no secret; each connection is a line of the worker's log."""
    assert world["skills"]["work"]["lab.other"].startswith("REACHED")
    assert "Authorization" not in world["skills"]["work"]["lab.other"]
    rows = [(row["skill"], row["host"], row["outcome"], row["secret_headers"]) for row in world["skills"]["work_rows"]]
    secret = ("lab.fetch", "api.example.net", "ok", ["Authorization", "X-Api-Key"])
    assert sorted(rows) == [secret] * 3 + [("lab.other", "api.example.net", "ok", [])]
    assert all(row["task"] for row in world["skills"]["work_rows"])
