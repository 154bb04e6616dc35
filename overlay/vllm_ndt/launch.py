# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ndt serve` becomes: upstream's command, in a process that ends on SIGTERM from its first moment.

The kernel drops a signal to the first process of a container as long as nothing handles it, and upstream handles
SIGTERM only when it has imported all that it needs.
"""

import os
import signal
import sys
from typing import NoReturn


def end_on_sigterm() -> None:
    """Let SIGTERM end this process, if it is the first of its container; until somebody else handles it."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: object) -> NoReturn:
    # an exception would be lost in the many modules that catch all of them while they are imported
    os._exit(128 + number)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    sys.argv[0] = "vllm"
    end_on_sigterm()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # blocked by vllm_ndt.serve until here
    from vllm.entrypoints.cli.main import main

    try:
        sys.exit(main())
    except KeyboardInterrupt as stop:  # which upstream makes of a SIGTERM while it starts, to end with a traceback
        sys.exit(128 + (signal.SIGTERM if str(stop) == "terminated" else signal.SIGINT))
