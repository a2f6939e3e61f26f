# SPDX-License-Identifier: Apache-2.0
"""The worlds that carry out what a strategy asks for: shared memory, sockets, virtual time."""
