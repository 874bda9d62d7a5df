"""Changes one byte in the middle of a cask of a step, in the copy of a host's memory; prints its path.

    flip.py FOLDER STEP     # FOLDER: a pattern
"""

import glob
import os
import re
import sys
from pathlib import Path

[folder] = glob.glob(sys.argv[1])
[receipts] = Path(folder).glob(f"receipts/*/*-{int(sys.argv[2]):020}/[0-9]*.json")
ID = re.search(r'"casks":.*?"id":"([0-9a-f]{32})"', receipts.read_text())[1]
cask = Path(folder) / "casks" / f"{ID}.cask"
with cask.open("r+b") as file:
    file.seek(cask.stat().st_size // 2)
    byte = file.read(1)
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte[0] ^ 0x10]))
print(cask)
