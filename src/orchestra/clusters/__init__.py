# SPDX-License-Identifier: Apache-2.0
"""Where a run takes place: this machine, many machines, or virtual ones."""
