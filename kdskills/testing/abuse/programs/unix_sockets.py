"""Connect to sockets of the host: by path and by abstract name."""
import socket

from attempt import done, must_fail


def connect(address):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
    return address


for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd/private", "/run/containerd/containerd.sock", "\0" + HOST_ABSTRACT):
    must_fail(f"connect {path!r}", connect, path)
done()
