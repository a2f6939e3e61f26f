# SPDX-License-Identifier: Apache-2.0
"""The strategies, a file each; `catalogue` lists them."""
