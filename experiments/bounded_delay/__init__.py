# SPDX-License-Identifier: Apache-2.0
"""Waiting against staleness: see README.md."""
