"""Services on bubblewrap: readiness, ports from the host, and endpoints that tell the truth."""

import asyncio
import urllib.error
import urllib.request

import pytest

from kdskills.jobs.model import OnHttp, ServiceSpec

pytestmark = pytest.mark.needs("bubblewrap")

WEB = ["python3", "-u", "-m", "http.server", "8000", "--bind", "127.0.0.1"]


def get(endpoint):
    """Return the status of a GET of the endpoint's top."""
    with urllib.request.urlopen(endpoint.url, timeout=20) as answer:
        return answer.status


async def test_service_is_ready_by_http_and_reached_from_the_host(lab):
    """A web server with no network but its own answers on a port of 127.0.0.1 once its attempt is running."""
    service = ServiceSpec(ready=OnHttp(port=8000), expose_ports=(8000,))
    attempt = await lab.attempts.start(lab.order(WEB, service=service))
    facts = await attempt.until_running()
    assert facts is not None, (attempt.verdict(), lab.log(attempt))
    assert [item.port for item in facts.endpoints] == [8000]
    assert await asyncio.to_thread(get, facts.endpoints[0]) == 200
    assert attempt.endpoints_active()
    attempt.cancel()
    verdict = await attempt.wait()
    assert (verdict.status, attempt.endpoints_active()) == ("cancelled", False)
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(get, facts.endpoints[0])
