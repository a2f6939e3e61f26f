# SPDX-License-Identifier: Apache-2.0
"""Strategies under a user's own training loop: see `orchestra._prepare`."""
