# SPDX-License-Identifier: Apache-2.0
"""Measuring a machine, so that simulations know it."""
