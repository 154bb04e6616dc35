#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build, test and verify the patched vLLM wheel; `python build.py --help` says how.

This file parses on any Python 3, so that an old one gets a line and not a traceback.
"""

import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036  (old Pythons get this far)
    sys.stderr.write(
        "error: Python: expected 3.10 or newer, found {}.{}; run build.py with a newer python3\n".format(
            *sys.version_info
        )
    )
    sys.exit(2)

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -P and -I leave it out
sys.dont_write_bytecode = True  # the checkout may belong to somebody else

from builder.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
