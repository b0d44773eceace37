"""Leave links that lead in circles, far away, into themselves and into /proc."""
import os

from attempt import done

os.symlink("circle.txt", "circle.txt")
os.symlink("b.txt", "a.txt")
os.symlink("a.txt", "b.txt")
os.symlink("x/" * 1000 + "y", "far.txt")
os.symlink("/proc/self/fd/0", "stdin.txt")
os.makedirs("d")
os.symlink("..", "d/up")
os.symlink("/", "root")
done()
