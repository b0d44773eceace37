"""Close every descriptor and live on."""
import os
import time

os.closerange(0, 1024)
time.sleep(600)
