# SPDX-License-Identifier: Apache-2.0
"""The world of processes on one machine: tensors in memory that all of them map."""
