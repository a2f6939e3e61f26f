# SPDX-License-Identifier: Apache-2.0
"""Runs looked at from outside while they go on: in a terminal and in a browser."""
