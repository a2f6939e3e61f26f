# SPDX-License-Identifier: Apache-2.0
"""Warm-up at 8 times the batch: see README.md."""
