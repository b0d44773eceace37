"""Services: readiness, and ports that are reached from the host.

A service's runner keeps a companion process beside it, `companion.py`, which watches for readiness and carries
connections into the sandbox's network. Restarts are new attempts, started by the task's workflow after `restart_delay_s`.
"""

from kdskills.jobs.services.beside import check_service, needs_network, ports_refused
from kdskills.jobs.services.keeping import ServiceSupervisor, StartupTimeout, restart_delay_s

__all__ = ["ServiceSupervisor", "StartupTimeout", "check_service", "needs_network", "ports_refused", "restart_delay_s"]
