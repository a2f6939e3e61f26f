# SPDX-License-Identifier: Apache-2.0
"""`python -m orchestra` is the command `orchestra`."""

from orchestra.cli import main

if __name__ == "__main__":
    main()
