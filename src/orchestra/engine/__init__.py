# SPDX-License-Identifier: Apache-2.0
"""A run from its arguments to its result: checks, the loop of a node, checkpoints, scoring."""
