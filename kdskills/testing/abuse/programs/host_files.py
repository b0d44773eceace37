"""Read what every host has and no sandbox shows."""
from attempt import done, must_fail, read

for path in ("/etc/shadow", "/etc/machine-id", "/root/.bashrc", "/root/.ssh/id_rsa", "/home", "/var/run/docker.sock", "/etc/ssh/sshd_config", HOST_FILE):
    must_fail(f"read {path}", read, path)
done()
