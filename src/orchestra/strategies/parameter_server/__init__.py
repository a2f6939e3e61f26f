# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: the strategy, its consistencies, corrections and filters."""
