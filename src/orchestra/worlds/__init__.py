# SPDX-License-Identifier: Apache-2.0
"""The worlds that carry out the ops of a strategy: shared memory, sockets, virtual time."""
