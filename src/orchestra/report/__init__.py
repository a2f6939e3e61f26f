# SPDX-License-Identifier: Apache-2.0
"""What a run's files say: pure functions of a run folder."""
