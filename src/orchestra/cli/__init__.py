# SPDX-License-Identifier: Apache-2.0
"""The command `orchestra`: one file per command. Data goes to standard output, messages and progress to standard error.

Nothing here or at the top of a command's file imports torch: help and misspelt words should not wait for it. A command
that trains starts the warm process first, so that two imports of torch run side by side.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from orchestra.engine import environment
from orchestra.engine.tracebacks import from_users_code
from orchestra.errors import Interrupted, OrchestraError, Stopped, WorkerFailed

_INTERRUPTED = 130
_CLOSED_PIPE = 141  # what a shell reports for a program that wrote into a closed pipe


def main() -> None:
    """Run the command line and exit."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: Sequence[str]) -> int:
    """Carry out one command line and give its exit code (they are listed in `orchestra.errors`)."""
    try:
        from orchestra.cli.app import app

        app(args=list(arguments), prog_name="orchestra")
    except SystemExit as ended:
        return _code(ended)
    except OrchestraError as error:
        is_known = isinstance(error, Stopped) and error.is_interruption  # process 0 prints it, with the next step
        if not is_known and not environment.is_told_by_another(error):
            print(describe(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if not environment.is_member():
            print("stopped.", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe is gone. Flushing into /dev/null keeps the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except Exception as error:
        traceback.print_exception(error.with_traceback(from_users_code(error.__traceback__)))
        return 1
    return 0


def describe(error: OrchestraError) -> str:
    """Return an error as the user should read it. A worker's own traceback comes first: it shows what to fix."""
    if isinstance(error, WorkerFailed | Interrupted):
        return str(error)
    return f"orchestra.{type(error).__name__}: {error}"


def _code(ended: SystemExit) -> int:
    """Return the exit code as the interpreter reads it: a text is a message, and a failure."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1
