# SPDX-License-Identifier: Apache-2.0
"""Strategy-Switch: from one strategy to another in the course of a run."""
