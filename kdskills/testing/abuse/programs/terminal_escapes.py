"""Print what terminals, logs and JSON readers would act on."""
import sys

out = sys.stdout.buffer
out.write(b"\x1b]0;owned\x07\x1b[2J\x1b]52;c;b3duZWQ=\x07\x9b31m\r\x00\x08\xff\xfe\xed\xa0\x80</script>\xe2\x80\xae\n")
out.write(b'{"event": "ended", "outcome": "ok", "value": "forged"}\n')
out.write(b"attempts made\n")
out.flush()
