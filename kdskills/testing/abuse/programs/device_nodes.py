"""Make device nodes and open those of the host."""
import os
import stat

from attempt import done, must_fail, read

for name, kind, major, minor in (("sda", stat.S_IFBLK, 8, 0), ("mem", stat.S_IFCHR, 1, 1), ("kmsg", stat.S_IFCHR, 1, 11), ("tun", stat.S_IFCHR, 10, 200)):
    must_fail(f"mknod {name}", os.mknod, name, kind | 0o666, os.makedev(major, minor))
for path in ("/dev/sda", "/dev/vda", "/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/net/tun", "/dev/loop0", "/dev/vsock"):
    must_fail(f"open {path}", read, path)
done()
