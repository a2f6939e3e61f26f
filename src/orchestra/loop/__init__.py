# SPDX-License-Identifier: Apache-2.0
"""Strategies under a training loop of one's own: see `orchestra.loop.preparing`."""
