# SPDX-License-Identifier: Apache-2.0
"""Descriptions of where a run takes place: on this machine, on many machines, or on virtual ones."""
