# SPDX-License-Identifier: Apache-2.0
"""Slow and stale gradients: see README.md."""
