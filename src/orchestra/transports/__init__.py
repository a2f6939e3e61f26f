# SPDX-License-Identifier: Apache-2.0
"""Worlds that carry out ops for real."""
