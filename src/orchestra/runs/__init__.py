# SPDX-License-Identifier: Apache-2.0
"""What a run is on disk and while it goes on: events, facts, budget, status."""
