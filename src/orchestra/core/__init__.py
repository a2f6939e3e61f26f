# SPDX-License-Identifier: Apache-2.0
"""All that a strategy may import: the node, its messages, and the ops that the world carries out."""
