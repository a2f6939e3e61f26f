# SPDX-License-Identifier: Apache-2.0
"""Strategy-Switch: from one strategy to another during a run."""
