# SPDX-License-Identifier: Apache-2.0
"""Processes on many machines: messages over TLS."""
