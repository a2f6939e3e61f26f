# SPDX-License-Identifier: Apache-2.0
"""Measurements of a machine for simulations."""
