# SPDX-License-Identifier: Apache-2.0
"""Ways to reduce gradients, and why they agree: see README.md."""
