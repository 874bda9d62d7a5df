"""Changes one byte in the middle of the newest file of a pattern; prints its path."""

import glob
import os
import sys

newest = max((path for path in glob.glob(sys.argv[1], recursive=True) if os.path.isfile(path)), key=os.path.getmtime)
with open(newest, "r+b") as file:
    file.seek(os.path.getsize(newest) // 2)
    byte = file.read(1)
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte[0] ^ 0x10]))
print(newest)
