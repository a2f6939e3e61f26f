# SPDX-License-Identifier: Apache-2.0
"""Processes of one machine: tensors in memory that all of them map."""
